"""Calls of host operations with operands on a device: through page-locked memory, piece by piece.

A caller that knows its operands by address, as PyTorch's process groups do, describes them as `Operand`s and
carries the operation out on `Operand.array`, which is memory of the host. While the host works on one piece,
the device copies the next one in and the last one out. What the device copies is ordered behind an event that
was recorded when the call was made, not when it runs: a stream may wait for the call meanwhile.

A `Gate` keeps a stream waiting for the end of a call without a thread of the host that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.host_copy import page_locked
from zbmd.transport.clock.patience import PATIENCE
from zbmd.transport.cuda.api import CudaApi, CudaFault
from zbmd.transport.errors import DeadlineExceeded
from zbmd.transport.memory.arena import Arena
from zbmd.transport.native._native import address_of

SLOT_BYTES: Final = 2 << 20
"""Of page-locked memory, for all operands of one piece."""
SLOTS: Final = 8
"""Of a device in this process; an operation takes two."""
IN_FLIGHT: Final = 2
"""Pieces of one call that are on their way at once."""
ALIGNMENT: Final = 64
LOOK_S, LOOK_S_MAX = 20e-6, 1e-3
"""Seconds between two looks for a copy that is under way, at first and at most."""
GATES: Final = 16_384
"""Calls under way for which a stream may wait, of a device in this process."""

Array = NDArray[Any]


class Operand(Protocol):
    """Flat memory of a device that an operation reads (`loads`), writes (`stores`), or both.

    array: the elements as the operation finds them while it runs, on the host or where they are.
    """

    address: int
    size: int
    dtype: np.dtype[Any]
    loads: bool
    stores: bool
    array: Array

    def leave(self) -> None:
        """Let go of the host's memory."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Each operand of a call consists of blocks of `count` elements, of which a piece of each takes a part.

    blocks: of the rank with most of them, in all its operands: the pieces are the same on all ranks.
    as_placed: the operation hands its operands to a communicator as they are, which takes them on a device.
    """

    count: int
    blocks: int
    as_placed: bool = False


class DeviceLate(DeadlineExceeded):
    """The device did not come to a call in time."""


def wait_for_event(api: CudaApi, event: int, end_ns: int, *, spin_s: float = 0.0) -> None:
    """Return once what an event stands for is done. spin_s: how long to look for it without a pause.

    end_ns: when that is too late, in time of the monotonic clock; 0: never. Raises `DeviceLate`, `CudaFault`.
    """
    pause_s, spins_until_s = LOOK_S, time.monotonic() + spin_s
    while not api.event_query(event):
        if end_ns and PATIENCE.left_ns(end_ns) <= 0:
            raise DeviceLate(
                "the device has not come to this call in its time: the work before it on its stream "
                "takes longer, or streams share a queue with one that waits for this call (raise "
                "CUDA_DEVICE_MAX_CONNECTIONS, and leave ZBMD_WAIT_ON_STREAM unset)"
            )
        if time.monotonic() >= spins_until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)


class PinnedSlots:
    """Page-locked memory of one device in this process, in the arena, where peers read it in place.

    It is taken and locked once, before a stream waits for anything: to lock memory, CUDA may wait for all of
    the device. When it is used up, or too small, memory is ordinary, and CUDA copies it more slowly: nobody
    waits for a slot, since the rank that holds it may be waiting for this one in another group.
    """

    def __init__(self, api: CudaApi, arena: Arena | None) -> None:
        self._block = page_locked(api, arena, SLOTS * SLOT_BYTES) if arena is not None else None
        self._free = list(range(SLOTS)) if self._block is not None else []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return memory and the slot that it is, -1 for ordinary memory."""
        with self._lock:
            slot = self._free.pop() if self._free and nbytes <= SLOT_BYTES else -1
        if slot < 0 or self._block is None:
            return -1, np.empty(max(nbytes, 1), np.uint8)
        return slot, self._block[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def give_back(self, slot: int) -> None:
        """Nothing touches it any more."""
        if slot >= 0:
            with self._lock:
                self._free.append(slot)


class Gate:
    """Keeps streams waiting until one call has ended."""

    __slots__ = ("_gates", "_is_open", "_number", "_value", "is_waited_for")

    def __init__(self, gates: Gates, number: int, value: int) -> None:
        self._gates, self._number, self._value, self._is_open = gates, number, value, False
        self.is_waited_for = False
        """Whether a stream has been asked to wait."""

    def hold(self, stream: int) -> None:
        """Have a stream wait until `open` is called. Raises `CudaFault`."""
        self.is_waited_for = True
        self._gates.hold(stream, self._number, self._value)

    def open(self) -> None:
        """Let the streams go on that wait, and those that will be asked to. Idempotent."""
        if not self._is_open:
            self._is_open = True
            self._gates.open(self._number, self._value)


class Gates:
    """Those of one device in this process: numbers in page-locked memory, which only grow.

    A number is used by one call after the other. A stream that is asked to wait for an earlier one goes on,
    so nobody has to know when the last stream has passed. The memory is never given back.
    """

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self.can_hold = api.waits_for_values()
        memory = api.host_alloc(GATES * 4) if self.can_hold else memoryview(bytearray(GATES * 4))
        self._numbers: NDArray[np.uint32] = np.asarray(memory, np.uint8).view(np.uint32)
        self._numbers[:] = 0
        self._free = list(range(GATES))
        self._lock = threading.Lock()

    def take(self) -> Gate | None:
        """Return a closed gate; None if there is none, or streams of this device cannot wait for one."""
        with self._lock:
            if not self.can_hold or not self._free:
                return None
            number = self._free.pop()
            return Gate(self, number, (int(self._numbers[number]) + 1) & 0xFFFFFFFF)

    def hold(self, stream: int, number: int, value: int) -> None:
        """See `Gate.hold`."""
        self._api.stream_wait_value(stream, address_of(self._numbers) + number * 4, value)

    def open(self, number: int, value: int) -> None:
        """See `Gate.open`."""
        with self._lock:
            self._numbers[number] = value
            self._free.append(number)


class CallStream:
    """A stream for the copies of calls that come one after the other."""

    def __init__(self, api: CudaApi, slots: PinnedSlots) -> None:
        """Raises `CudaFault`."""
        self.api, self._slots = api, slots
        self.handle = api.stream_create()
        self._loaded = [api.event_create() for _ in range(IN_FLIGHT)]
        self._idle: list[int] = []
        self._late: tuple[Operand, ...] = ()
        """Operands that the device may touch at any time: a call with them was late."""
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def recorded(self, stream: int) -> int:
        """Return an event behind all that `stream` was asked until now, for `carry_out`. From any thread."""
        with self._lock:
            event = self._idle.pop() if self._idle else 0
        event = event or self.api.event_create()
        self.api.event_record(event, stream)
        return event

    def drop(self, event: int) -> None:
        """Give an event of `recorded` back that nobody is to wait for."""
        with self._lock:
            self._idle.append(event)

    def carry_out(
        self,
        operands: Sequence[Operand],
        after: int,
        operation: Callable[[], object],
        finish: Callable[[], object],
        *,
        cut: Cut | None = None,
        end_ns: int = 0,
    ) -> None:
        """Carry an operation out on the host, once `after` has come, and return once its results are there.

        cut: how it is run for one piece of all blocks after the other; None: for all at once. `finish` may
        ask `handle` for more behind the results. end_ns: when the operands have to be on the host, in time of
        the monotonic clock; 0: some time. Raises what the operation raises, and `CudaFault`; nothing touches
        the operands any more then. After `DeviceLate` it may: they and this stream are kept.
        """
        with self._turn_of(operands, after) as taken:
            self._pass(operands, _cuts(operands, cut), operation, taken, end_ns)
            finish()

    def pass_on(
        self,
        operands: Sequence[Operand],
        after: int,
        operation: Callable[[], object],
        finish: Callable[[], object],
    ) -> None:
        """As `carry_out`, of an operation that takes arrays of the device as they lie there."""
        with self._turn_of(operands, after):
            for operand in operands:
                there = DeviceArray(
                    self.api, operand.address, (operand.size,), operand.dtype, owner=None, stream=self.handle
                )
                operand.array = cast("Array", there)  # a communicator takes either
            operation()
            finish()

    @contextmanager
    def _turn_of(self, operands: Sequence[Operand], after: int) -> Generator[list[int]]:
        """Have the turn for one call, behind `after`; give what it takes of the slots to the list."""
        taken: list[int] = []
        with self._turn:
            self.api.stream_wait_event(self.handle, after)
            self.drop(after)
            try:
                yield taken
            except DeviceLate:
                self._late = tuple(operands)
                raise
            finally:
                if not self._late:
                    self._settle(operands, taken)

    def _settle(self, operands: Sequence[Operand], taken: Sequence[int]) -> None:
        """Wait until the device is done with a call, and give back what it had."""
        try:
            self.api.stream_synchronize(self.handle)
        finally:
            for operand in operands:
                operand.leave()
            for slot in taken:
                self._slots.give_back(slot)

    def _pass(
        self,
        operands: Sequence[Operand],
        cuts: Sequence[int],
        operation: Callable[[], object],
        taken: list[int],
        end_ns: int,
    ) -> None:
        pieces = list(pairwise(cuts))
        count = max(cuts[-1], 1)
        memory: list[NDArray[np.uint8]] = []
        for _ in pieces[:IN_FLIGHT]:
            nbytes = sum(
                _room(operand, (cuts[1] - cuts[0]) * (operand.size // count)) for operand in operands
            )
            slot, bytes_of_slot = self._slots.take(nbytes)
            taken.append(slot)
            memory.append(bytes_of_slot)
        hosts: dict[int, list[Array]] = {}
        for number, piece in enumerate(pieces[:IN_FLIGHT]):
            hosts[number] = self._load(operands, piece, count, memory[number], number)
        for number, piece in enumerate(pieces):
            loaded = self._loaded[number % IN_FLIGHT]
            if end_ns:
                wait_for_event(self.api, loaded, end_ns)
            else:
                self.api.event_synchronize(loaded)
            arrays = hosts.pop(number)
            for operand, array in zip(operands, arrays, strict=True):
                operand.array = array.reshape(-1)
            operation()
            for operand, array in zip(operands, arrays, strict=True):
                if operand.stores:
                    self._copy(operand, piece, array, inwards=False)
            # Behind the copies out of this slot, on the same stream.
            following = number + IN_FLIGHT
            if following < len(pieces):
                slot_memory = memory[following % IN_FLIGHT]
                hosts[following] = self._load(operands, pieces[following], count, slot_memory, following)

    def _load(
        self,
        operands: Sequence[Operand],
        piece: tuple[int, int],
        count: int,
        memory: NDArray[np.uint8],
        number: int,
    ) -> list[Array]:
        """Ask for the copies into a slot; return its arrays, of shape (blocks, elements)."""
        arrays: list[Array] = []
        length = piece[1] - piece[0]
        for operand in operands:
            blocks = operand.size // count
            nbytes = blocks * length * operand.dtype.itemsize
            array = memory[:nbytes].view(operand.dtype).reshape(blocks, length)
            memory = memory[_room(operand, blocks * length) :]
            if operand.loads:
                self._copy(operand, piece, array, inwards=True)
            arrays.append(array)
        self.api.event_record(self._loaded[number % IN_FLIGHT], self.handle)
        return arrays

    def _copy(self, operand: Operand, piece: tuple[int, int], array: Array, *, inwards: bool) -> None:
        blocks, length = array.shape
        if not array.nbytes:
            return
        item, whole = operand.dtype.itemsize, operand.size // blocks
        rows = [(0, blocks * length)] if length == whole else [(block, length) for block in range(blocks)]
        for block, elements in rows:
            there = operand.address + (block * whole + piece[0]) * item
            here = address_of(array) + block * length * item
            into, src = (here, there) if inwards else (there, here)
            self.api.memcpy_async(into, src, elements * item, self.handle)

    def close(self) -> None:
        """Give the stream and its events back, when nothing is under way."""
        if self._late:
            return
        with self._lock:
            events, self._idle = [*self._idle, *self._loaded], []
        try:
            for event in events:
                self.api.event_destroy(event)
            self.api.stream_destroy(self.handle)
        except CudaFault:
            pass  # a device that has failed keeps nothing


def _cuts(operands: Sequence[Operand], cut: Cut | None) -> list[int]:
    """Return where the pieces of a block begin, and where the last one ends, in elements."""
    if cut is None or not cut.count or any(operand.size % cut.count for operand in operands):
        return [0, 1]
    longest = max((operand.dtype.itemsize for operand in operands), default=1)
    piece = max(1, SLOT_BYTES // (cut.blocks * longest))
    if piece > ALIGNMENT:  # nothing lies between the arrays of a slot then
        piece -= piece % ALIGNMENT
    return [*range(0, cut.count, piece), cut.count]


def _room(operand: Operand, elements: int) -> int:
    return -(-elements * operand.dtype.itemsize // ALIGNMENT) * ALIGNMENT
