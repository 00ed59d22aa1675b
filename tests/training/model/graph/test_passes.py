"""Passes of runs of units by fused graphs: the bits of a whole step's graph, and one launch a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.autograd.rng import Noise
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.passes import FusedPasses
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.pipeline.part import GPTPart, Pass
from zbmd.transport.errors import LocalProtocolError

Array = npt.NDArray[Any]
CONFIG = GPTConfig(context=16, width=64, heads=1, layers=1)
DROPPING = replace(CONFIG, dropout=0.1, activation="gelu")


class _Fused:
    """A model whose parts are computed by fused graphs, its weights, and batches."""

    def __init__(self, config: GPTConfig, *, seed: int = 0, recompute: bool = False, count: int = 3) -> None:
        host = ModelHost(devices=1, run_kernel=by_numpy, seed=seed, memory_bytes=1 << 34)
        self.run = Executor(host.process(), compile=nothing_compiled)
        self.model = GPT(config, xp=DeviceModule(self.run), recompute=recompute)
        random = np.random.default_rng(1)
        flat = self.model.init(0) + random.standard_normal(self.model.layout.size).astype(np.float32) / 20
        self.weights: Any = self.run.upload(flat.astype(ml_dtypes.bfloat16))
        self.batches = [
            self.model.batch(
                random.integers(0, 256, (2, 17)), global_batch=6, noise=Noise(3, number, np.array([5, 9]))
            )
            for number in range(count)
        ]

    def room(self) -> Any:
        made: Any = self.run.empty(self.model.layout.size, ml_dtypes.bfloat16)
        self.model.layout.clear_padding(made)
        return made

    def whole(self) -> list[tuple[float, bytes]]:
        """Return the loss and the gradient of each batch, by the graph of a whole step."""
        steps, found = FusedSteps(self.model, self.run), list[tuple[float, bytes]]()
        for batch in self.batches:
            room = self.room()
            loss, play = steps(self.weights, room, batch, None)
            play()
            found.append((float(loss), room.get().tobytes()))
        return found

    def parts(self, *cuts: range) -> list[GPTPart]:
        self.model.fused_units = FusedPasses(self.model, self.run)
        return [GPTPart(self.model, cut) for cut in cuts]


def _forward(fused: _Fused, part: GPTPart, room: Any, batch: Batch, x: Any, **given: Any) -> Pass:
    return part.forward(fused.weights[part.span], room[part.span], batch, x, **given)


@pytest.mark.parametrize(
    ("config", "recompute"), [(CONFIG, False), (DROPPING, True)], ids=["plain", "dropout, recomputed"]
)
def test_units_in_turn_have_the_bits_of_a_whole_step(config: GPTConfig, recompute: bool) -> None:
    """All batches go forwards through each unit, and backwards through each: as ZeRO computes them."""
    fused, launches = _Fused(config, recompute=recompute), list[int]()
    wanted = fused.whole()
    units = fused.parts(*(range(number, number + 1) for number in range(config.layers + 2)))
    rooms = [fused.room() for _ in fused.batches]
    for _ in range(3):
        before, found, came = fused.run.launches, list[list[Pass]](), list[Any]()
        for unit in units:
            came = [one.output.data for one in found[-1]] if found else [None] * len(rooms)
            given = zip(rooms, fused.batches, came, strict=True)
            found.append([_forward(fused, unit, room, batch, x) for room, batch, x in given])
        losses, slopes = [one.output.data for one in found[-1]], came
        for unit, passes in zip(reversed(units), reversed(found), strict=True):
            slopes = [
                unit.backward(one, None if unit.is_last else slope)
                for one, slope in zip(passes, slopes, strict=True)
            ]
            for one in passes:
                one.let_go()
        for (loss, bits), pending, room in zip(wanted, losses, rooms, strict=True):
            assert float(pending) == loss
            assert room.get().tobytes() == bits
        launches.append(fused.run.launches - before)
    assert launches[0] > launches[1] == launches[2] == 2 * len(units) * len(rooms), "one launch a pass"


def _finish(first: GPTPart, last: GPTPart, passes: tuple[Pass, Pass], *, splits: bool) -> None:
    """Do the backward passes of one batch through both parts."""
    slope = last.backward(passes[1], None)
    assert slope is not None
    assert first.backward(passes[0], slope.copy()) is None
    for part, done in zip((first, last), passes, strict=True):
        if splits:
            part.weight_gradient(done)
        done.let_go()


@pytest.mark.parametrize(("seed", "splits"), [(0, False), (1, True), (2, True)])
def test_passes_of_stages_that_overlap_have_the_bits_of_a_whole_step(seed: int, splits: bool) -> None:
    """Activations come in new memory each time, passes overlap, and buckets are handed over early."""
    fused = _Fused(DROPPING, seed=seed, count=4)
    wanted, (first, last) = fused.whole(), fused.parts(range(2), range(2, 3))
    rooms, launches = [fused.room() for _ in fused.batches], list[int]()
    for _ in range(3):
        before, under_way, losses = fused.run.launches, dict[int, tuple[Pass, Pass]](), dict[int, Any]()
        handed = set[int]()
        for number, (room, batch) in enumerate(zip(rooms, fused.batches, strict=True)):
            ready = handed.add if number == 3 else None
            one = _forward(fused, first, room, batch, None, splits=splits, on_grad_ready=ready)
            came = one.output.data.copy()
            under_way[number] = one, _forward(fused, last, room, batch, came, splits=splits)
            losses[number] = under_way[number][1].output.data
            if number:
                _finish(first, last, under_way.pop(number - 1), splits=splits)
        _finish(first, last, under_way.pop(3), splits=splits)
        assert handed == set(range(len(first.layout.slots)))
        for number, (loss, bits) in enumerate(wanted):
            assert float(losses[number]) == loss
            assert rooms[number].get().tobytes() == bits
        launches.append(fused.run.launches - before)
    passes = 2 * 2 * len(rooms)
    assert launches[2] <= passes * (2 if splits else 1) < launches[0], launches


def test_a_third_shape_and_a_loss_scale() -> None:
    """Graphs of the shape that was used longest ago are destroyed, and its memory is used again."""
    fused = _Fused(CONFIG)
    (part,) = fused.parts(range(3))
    room, held = fused.room(), list[int]()
    for count in (1, 2, 3, 1, 2, 3, 1, 2, 3):
        tokens = np.random.default_rng(count).integers(0, 256, (count, 17))
        batch = fused.model.batch(tokens, global_batch=count)
        for _ in range(2):
            done = _forward(fused, part, room, batch, None)
            part.backward(done, None)
            done.let_go()
        held.append(fused.run.held_bytes)
    assert held[-1] < held[5] + (1 << 13), held
    api: Any = fused.run.api
    units = fused.model.fused_units
    assert isinstance(units, FusedPasses)
    done = _forward(fused, part, room, batch, None)
    with pytest.raises(LocalProtocolError, match="loss scale of 2 was given"):
        part.backward(done, None, loss_scale=2.0)
    units.close()
    assert not api._graphs, "destroyed"
