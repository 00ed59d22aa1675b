"""Arrays of devices in operations of the host: staged in pieces, or copied whole for as long as one has them.

Every operation takes them, over any link, whatever the other members pass: to these it is an operation on the
host's memory. A plain group moves such an array piece by piece (`DeviceStaging`), through page-locked memory
of the arena. What the device copies is ordered behind the stream that the array names; a copy that was asked
for has drained before anybody else touches the memory.

What is run again after a death, is adopted from who died, or lies until somebody receives it, needs all of it
on the host: here it *lands* in page-locked memory, and what came of it is brought home once nothing can
change any more. So in every mode the operation is one of the host's arrays, and after an error the caller's
own are as they were.

Calls of CUDA wait for the device: all of this is for threads that may wait, and `drained` finds one.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.device.arrays import CallersArray, DeviceArray, given_back, new_array
from zbmd.collectives.device.arrays_in import Array, Placed, Target, as_placed, packed, require_writeable
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.flight.device_clock import DEVICE_TO_HOST, HOST_TO_DEVICE, DeviceClock
from zbmd.transport.cuda.api import CudaApi, CudaFault
from zbmd.transport.errors import ArenaFull
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of

PAGE_BYTES: Final = 4096
BLOCKS_MAX: Final = 8
"""Pieces of page-locked memory that are kept; most operations use three at most."""


class DeviceStaging:
    """One communicator's. For one thread at a time; `begin` to `end` is an operation.

    kept: pieces of memory that are kept for the next operation. spills: whether memory may lie elsewhere if
    the arena is full. clock: times the copies, if somebody starts it.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        kept: int = BLOCKS_MAX,
        spills: bool = False,
        clock: DeviceClock | None = None,
    ) -> None:
        self._segment = segment
        self._clock = DeviceClock() if clock is None else clock
        self._kept = kept
        self._spills = spills
        self._moves: dict[int, _Moves] = {}

    def begin(self, *arrays: object) -> None:
        """Wait on the devices for what the arrays' own streams have been asked. Raises `CudaFault`."""
        for array in arrays:
            if isinstance(array, DeviceArray):
                self._of(array).join(array.stream)

    def empty(self, like: DeviceArray, size: int) -> Array:
        """Memory of the arena for `size` elements of an array, until `end`. Raises `ArenaFull`."""
        return self.memory(like, size * like.itemsize).view(like.dtype)

    def memory(self, like: DeviceArray, nbytes: int) -> NDArray[np.uint8]:
        """As `empty`, so many bytes."""
        return self._of(like).take(self._segment, nbytes)

    def copy(self, into: Array | DeviceArray, src: Array | DeviceArray) -> None:
        """Ask for a copy of flat arrays of one size: done at once between arrays of the host.

        Raises `CudaFault`.
        """
        if not isinstance(into, DeviceArray) and not isinstance(src, DeviceArray):
            into[...] = src
            return
        moves = self._of(into if isinstance(into, DeviceArray) else src)
        if into.nbytes:
            way = HOST_TO_DEVICE if isinstance(into, DeviceArray) else DEVICE_TO_HOST
            with self._clock.timed(moves.api, moves.stream, (way, into.nbytes)):
                moves.copy(_address(into), _address(src), into.nbytes)

    def settle(self) -> None:
        """Wait until all copies that were asked for have drained. Raises `CudaFault`."""
        for moves in self._moves.values():
            moves.settle()
        self._clock.read()

    def end(self) -> None:
        """The end of an operation, however it went: nothing touches its memory any more."""
        try:
            self.settle()
        finally:
            for moves in self._moves.values():
                moves.give_back()

    def close(self) -> None:
        """Unlock and give back all memory. Idempotent. Raises `CudaFault`."""
        while self._moves:
            self._moves.popitem()[1].close()

    def _of(self, array: Any) -> _Moves:
        api: CudaApi = array.api
        found = self._moves.get(api.device)
        if found is None:
            found = self._moves[api.device] = _Moves(api, self._kept, self._spills)
        return found


class _Moves:
    """One device's: a stream for its copies, and the memory that it copies from and to."""

    def __init__(self, api: CudaApi, kept: int, spills: bool) -> None:
        self.api = api
        self._kept = kept
        self._spills = spills
        self.stream = api.stream_create()
        self._event = api.event_create()
        self._under_way = False
        self._idle: list[_Block] = []
        self._used: list[_Block] = []

    def join(self, stream: int) -> None:
        self.api.event_record(self._event, stream)
        self.api.stream_wait_event(self.stream, self._event)

    def copy(self, into: int, src: int, nbytes: int) -> None:
        self._under_way = True
        self.api.memcpy_async(into, src, nbytes, self.stream)

    def settle(self) -> None:
        if self._under_way:
            self.api.stream_synchronize(self.stream)
            self._under_way = False

    def take(self, segment: Segment, nbytes: int) -> NDArray[np.uint8]:
        fits = [block for block in self._idle if block.memory.nbytes >= nbytes]
        if fits:
            block = min(fits, key=lambda each: each.memory.nbytes)
            self._idle.remove(block)
        else:
            block = self._new(segment, nbytes)
        self._used.append(block)
        return block.memory[:nbytes]

    def _new(self, segment: Segment, nbytes: int) -> _Block:
        self._keep(self._kept - 1)
        pages = max(1, -(-nbytes // PAGE_BYTES)) + 1  # one more than are used: they begin on a page
        try:
            whole = segment.arena.empty(pages * PAGE_BYTES, np.uint8)
        except ArenaFull:
            self._keep(0)
            try:
                whole = segment.arena.empty(pages * PAGE_BYTES, np.uint8)
            except ArenaFull:
                if not self._spills:
                    raise
                whole = np.empty(pages * PAGE_BYTES, np.uint8)
        return _Block(self.api, whole)

    def _keep(self, blocks: int) -> None:
        """No more than so many, the latest."""
        while len(self._idle) > blocks:
            self._idle.pop(0).unlock(self.api)

    def give_back(self) -> None:
        self._idle += self._used
        self._used.clear()
        self._keep(self._kept)

    def close(self) -> None:
        self.give_back()
        self._keep(0)
        self.api.event_destroy(self._event)
        self.api.stream_destroy(self.stream)


class _Block:
    """The whole pages in some memory, which the device reads and writes by itself where CUDA locks them."""

    def __init__(self, api: CudaApi, whole: NDArray[np.uint8]) -> None:
        begin = -address_of(whole) % PAGE_BYTES
        self.memory: NDArray[np.uint8] = whole[begin : begin + whole.nbytes - PAGE_BYTES]
        self._locked = True
        try:
            api.host_register(address_of(self.memory), self.memory.nbytes)
        except CudaFault:
            self._locked = False  # over the limit of locked memory: CUDA copies through memory of its own

    def unlock(self, api: CudaApi) -> None:
        if self._locked:
            self._locked = False
            api.host_unregister(address_of(self.memory))


def page_locked(api: CudaApi, arena: Arena, nbytes: int) -> NDArray[np.uint8]:
    """Return memory of the arena that the device reads and writes by itself, until this process ends.

    It lies elsewhere if the arena is full.
    """
    room = (-(-nbytes // PAGE_BYTES) + 1) * PAGE_BYTES
    try:
        whole = arena.empty(room, np.uint8)
    except ArenaFull:
        whole = np.empty(room, np.uint8)
    return _Block(api, whole).memory[:nbytes]


def _address(x: Array | DeviceArray) -> int:
    return x.address if isinstance(x, DeviceArray) else address_of(x)


ALIGNMENT: Final = 64
"""Bytes, of each array in the memory of a landing."""
BLOCKS_KEPT: Final = 2
"""Pieces of page-locked memory a device, each as large as all arrays of an operation."""

ResultT = TypeVar("ResultT")


async def drained(call: Callable[[], ResultT]) -> ResultT:
    """Have another thread than the loop's do it. A cancelled await ends when that has ended."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class Landings:
    """One group's, in all of its epochs. For one landing at a time, on whatever thread."""

    def __init__(self, segment: Segment) -> None:
        self._staging = DeviceStaging(segment, kept=BLOCKS_KEPT, spills=True)
        self._closed = False

    def of(self, x: Any = None, out: Any = None) -> Landing | None:
        """That of a call with these arrays, as `taken` gives them, `x` one or a list; None if all lie on the
        host. Raises `OperationAborted` once this is closed.
        """
        if not any(isinstance(array, CallersArray) for array in (*_each(x), *_each(out))):
            return None
        self._require_open()
        return Landing(self._staging, x, out)

    def write(self, into: CallersArray, host: Array) -> None:
        """Copy an array of the host to one of a device, of the same dtype and size. Raises `CudaFault`."""
        self._require_open()
        landing = Landing(self._staging, None, into)
        try:
            landing.write(into.operand(), host)
            landing.finish()
        finally:
            landing.end()

    def close(self) -> None:
        """Unlock and give back all memory. Idempotent."""
        self._closed = True
        with contextlib.suppress(CudaFault):  # a device that has failed keeps nothing
            self._staging.close()

    def _require_open(self) -> None:
        if self._closed:
            raise OperationAborted("the group is closed, and takes no arrays of devices")


@dataclass(slots=True)
class _Landed:
    """An array that a caller passed, where it lies, and its elements on the host."""

    caller: CallersArray
    operand: Placed
    host: Array


class Landing:
    """The arrays of one call. `x` is read, and may be written; `out` is written, and not read.

    Use it in this order: `land`, `require_writeable`, `bring_home` unless the operation failed, and `end`.
    """

    def __init__(self, staging: DeviceStaging, x: Any, out: Any) -> None:
        self._staging = staging
        self._x, self._out = x, out
        self._landed: dict[int, _Landed] = {}
        self._targets: list[Target[DeviceArray]] = []
        self._held: list[Array] = []

    def land(self) -> tuple[Any, Any]:
        """`x` and `out` on the host, once what their streams were asked before has been done.

        Raises `ArenaFull`, and `CudaFault`.
        """
        callers = [a for a in (*_each(self._x), *_each(self._out)) if isinstance(a, CallersArray)]
        operands = [as_placed(caller, "x") for caller in callers]
        for caller, operand, host in zip(callers, operands, self._hosts_for(operands), strict=True):
            self._landed[id(caller)] = _Landed(caller, operand, host)
        inputs = [self._landed[id(x)] for x in _each(self._x) if id(x) in self._landed]
        flats = [packed(each.operand) for each in inputs]
        self._staging.begin(*operands)
        for each, flat in zip(inputs, flats, strict=True):
            self._staging.copy(each.host.reshape(-1), flat)
        self._staging.settle()
        hosts = [self._on_host(x) for x in _each(self._x)]
        return (hosts if isinstance(self._x, list) else hosts[0]), self._on_host(self._out)

    def require_writeable(self, value: Any) -> None:
        """Raise `UserError` if this is to be the result, and its caller's array cannot be written."""
        for each in _each(value):
            landed = self._whose(each)
            if landed is not None:
                require_writeable(landed.operand, "out" if landed.caller is self._out else "x")

    def bring_home(self, value: Any) -> Any:
        """The operation's result, where its caller has it: in the array that was given for it, or in a new
        one, on the device of `x`. Raises `CudaFault`.
        """
        if isinstance(self._x, list):
            found: Any = [self._home_of(each, x) for each, x in zip(value, _each(self._x), strict=True)]
            given = given_back(self._x)
            found = given if all(map(operator.is_, found, given)) else found
        else:
            found = None if value is None else self._home_of(value, self._x)
        self.finish()
        return found

    def finish(self) -> None:
        """Return once all that was asked for is written. Raises `CudaFault`."""
        self._staging.settle()
        while self._targets:
            self._targets.pop().bring_home()
        self._held.clear()

    def end(self) -> None:
        """The end of the call, however it went."""
        with contextlib.suppress(CudaFault):  # it was reported where it was waited for
            self._staging.end()
        self._landed.clear()

    def write(self, into: Placed, host: Array) -> None:
        """Ask for a copy to the first elements of a device's array; `finish` waits for it."""
        if not isinstance(into, DeviceArray) or not host.size:
            return
        target = Target(into, "out", load=host.size < into.size)
        flat = np.ascontiguousarray(host).reshape(-1)
        self._held.append(flat)
        self._staging.begin(into)
        self._staging.copy(target.flat.part(0, flat.size), flat)
        self._targets.append(target)

    def _home_of(self, value: Array, x: Any) -> Any:
        landed = self._whose(value)
        if landed is not None:
            self.write(landed.operand, value)
            given: Any = landed.caller.given
            return given if value.shape == landed.host.shape else given[: len(value)]
        like = self._landed.get(id(x))
        if like is None or not isinstance(like.operand, DeviceArray) or self._is_out_of_host(value):
            return value
        made = new_array(like.operand, value.shape, value.dtype)
        self.write(made.operand(), value)
        return made.given

    def _is_out_of_host(self, value: Array) -> bool:
        """Whether it was written to the `out` that the caller gave on the host."""
        out = self._out
        if out is None or isinstance(out, CallersArray):
            return False
        return value is out or np.may_share_memory(value, as_placed(out, "out"))

    def _whose(self, value: Any) -> _Landed | None:
        """Return the array on the host that `value` is, or that it has the first rows of."""
        for each in self._landed.values():
            inside = isinstance(value, np.ndarray) and value.size and np.may_share_memory(value, each.host)
            if value is each.host or inside:
                return each
        return None

    def _hosts_for(self, operands: Sequence[Placed]) -> list[Array]:
        """Memory for the elements of each, that of one device in one piece. Raises `ArenaFull`."""
        total: dict[int, tuple[DeviceArray, int]] = {}
        for operand in operands:
            if isinstance(operand, DeviceArray):
                _, nbytes = total.get(operand.api.device, (operand, 0))
                total[operand.api.device] = operand, nbytes + _room(operand)
        memory = {device: self._staging.memory(like, nbytes) for device, (like, nbytes) in total.items()}
        hosts: list[Array] = []
        for operand in operands:
            if isinstance(operand, DeviceArray):
                rest = memory[operand.api.device]
                memory[operand.api.device] = rest[_room(operand) :]
                hosts.append(rest[: operand.nbytes].view(operand.dtype).reshape(operand.shape))
            else:  # without elements it lies nowhere
                hosts.append(operand)
        return hosts

    def _on_host(self, given: Any) -> Any:
        landed = self._landed.get(id(given))
        return given if landed is None else landed.host


def _each(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _room(operand: DeviceArray) -> int:
    return -(-operand.nbytes // ALIGNMENT) * ALIGNMENT
