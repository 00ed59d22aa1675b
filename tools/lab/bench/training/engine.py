"""Time the training engine on this CPU: each operator, forward and backward, and the whole step.

    python -m zbmd.tools.lab.bench.training.engine [--vs torch] [--threads 1] [--samples 2] [--json]

One process and one thread of BLAS unless told otherwise; PyTorch (eager) takes its turns in the same
process, with the same model, dtype, batch and threads. A ratio is our time over theirs, the median over
rounds with its 95 % interval, below 1 where we are faster; in the column `noise` we are compared with
ourselves.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.bench.stats import OURS, ROUNDS_MAX, Ratio, median, ratio_of_medians, turns
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.training import ops
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import VOCABULARY, GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.ops import EPSILON
from zbmd.training.optim.clip import clip_scale, global_norm
from zbmd.training.optim.elementwise import AdamW, AdamWConfig, AdamWState
from zbmd.training.step.recipe import keep_freed_memory
from zbmd.transport.errors import UserError

# The operators and the training step of our GPT in eager PyTorch, in its best documented configuration for a
# CPU: `scaled_dot_product_attention`, `fused=True` AdamW, `foreach=True` clipping, gradients set to None.


class TorchEngine:
    """The model of `config` and one batch, on this thread's PyTorch."""

    def __init__(self, config: GPTConfig, tokens: npt.NDArray[np.uint8], threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._functional: Any = importlib.import_module("torch.nn.functional")
        self._torch.set_num_threads(threads)
        self.version = str(self._torch.__version__)
        self._config = config
        wide = self._torch.tensor(tokens.astype(np.int64))
        self._inputs, self._targets = wide[:, :-1], wide[:, 1:].reshape(-1)
        self._samples, self._length = self._inputs.shape
        back = np.arange(self._length)[:, None] - np.arange(self._length)
        by_distance = GPT(config).distance_bias[:, np.abs(back)]
        self._mask = self._torch.tensor(np.where(back < 0, -np.inf, by_distance).astype(np.float32))[None]
        self._torch.manual_seed(0)

    def _leaf(self, *shape: int) -> Any:
        return (self._torch.randn(*shape) * 0.1).requires_grad_()

    def operators(self) -> dict[str, Run]:
        """Forward and backward of each operator, at the sizes of the model."""
        config, functional = self._config, self._functional
        rows, width, hidden = self._samples * self._length, self._config.width, 4 * self._config.width
        x, wide, packed = self._leaf(rows, width), self._leaf(rows, hidden), self._leaf(rows, 3 * width)
        logits, table = self._leaf(rows, VOCABULARY), self._leaf(VOCABULARY, width)
        gain, bias, matrix = self._leaf(width), self._leaf(width), self._leaf(hidden, width)
        flat = self._inputs.reshape(-1)

        def both(leaves: list[Any], forward: Callable[[], Any]) -> Run:
            def run() -> None:
                for leaf in leaves:
                    leaf.grad = None
                y = forward()
                y.backward(self._torch.ones_like(y))

            return run

        return {
            "linear": both([x, matrix], lambda: functional.linear(x, matrix)),
            "rms_norm": both([x, gain], lambda: functional.rms_norm(x, (width,), gain, EPSILON)),
            "layer_norm": both([x, gain, bias], lambda: functional.layer_norm(x, (width,), gain, bias)),
            "squared_relu": both([wide], lambda: functional.relu(wide).square()),
            "gelu": both([wide], lambda: functional.gelu(wide, approximate="tanh")),
            "attention": both([packed], lambda: self._attention(packed, config.heads)),
            "cross_entropy": both([logits], lambda: functional.cross_entropy(logits, self._targets)),
            "embedding": both([table], lambda: functional.embedding(flat, table)),
        }

    def step(self) -> Run:
        """One training step: forward, backward, clipping by norm, AdamW."""
        config, torch = self._config, self._torch
        width, hidden = config.width, 4 * config.width
        shapes = [(3 * width, width), (width, width), (hidden, width), (width, hidden)]
        blocks = [[self._leaf(*shape) for shape in shapes] for _ in range(config.layers)]
        gains = [torch.ones(width, requires_grad=True) for _ in range(2 * config.layers + 1)]
        table, head = self._leaf(VOCABULARY, width), self._leaf(VOCABULARY, width)
        parameters = [table, head, *gains, *(weight for block in blocks for weight in block)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        rest = list(range(len(gains)))

        def forward() -> Any:
            linear = self._functional.linear
            x = table[self._inputs.reshape(-1)]
            for index, (qkv, proj, into, out) in enumerate(blocks):
                x = x + linear(
                    self._attention(linear(self._norm(x, gains[2 * index]), qkv), config.heads), proj
                )
                x = x + linear(self._activation(linear(self._norm(x, gains[2 * index + 1]), into)), out)
            logits = linear(self._norm(x, gains[rest[-1]]), head)
            return self._functional.cross_entropy(logits, self._targets)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            forward().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()

        return run

    def _norm(self, x: Any, gain: Any) -> Any:
        return self._functional.rms_norm(x, x.shape[-1:], gain, EPSILON)

    def _activation(self, x: Any) -> Any:
        if self._config.activation == "gelu":
            return self._functional.gelu(x, approximate="tanh")
        return self._functional.relu(x).square()

    def _attention(self, packed: Any, heads: int) -> Any:
        depth = packed.shape[1] // (3 * heads)
        split = packed.view(self._samples, self._length, 3, heads, depth).permute(2, 0, 3, 1, 4)
        mixed = self._functional.scaled_dot_product_attention(
            split[0], split[1], split[2], attn_mask=self._mask, scale=1.0 / math.sqrt(depth)
        )
        return mixed.transpose(1, 2).reshape(packed.shape[0], -1)


Run = Callable[[], object]
TORCH = "torch"
TURN_S = 0.05
"""Time that a turn repeats an operator."""
REPEATS_MAX = 1000
THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operator, or the step."""

    what: str
    time_us: float
    noise: Ratio
    torch_us: float | None = None
    ratio: Ratio | None = None


class Engine:
    """Our operators and our step, at the sizes of one model and batch."""

    def __init__(self, config: GPTConfig, tokens: npt.NDArray[np.uint8]) -> None:
        self._model = GPT(config)
        self._tokens = tokens
        self._random = np.random.default_rng(0)

    def _array(self, *shape: int) -> npt.NDArray[np.float32]:
        return (self._random.standard_normal(shape) * 0.1).astype(np.float32)

    def operators(self) -> dict[str, Run]:
        """Forward and backward of each operator."""
        config, samples = self._model.config, len(self._tokens)
        inputs, targets = self._tokens[:, :-1].reshape(-1), self._tokens[:, 1:].reshape(-1)
        rows, width, hidden = len(inputs), config.width, 4 * config.width
        x, wide, packed = self._array(rows, width), self._array(rows, hidden), self._array(rows, 3 * width)
        logits, table, matrix = (
            self._array(rows, VOCABULARY),
            self._array(VOCABULARY, width),
            self._array(width, hidden),
        )
        gain, shift, bias = self._array(width), self._array(width), self._model.distance_bias

        def both(op: Callable[[Tape, list[Parameter]], Tensor], *data: npt.NDArray[np.float32]) -> Run:
            grads = [np.empty_like(array) for array in data]

            def run() -> None:
                tape = Tape(np)
                pairs = enumerate(zip(data, grads, strict=True))
                tape.backward(op(tape, [Parameter(one, grad, i, None) for i, (one, grad) in pairs]))

            return run

        weight = 1.0 / rows
        return {
            "linear": both(lambda t, p: ops.linear(t, Tensor(x), p[0]), matrix),
            "rms_norm": both(lambda t, p: ops.rms_norm(t, Tensor(x), p[0]), gain),
            "layer_norm": both(lambda t, p: ops.layer_norm(t, Tensor(x), p[0], p[1]), gain, shift),
            "squared_relu": both(lambda t, _: ops.squared_relu(t, Tensor(wide))),
            "gelu": both(lambda t, _: ops.gelu(t, Tensor(wide))),
            "attention": both(
                lambda t, _: ops.causal_attention(t, Tensor(packed), bias, batch=samples, heads=config.heads)
            ),
            "cross_entropy": both(lambda t, _: ops.cross_entropy(t, Tensor(logits), targets, weight=weight)),
            "embedding": both(lambda t, p: ops.embedding(t, inputs, p[0]), table),
        }

    def step(self) -> Run:
        """One training step: forward, backward, clipping by norm, AdamW."""
        model, samples = self._model, len(self._tokens)
        weights, grads = model.init(0), np.zeros(model.layout.size, dtype=np.float32)
        states = [AdamWState(weights, grads.copy(), grads.copy()) for _ in range(1)]
        states.append(AdamWState(*(np.zeros_like(grads) for _ in range(3))))
        optimizer = AdamW(AdamWConfig(), model.layout)

        def run() -> None:
            model.loss_and_grads(states[0].weights, grads, self._tokens, global_batch=samples)
            scale = clip_scale(global_norm(grads, xp=np), limit=1.0)
            optimizer.update(states[0], states[1], grads, step=0, learning_rate=1e-3, grad_scale=scale)
            states.reverse()

        return run


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Time all of `runs` in turn; µs by contender, the median of each turn, ourselves twice a round."""
    repeats = {who: _repeats(run) for who, run in runs.items()}
    times: dict[str, list[float]] = {who: [] for who in runs}
    for turn in turns([who for who in runs if who != OURS], rounds):
        for who in turn:
            samples: list[float] = []
            for _ in range(repeats[who]):
                began_ns = time.perf_counter_ns()
                runs[who]()
                samples.append((time.perf_counter_ns() - began_ns) / 1e3)
            times[who].append(median(samples))
    return times


def _repeats(run: Run) -> int:
    run()
    began_s = time.perf_counter()
    run()
    return max(1, min(REPEATS_MAX, int(TURN_S / max(1e-6, time.perf_counter() - began_s))))


def row(what: str, runs: dict[str, Run], rounds: int) -> EngineRow:
    """Measure one operator."""
    times = measure(runs, rounds)
    first, last = times[OURS][::2], times[OURS][1::2]
    ours = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
    theirs = times.get(TORCH)
    return EngineRow(
        what=what,
        time_us=median(ours),
        noise=ratio_of_medians(first, last),
        torch_us=None if theirs is None else median(theirs),
        ratio=None if theirs is None else ratio_of_medians(ours, theirs),
    )


def rows(config: GPTConfig, samples: int, rounds: int, threads: int, *, beside: bool) -> list[EngineRow]:
    """Measure everything. Raises `UserError` where PyTorch is wanted and missing."""
    keep_freed_memory()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (samples, config.context + 1), dtype=np.uint8)
    engine, peer = Engine(config, tokens), None
    if beside:
        try:
            peer = TorchEngine(config, tokens, threads)
        except ImportError as error:
            raise UserError("PyTorch is not installed here: pip install 'zbmd[torch]'.") from error
    ours, theirs = engine.operators(), {} if peer is None else peer.operators()
    cases = {what: {OURS: run} | ({TORCH: theirs[what]} if theirs else {}) for what, run in ours.items()}
    cases["step"] = {OURS: engine.step()} | ({} if peer is None else {TORCH: peer.step()})
    return [row(what, runs, rounds) for what, runs in cases.items()]


def table(found: Sequence[EngineRow], tokens_a_step: int) -> str:
    """The rows as lines of text, and tokens a second."""
    lines = [f"{'':14} {'zbmd us':>10} {'torch us':>10}  {'ratio':<21} noise"]
    for one in found:
        torch_us = "" if one.torch_us is None else f"{one.torch_us:.1f}"
        times = f"{one.what:14} {one.time_us:10.1f} {torch_us:>10}"
        lines.append(f"{times}  {format(one.ratio) if one.ratio else '':<21} {one.noise}")
    step = found[-1]
    lines.append(f"tokens a second: zbmd {tokens_a_step / step.time_us * 1e6:,.0f}")
    if step.torch_us is not None:
        theirs = tokens_a_step / step.torch_us * 1e6
        lines[-1] += f", torch {theirs:,.0f}: {step.torch_us / step.time_us:.2f} of theirs"
    return "\n".join(lines)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure in a process with the threads wanted, and print."""
    default = GPTConfig()
    parser = script_parser("lab.bench.training.engine", __doc__)
    parser.add_argument("--vs", choices=[TORCH], help="the peer to run in turn")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each (%(default)s)")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="sequences a step (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="turns of everyone (%(default)s)")
    for name in ("context", "width", "heads", "layers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name), help="(%(default)s)")
    parser.add_argument("--activation", choices=["relu2", "gelu"], default=default.activation)
    add_json(parser)
    arguments = parser.parse_args(argv)
    for name, most in (("threads", 1024), ("samples", 65536), ("rounds", ROUNDS_MAX)):
        if not 1 <= getattr(arguments, name) <= most:
            parser.error(f"--{name} is 1 to {most}")
    if os.environ.get(THREADS_VARIABLE) != str(
        arguments.threads
    ):  # OpenBLAS reads it once, when it is loaded
        again = [
            sys.executable,
            "-m",
            "zbmd.tools.lab.bench.training.engine",
            *(sys.argv[1:] if argv is None else argv),
        ]
        return subprocess.run(again, env=os.environ | _threads(arguments.threads), check=False).returncode
    return _report(arguments)


def _threads(threads: int) -> dict[str, str]:
    return {THREADS_VARIABLE: str(threads), "OMP_NUM_THREADS": str(threads)}


def _report(arguments: argparse.Namespace) -> int:
    config = GPTConfig(
        context=arguments.context,
        width=arguments.width,
        heads=arguments.heads,
        layers=arguments.layers,
        activation=arguments.activation,
    )
    found = rows(
        config, arguments.samples, arguments.rounds, arguments.threads, beside=arguments.vs is not None
    )
    if arguments.json:
        report = {"date": now_utc(), "machine": this_machine(), "model": config, "rows": found}
        print(msgspec.json.encode(report).decode())
        return 0
    print(f"# {now_utc()}  {this_machine()}; {arguments.threads} threads; {config}")
    print(table(found, arguments.samples * arguments.context))
    return 0


if __name__ == "__main__":
    sys.exit(main())
