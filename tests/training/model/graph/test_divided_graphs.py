"""Graphs of a model that is divided along `tp`: cut where ranks exchange, near the tape, few launches."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
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
from zbmd.training.model.graph.passes import FusedPasses
from zbmd.training.model.tensor_parallel import ParallelGPT
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.pipeline.part import GPTPart

Array = npt.NDArray[Any]
RANKS = 2
CONFIG = GPTConfig(context=16, width=128, heads=2, layers=1, dropout=0.1)


class _Group:
    """Threads that exchange arrays of devices through the host. `TensorGroup` and its collectives."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, RANKS, slots, barrier
        self.blocking: Any = self
        self.calls = list[str]()

    def deadline_ns(self) -> int:
        """See `TensorGroup`."""
        return 0

    def submit(self, operation: Any, /) -> Future[Any]:
        """See `TensorGroup`: units do not call it."""
        raise NotImplementedError(operation)

    def _exchanged(self, name: str, x: Any) -> list[Array]:
        self.calls.append(name)
        self._slots[self.rank] = name, x.get() if hasattr(x, "get") else x
        self._barrier.wait(60)
        every = list(self._slots)
        self._barrier.wait(60)
        assert {one for one, _ in every} == {name}, "all ranks are at the same exchange"
        return [array for _, array in every]

    def all_gather(self, x: Any, /, *, out: Any = None) -> Any:
        """See `TensorCollectives`."""
        made = np.stack(self._exchanged("all_gather", x))
        if out is None:
            return made
        out[...] = made
        return out

    def reduce_scatter(self, x: Any, /, *, out: Any) -> Any:
        """See `TensorCollectives`."""
        every = [one[self.rank].astype(np.float32) for one in self._exchanged("reduce_scatter", x)]
        out[...] = np.sum(every, axis=0).astype(out.dtype)
        return out

    def all_reduce(self, x: Any, /, *, op: str = "sum") -> Any:
        """See `TensorCollectives`."""
        every = [one.astype(np.float32) for one in self._exchanged("all_reduce", x)]
        x[...] = np.sum(every, axis=0).astype(x.dtype)
        return x


def _steps(group: _Group, config: GPTConfig, *, recompute: bool) -> list[tuple[float, Array, int, int]]:
    """Return loss, gradient, launches and exchanges of a step by the tape, and of three by graphs."""
    host = ModelHost(devices=1, run_kernel=by_numpy, seed=group.rank, memory_bytes=1 << 34)
    run = Executor(host.process(), compile=nothing_compiled)
    model = ParallelGPT(config, group, xp=DeviceModule(run), recompute=recompute)
    part, random = GPTPart(model, range(config.layers + 2)), np.random.default_rng(1)
    flat = model.init(0)
    flat += random.standard_normal(flat.size).astype(np.float32) / 20
    weights: Any = run.upload(flat.astype(ml_dtypes.bfloat16))
    found = list[tuple[float, Array, int, int]]()
    for number in range(4):
        model.fused_units = None if not number else model.fused_units or FusedPasses(model, run)
        tokens = np.random.default_rng(2).integers(0, 256, (2, 17))
        batch = model.batch(tokens, global_batch=2, noise=Noise(3, 0, np.array([5, 9])))
        room: Any = run.empty(model.layout.size, ml_dtypes.bfloat16)
        model.layout.clear_padding(room)
        before, exchanged = run.launches, len(group.calls)
        done = part.forward(weights, room, batch, None)
        part.backward(done, None)
        done.let_go()
        loss = float(done.output.data)
        found.append((loss, room.get(), run.launches - before, len(group.calls) - exchanged))
    return found


@pytest.mark.parametrize(
    ("config", "recompute"),
    [(CONFIG, False), (replace(CONFIG, family="gpt2", activation="gelu", dropout=0.0), True)],
    ids=["zbmd", "gpt2, recomputed"],
)
def test_graphs_between_exchanges_are_near_the_tape(config: GPTConfig, recompute: bool) -> None:
    """The same bits again when replayed, one launch a segment, and not an exchange more than the tape."""
    slots, barrier = list[Any]([None] * RANKS), threading.Barrier(RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        groups = [_Group(rank, slots, barrier) for rank in range(RANKS)]
        every = [threads.submit(_steps, group, config, recompute=recompute) for group in groups]
        found = [one.result() for one in every]
    assert found[0][0][0] == found[1][0][0], "the loss is that of all ranks"
    for tape, first, *replayed in found:
        for loss, grads, _, _ in (first, *replayed):
            assert abs(loss - tape[0]) < 1e-3
            wide = tape[1].astype(np.float64)
            assert np.linalg.norm(grads.astype(np.float64) - wide) < 0.04 * np.linalg.norm(wide)
        for loss, grads, launches, exchanges in replayed:
            assert loss == first[0] and grads.tobytes() == first[1].tobytes()
            assert launches <= exchanges + 2 < first[2] < tape[2]
            assert exchanges <= tape[3]
