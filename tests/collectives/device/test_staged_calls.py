"""Calls with operands on a (modelled) device, carried out on the host in pieces; and gates of streams."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.devices.cuda_model import ModelHost, ModelProcess, Undefined

from zbmd.collectives.device.staged_calls import (
    IN_FLIGHT,
    SLOT_BYTES,
    SLOTS,
    CallStream,
    Cut,
    Gates,
    PinnedSlots,
)
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of

Array = NDArray[Any]


class Flat:
    """An operand in the memory of a modelled device."""

    def __init__(self, process: ModelProcess, values: Array, *, loads: bool, stores: bool) -> None:
        self.size, self.dtype, self.loads, self.stores = values.size, values.dtype, loads, stores
        self.process, self.address = process, process.malloc(values.nbytes)
        self.held = values.copy()
        self.leave()
        if values.nbytes:
            stream = process.default_stream
            process.memcpy_async(self.address, address_of(self.held), values.nbytes, stream)

    def leave(self) -> None:
        self.array = np.broadcast_to(np.zeros(1, self.dtype), (self.size,))

    def values(self) -> Array:
        """Its elements, as the default stream sees them."""
        into = np.empty(self.size, self.dtype)
        if into.nbytes:
            stream = self.process.default_stream
            self.process.memcpy_async(address_of(into), self.address, into.nbytes, stream)
            self.process.stream_synchronize(stream)
        return into


@pytest.fixture
def arena() -> Any:
    segment = Segment.create(slot=1, incarnation=1, arena_bytes=64 << 20, inbox_bytes=4096)
    yield segment.arena
    segment.close()


def setting(arena: Arena | None, seed: int = 0) -> tuple[ModelProcess, PinnedSlots, CallStream]:
    process = ModelHost(devices=1, seed=seed).process()
    slots = PinnedSlots(process, arena)
    return process, slots, CallStream(process, slots)


@pytest.mark.parametrize("seed", range(12))
def test_pieces_have_the_results_of_the_whole(seed: int, arena: Arena) -> None:
    """Operands of several blocks, read, written or both, cut or not, with and without page-locked memory."""
    draw = random.Random(seed)
    process, _, stream = setting(arena if seed % 3 else None, seed)
    blocks = draw.choice([1, 2, 3])
    dtype = np.dtype(draw.choice(["f4", "f8", "u1", "i2"]))
    count = draw.choice([0, 1, 63, SLOT_BYTES // dtype.itemsize // (2 * blocks + 1) * 3 + draw.randrange(50)])
    numbers = np.random.default_rng(seed)
    x, y, z = (
        numbers.integers(0, 50, size).astype(dtype) for size in (count, blocks * count, blocks * count)
    )
    one = Flat(process, x, loads=True, stores=False)
    both = Flat(process, y, loads=True, stores=True)
    out = Flat(process, z, loads=False, stores=True)
    runs: list[int] = []

    def operation() -> None:
        rows = both.array.reshape(blocks, -1)
        out.array.reshape(blocks, -1)[:] = rows + one.array
        rows[:] = rows * 2
        runs.append(one.array.size)

    cut = Cut(count, 2 * blocks + 1) if seed % 2 else None
    after = stream.recorded(process.default_stream)
    stream.carry_out([one, both, out], after, operation, lambda: None, cut=cut)
    assert sum(runs) == count and len(runs) > (1 if cut and count > 63 else 0)
    rows = y.reshape(blocks, -1) if count else y
    assert (out.values() == (rows + x).reshape(-1)).all() and (both.values() == (rows * 2).reshape(-1)).all()
    assert (one.values() == x).all()
    process.host.drain()
    stream.close()


def test_a_call_that_fails_gives_its_memory_back(arena: Arena) -> None:
    process, slots, stream = setting(arena)
    x = Flat(process, np.ones(SLOT_BYTES // 4 * 3, np.float32), loads=True, stores=True)

    def fails() -> None:
        if x.array.size != SLOT_BYTES // 4 or fails.__dict__.setdefault("runs", 0):
            raise ValueError("in the second piece")
        fails.__dict__["runs"] = 1

    with pytest.raises(ValueError, match="second piece"):
        after = stream.recorded(process.default_stream)
        stream.carry_out([x], after, fails, lambda: None, cut=Cut(x.size, 1))
    taken = [slots.take(SLOT_BYTES)[0] for _ in range(SLOTS + 1)]
    assert sorted(taken) == [-1, *range(SLOTS)], "the last one is of ordinary memory"
    with pytest.raises(ValueError, match="read-only"):
        x.array[0] = 1
    process.host.failed = CudaFault("the device has fallen off the bus")
    with pytest.raises(CudaFault, match="bus"):
        stream.recorded(process.default_stream)


def test_calls_wait_for_no_slot_that_another_call_has(arena: Arena) -> None:
    """Two groups whose calls use all slots: a rank that waited for one could wait for ever."""
    process, slots, stream = setting(arena)
    held = [slots.take(1)[0] for _ in range(SLOTS - IN_FLIGHT + 1)]
    x = Flat(process, np.arange(SLOT_BYTES, dtype=np.float32), loads=True, stores=True)

    def double() -> None:
        x.array *= 2

    after = stream.recorded(process.default_stream)
    stream.carry_out([x], after, double, lambda: None, cut=Cut(x.size, 1))
    assert (x.values() == np.arange(SLOT_BYTES) * 2.0).all()
    for slot in held:
        slots.give_back(slot)


def test_a_stream_waits_at_a_gate_and_no_thread_does(arena: Arena) -> None:
    process, _, stream = setting(arena)
    gates = Gates(process)
    gate = gates.take()
    assert gate is not None and not gate.is_waited_for
    x = Flat(process, np.zeros(8, np.float32), loads=True, stores=True)
    after = stream.recorded(process.default_stream)
    gate.hold(process.default_stream)
    assert gate.is_waited_for

    def raise_by_one() -> None:
        x.array += 1

    def other_thread() -> None:
        stream.carry_out([x], after, raise_by_one, lambda: None, cut=Cut(8, 1))
        gate.open()

    with pytest.raises(Undefined, match="waits for the whole device"):
        process.host_alloc(4096)  # what may not happen between
    carrying = threading.Thread(target=other_thread)
    carrying.start()
    assert (x.values() == 1).all(), "the default stream went past the gate too early"
    carrying.join()
    gate.open()
    again = gates.take()
    assert again is not None
    gate.hold(process.default_stream)  # of a call that is over: it stays open
    assert (x.values() == 1).all()
    again.open()


def test_there_is_a_bound_to_gates() -> None:
    process = ModelHost(devices=1).process()
    gates = Gates(process)
    gates._free = gates._free[:1]
    first = gates.take()
    assert first is not None and gates.take() is None
    first.open()
    assert gates.take() is not None

    class Older(ModelProcess):
        """A device whose streams wait for no numbers."""

        def waits_for_values(self) -> bool:
            return False

    assert Gates(Older(process.host, 0)).take() is None
