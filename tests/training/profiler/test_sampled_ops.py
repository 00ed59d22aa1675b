"""The ops of sampled steps: all of them, with the FLOPs of the model, once each, and no bit changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import active_watch, watched
from zbmd.training.autograd.tape import Parameter, Tape, Tensor, WatchedTape
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.pipeline.part import GPTPart, layers_in
from zbmd.training.profiler.lines import OPS_MAX, OpRow, RankProfile, read_profiles
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.profiler.ring import read_ring, ring_path
from zbmd.transport.native._native import now_ns

PLAIN = GPTConfig(context=8, width=16, heads=2, layers=2)
BIASED = GPTConfig(family="gpt2", activation="gelu", context=8, width=16, heads=2, layers=2)
SHARDS = 2
HOOK_NS = 300_000_000


class Sampled:
    """Steps of a model in one process, of which every `every`-th is sampled."""

    def __init__(
        self, directory: Path, config: GPTConfig, *, every: int = 2, recompute: bool = False
    ) -> None:
        self.model = GPT(config, recompute=recompute)
        self.directory = directory
        self.params = self.model.init(1) + np.float32(0.01)
        self.tokens = np.arange(3 * 9, dtype=np.int64).reshape(3, 9) * 7 % 256
        self.profiler = open_profiler(directory, self.model, sequences=3, ops_every=every, environ={})

    def run(self, steps: int) -> list[Array]:
        found: list[Array] = []
        with self.profiler as profiler, profiler.recording():
            for step in range(1, steps + 1):
                profiler.begin_step(step)
                with profiler.operations():
                    found.append(self._step())
        return found

    def _step(self) -> Array:
        grads = np.zeros_like(self.params)
        for _ in range(SHARDS):
            self.model.loss_and_grads(self.params, grads, self.tokens, global_batch=3)
        with watched("update", self.params, grads):
            return grads

    @property
    def life(self) -> RankProfile:
        (life,) = read_profiles(self.directory)
        return life


def of(rows: tuple[OpRow, ...], op: str, which: str) -> OpRow:
    (found,) = [row for row in rows if (row.op, row.which) == (op, which)]
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", [PLAIN, BIASED], ids=["zbmd", "gpt2"])
def test_the_flops_of_the_ops_are_those_of_the_step(
    tmp_path: Path, config: GPTConfig, recompute: bool
) -> None:
    made = Sampled(tmp_path, config, recompute=recompute)
    made.run(4)
    life = made.life
    assert [line.step for line in life.ops] == [2, 4]
    for line in life.ops:
        (step,) = [step for step in life.steps if step.step == line.step]
        assert sum(row.flops for row in line.ops) == step.hardware_flops > 0
        assert sum(row.execute_ns for row in line.ops) <= step.wall_ns
        passes = SHARDS * (1 + recompute)
        attention = of(line.ops, "causal_attention", "forward")
        assert attention.calls == passes * config.layers
        assert (attention.shape, attention.dtype) == ("24x16", "float32")
        assert of(line.ops, "causal_attention", "backward").calls == SHARDS * config.layers
        update = of(line.ops, "update", "work")
        assert (update.calls, update.nbytes) == (1, 2 * made.params.nbytes)


def test_rows_are_by_shape_and_have_the_bytes_of_their_arrays(tmp_path: Path) -> None:
    made = Sampled(tmp_path, PLAIN, every=1)
    made.run(1)
    (line,) = made.life.ops
    shapes = {row.shape: row for row in line.ops if (row.op, row.which) == ("linear", "forward")}
    rows, width = 24, 16
    assert set(shapes) == {"24x48, 16x48", "24x16, 16x16", "24x64, 16x64", "24x16, 64x16", "24x256, 16x256"}
    packed = shapes["24x48, 16x48"]
    assert packed.calls == SHARDS * PLAIN.layers
    assert packed.nbytes == packed.calls * 4 * (rows * width + width * 3 * width + rows * 3 * width)
    norms = [row for row in line.ops if row.op == "rms_norm"]
    assert {row.which for row in norms} == {"forward", "backward"} and not any(row.flops for row in norms)
    names = {row.op for row in line.ops}
    assert names == {"embedding", "linear", "rms_norm", "squared_relu", "causal_attention", "cross_entropy",
                     "update"}  # fmt: skip
    spans = read_ring(ring_path(tmp_path, 0, 1))
    titles = {spans.operations[number] for number in spans.records["category"][spans.records["track"] == 2]}
    assert {"linear forward", "linear backward", "update work"} <= titles


def test_a_step_that_is_not_sampled_has_plain_tapes_and_the_same_bits(tmp_path: Path) -> None:
    sampled, plain = (
        Sampled(tmp_path / name, PLAIN, every=every).run(3) for name, every in (("a", 2), ("b", 0))
    )
    for one, other in zip(sampled, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    made = Sampled(tmp_path / "c", PLAIN)
    with made.profiler as profiler:
        for step, kind in ((1, Tape), (2, WatchedTape), (3, Tape)):
            profiler.begin_step(step)
            with profiler.operations():
                assert type(Tape(np)) is kind
            assert active_watch() is None and type(Tape(np)) is Tape


def test_the_hook_of_a_final_gradient_counts_for_no_op(tmp_path: Path) -> None:
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    took: list[int] = []

    def ready(_: int) -> None:
        until_ns = now_ns() + HOOK_NS
        while now_ns() < until_ns:
            pass
        took.append(1)

    with profiler, profiler.recording():
        profiler.begin_step(1)
        with profiler.operations():
            tape, data = Tape(np), np.ones((4, 4), np.float32)
            weight = Parameter(data, np.zeros_like(data), 0, ready)
            x = Tensor(data.copy())
            y = tape.record(x.data @ data, lambda dy: weight.receive(lambda out: np.copyto(out, dy)), weight)
            tape.play(y, np.ones_like(y.data))
        line = profiler.end_step()
    assert took and line is not None
    (ops,) = read_profiles(tmp_path)[0].ops
    (backward,) = [row for row in ops.ops if row.which == "backward"]
    assert backward.execute_ns < HOOK_NS


def test_gradients_that_a_schedule_computes_later_have_rows_of_their_own(tmp_path: Path) -> None:
    """Together with the rest of the backward pass they have the FLOPs of one that computes all at once."""
    model = GPT(PLAIN)
    part = GPTPart(model, range(layers_in(PLAIN)))
    params, batch = model.init(1), model.batch(np.arange(27, dtype=np.int64).reshape(3, 9), global_batch=3)
    found: dict[bool, tuple[tuple[OpRow, ...], Array]] = {}
    for splits in (False, True):
        grads = np.zeros_like(params)
        profiler = open_profiler(tmp_path / str(splits), model, sequences=3, ops_every=1, environ={})
        with profiler, profiler.recording():
            profiler.begin_step(1)
            with profiler.operations():
                made = part.forward(params, grads, batch, None, splits=splits)
                part.backward(made, None)
                if splits:
                    part.weight_gradient(made)
        found[splits] = read_profiles(tmp_path / str(splits))[0].ops[0].ops, grads
    rows, grads = found[True]
    np.testing.assert_array_equal(grads, found[False][1])
    products = [row for row in rows if row.op == "linear"]
    later = {(row.shape, row.calls): row.flops for row in products if row.which == "weights"}
    assert later == {(row.shape, row.calls): row.flops for row in products if row.which == "forward"} != {}
    assert all(row.execute_ns > 0 for row in rows if row.which == "weights")
    assert {row.op for row in rows if row.which == "weights"} >= {"linear", "rms_norm", "embedding"}
    assert sum(row.flops for row in rows) == sum(row.flops for row in found[False][0])
    assert not any(row.which == "weights" for row in found[False][0])


def test_the_rows_of_a_step_are_bounded(tmp_path: Path) -> None:
    profiler: Profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    calls = OPS_MAX + 50
    with profiler:
        profiler.begin_step(1)
        with profiler.operations():
            for size in range(calls):
                with watched("update", np.zeros(size, np.uint8)):
                    pass
        profiler.begin_step(2)
        with profiler.operations(), watched("update", np.zeros(2 * OPS_MAX, np.uint8)):
            pass
    ((line, later),) = (life.ops for life in read_profiles(tmp_path))
    assert len(line.ops) < OPS_MAX and sum(row.calls for row in line.ops) == calls
    assert [(row.shape, row.calls) for row in later.ops] == [(str(2 * OPS_MAX), 1)], "the next one has room"
