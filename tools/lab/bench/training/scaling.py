"""Weak scaling of data parallel training on one host: N ranks with N times the work, beside one rank.

    python -m zbmd.tools.lab.bench.training.scaling                      2 ranks, 20 rounds of 5 steps each
    python -m zbmd.tools.lab.bench.training.scaling --ranks 4 --rounds 40

A run of `zbmd train` with one rank, the same with N ranks and N times the logical shards, and
the floor, one plain loop of the same steps and N of them that know nothing of each other, take turns in one
run; all but one of them sleep. One thread of BLAS a process. Scaling is the tokens a second of N over those
of one: N is perfect, and the floor is what the machine itself takes, whose cores share caches, memory and
clock. Each is the median over rounds with its 95 % interval; noise is the one rank's second turn of a round
beside its first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.bench.peer_catalogue import ONE_THREAD
from zbmd.tools.bench.peers.control import COMMAND_BYTES_MAX, connect, encode_reply, parse_command, serve
from zbmd.tools.bench.result import Machine, now_utc, this_machine
from zbmd.tools.bench.stats import OURS, ROUNDS_MAX, Ratio, median, ratio_of_medians, turns
from zbmd.tools.bench.workers import CONTROL, Workers
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.demo.overhead import timed_task
from zbmd.tools.train.command import recipe_of
from zbmd.training.config import GPTConfig
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe
from zbmd.training.sharded.run import train as train_by
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

# A process that is timed: it does as many steps as it is asked for, and times each.


class _Turns:
    """Holds a rank's job before each turn until the benchmark asks for it."""

    def __init__(self, sock: socket.socket, commands: BinaryIO) -> None:
        self._sock = sock
        self._commands = commands
        self._left = 0
        self._began_ns = 0
        self._ns: list[float] = []

    def before_step(self, version: int) -> None:
        """A step is over, but before the first. Raises `UserError` once the benchmark has hung up."""
        if version > 1:
            ended_ns = now_ns()
            self._ns.append(float(ended_ns - self._began_ns))
            self._began_ns = ended_ns
            self._left -= 1
        if self._left == 0:
            self._next_turn(version)

    def _next_turn(self, version: int) -> None:
        if version > 1:
            self._sock.sendall(encode_reply(self._ns))
        line = self._commands.readline(COMMAND_BYTES_MAX)
        if not line:
            raise UserError("the benchmark is over.")
        _, _, self._left = parse_command(line)
        self._ns = []
        self._began_ns = now_ns()


def train(options: TrainOptions, control: str) -> None:
    """Be a rank of the job, as far as the benchmark asks."""
    launched = RankEnvironment.read(os.environ)
    rank = 0 if launched is None else launched.rank
    with connect(control, rank) as sock, sock.makefile("rb") as commands:
        uvloop.run(train_by(options, timed_task(_Turns(sock, commands).before_step)))


def train_plainly(options: TrainOptions, control: str, rank: int) -> None:
    """Do the job's steps in a loop, and nothing else."""
    trainer = PlainTrainer(open_recipe(options))

    def measure(_what: str, _nbytes: int, steps: int) -> list[float]:
        times: list[float] = []
        for _ in range(steps):
            began_ns = now_ns()
            trainer.run_step()
            times.append(float(now_ns() - began_ns))
        return times

    serve(control, rank, measure)


def be_rank(words: Sequence[str]) -> None:
    """Serve the benchmark. The words are those of `zbmd train`, and two options of ours.

    Under `zbmd-node run` it is a rank of that job, held before a step until it is asked; with `--plain RANK`
    a loop of the same steps, which talks to nobody.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True)
    parser.add_argument("--plain", type=int, metavar="RANK")
    own, rest = parser.parse_known_args(words)
    launched = RankEnvironment.read(os.environ)
    options = recipe_of(rest, ranks=1 if launched is None else launched.world_size)
    if own.plain is None:
        train(options, own.control)
    else:
        train_plainly(options, own.control, own.plain)


GOAL_PER_RANK: Final = 1.85 / 2
"""Of perfect scaling."""
RANKS_MAX: Final = 32
STEPS_MAX: Final = 10_000
WARMUP_STEPS: Final = 3
MANY, PLAIN_ONE, PLAIN_MANY = "ranks", "plain-one", "plain-many"
MODULE: Final = "zbmd.tools.lab.bench.training.scaling"
RANK: Final = "--rank"
"""The first word of the command line of a process that is timed."""
_ROOM_STEPS: Final = 1_000_000
"""Steps of the jobs, which end when nobody asks for more."""

Times = Mapping[str, Sequence[float]]
"""Milliseconds a step by contender, a number a turn: of the slowest of its processes."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run; the JSON object of `--json`."""

    date: str
    machine: Machine
    ranks: int
    rounds: int
    tokens_a_rank: int
    """A step."""
    step_ms: dict[str, float]
    tokens_per_s: dict[str, float]
    scaling: Ratio
    """Tokens a second of N ranks over those of one."""
    floor: Ratio
    """The same of plain loops."""
    of_floor: Ratio
    """The first over the second, round by round."""
    noise: Ratio

    @property
    def goal(self) -> float:
        """What `scaling` should be at least."""
        return GOAL_PER_RANK * self.ranks


def evaluated(times: Times, *, ranks: int, tokens_a_rank: int) -> Scaling:
    """What `times` come to. The one rank (`OURS`) has two turns a round, the others one."""
    first, last = times[OURS][::2], times[OURS][1::2]
    one = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
    ours = [ranks * a / b for a, b in zip(one, times[MANY], strict=True)]
    plain = [ranks * a / b for a, b in zip(times[PLAIN_ONE], times[PLAIN_MANY], strict=True)]
    medians = {name: median(samples) for name, samples in times.items()}
    processes = {OURS: 1, MANY: ranks, PLAIN_ONE: 1, PLAIN_MANY: ranks}
    perfect = [1.0] * len(one)
    return Scaling(
        date=now_utc(),
        machine=this_machine(),
        ranks=ranks,
        rounds=len(one),
        tokens_a_rank=tokens_a_rank,
        step_ms=medians,
        tokens_per_s={name: 1e3 * processes[name] * tokens_a_rank / ms for name, ms in medians.items()},
        scaling=ratio_of_medians(ours, perfect),
        floor=ratio_of_medians(plain, perfect),
        of_floor=ratio_of_medians(ours, plain),
        noise=ratio_of_medians(first, last),
    )


def measure(shape: Sequence[str], *, ranks: int, shards: int, rounds: int, steps: int) -> Times:
    """Everyone in turn; `shape` is of the command line of `zbmd train`, `shards` of a rank.

    Raises `ContenderFailed`.
    """
    times: dict[str, list[float]] = {name: [] for name in (OURS, MANY, PLAIN_ONE, PLAIN_MANY)}
    with tempfile.TemporaryDirectory(prefix="zbmd-scaling-") as scratch, contextlib.ExitStack() as stack:
        everyone = _started(stack, Path(scratch), shape, ranks=ranks, shards=shards)
        for workers in everyone.values():
            workers.ask("steps", 0, WARMUP_STEPS)
        for order in turns([MANY, PLAIN_ONE, PLAIN_MANY], rounds):
            for name in order:
                found = everyone[name].ask("steps", 0, steps)
                times[name].append(max(sum(one) / len(one) for one in found) / 1e6)
    return times


def _started(
    stack: contextlib.ExitStack, scratch: Path, shape: Sequence[str], *, ranks: int, shards: int
) -> dict[str, Workers]:
    """The processes of all, ready to do a step."""

    def command(of: int, *own: str) -> list[str]:
        """Of `of` ranks; each job writes to a directory of its own."""
        out = scratch / "-".join(("run", str(of), *own))
        asked = [*own, "--control", CONTROL, "--shards", str(of * shards), "--out", str(out)]
        never = ["--checkpoint-every", "0", "--evaluate-every", "0", "--steps", str(_ROOM_STEPS)]
        return ["-m", MODULE, RANK, *asked, *never, *shape]

    def job(of: int) -> list[list[str]]:
        launched = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", str(of)]
        return [[*launched, "--on-loss", "stop", *command(of)]]

    def loops(of: int) -> list[list[str]]:
        return [[sys.executable, *command(1, "--plain", str(rank))] for rank in range(of)]

    commands = {OURS: job(1), MANY: job(ranks), PLAIN_ONE: loops(1), PLAIN_MANY: loops(ranks)}
    numbers = {OURS: 1, MANY: ranks, PLAIN_ONE: 1, PLAIN_MANY: ranks}
    return {
        name: stack.enter_context(Workers(name, these, ranks=numbers[name], environment=ONE_THREAD))
        for name, these in commands.items()
    }


def table(found: Scaling) -> str:
    """The result as lines of text."""
    names = {
        OURS: "zbmd, 1 rank",
        MANY: f"zbmd, {found.ranks} ranks",
        PLAIN_ONE: "plain, 1 process",
        PLAIN_MANY: f"plain, {found.ranks} processes",
    }
    lines = [f"{'':20} {'step ms':>9} {'tokens/s':>10}"]
    for name, told in names.items():
        lines.append(f"{told:20} {found.step_ms[name]:9.2f} {found.tokens_per_s[name]:10,.0f}")
    met = "met" if found.scaling.value >= found.goal else "missed"
    lines += [
        f"scaling           {found.scaling:.3f}  goal {found.goal:.2f}: {met}",
        f"floor             {found.floor:.3f}",
        f"part of the floor {found.of_floor:.3f}",
        f"noise             {found.noise:.3f}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("lab.bench.training.scaling", __doc__)
    default = GPTConfig()
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of everyone (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (%(default)s)")
    parser.add_argument("--shards", type=int, default=12, help="of a rank (%(default)s)")
    parser.add_argument("--sequences", type=int, default=2, help="of a shard (%(default)s)")
    for name in ("context", "width", "heads", "layers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name), help="(%(default)s)")
    parser.add_argument("--data", help="file, directory or glob to train on")
    add_json(parser)
    return parser


def _checked(arguments: argparse.Namespace) -> list[str]:
    """The model's part of the jobs' command lines. Raises `UserError`."""
    for name, least, most in (("ranks", 2, RANKS_MAX), ("rounds", 1, ROUNDS_MAX), ("steps", 1, STEPS_MAX)):
        if not least <= getattr(arguments, name) <= most:
            raise UserError(f"--{name} is {least} to {most}.")
    shape = {name: getattr(arguments, name) for name in ("context", "width", "heads", "layers")}
    GPTConfig(**shape)
    shape["sequences-per-shard"] = arguments.sequences
    if arguments.data is not None:
        shape["data"] = arguments.data
    return [part for name, value in shape.items() for part in (f"--{name}", str(value))]


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit code 1: a process failed, or the goal is missed; 2: bad input."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [RANK]:
        be_rank(words[1:])
        return 0
    arguments = _parser().parse_args(words)
    shape = _checked(arguments)
    times = measure(
        shape,
        ranks=arguments.ranks,
        shards=arguments.shards,
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    tokens = arguments.shards * arguments.sequences * arguments.context
    found = evaluated(times, ranks=arguments.ranks, tokens_a_rank=tokens)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(
            f"# {found.date}  {found.machine}; "
            f"{found.rounds} rounds of {arguments.steps} steps, {tokens:,} tokens a rank and step"
        )
        print(table(found))
    return int(found.scaling.value < found.goal)


if __name__ == "__main__":
    sys.exit(main())
