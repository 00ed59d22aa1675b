"""Copies between host and device that run beside what the device computes, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.collectives.flight.device_clock import HOST_TO_DEVICE
from zbmd.training.native._kernels import state_sum
from zbmd.training.ops.cuda.device_array import SQUARES_BLOCK, DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor, TimedDownloads
from zbmd.training.ops.cuda.timing import StepTimes
from zbmd.transport.native._native import address_of

SLOTS: Final = 2
"""The batch that kernels read, and the next."""
Pairs = Sequence[tuple[DeviceArray, Any]]
Write = Callable[[npt.NDArray[np.uint8]], None]


class _Staged:
    """One upload: page-locked memory, its copy on the device, and what orders the two.

    arrived: the copy is on the device; taken: it was read, so it may be overwritten.
    """

    def __init__(self, run: Executor, nbytes: int) -> None:
        api = run.api
        self.memory = api.host_alloc(nbytes)
        self.host: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        self.device = run.empty(nbytes, np.uint8)
        self.arrived, self.taken = api.event_create(), api.event_create()
        self.key: object = None
        self.is_waiting = self.was_used = self.was_taken = False


class UploadAhead:
    """Uploads what `into` holds next while kernels read what it holds now. For the thread that launches.

    Captured graphs read `into`, whose place is fixed: each upload goes to one of two blocks beside it, and is
    copied from there on the device, in the order of the stream that computes.
    """

    def __init__(self, run: Executor, into: DeviceArray) -> None:
        self._run, self._into = run, into
        self._slots: list[_Staged] = []

    def upload(self, key: object, write: Write) -> None:
        """Begin the upload of the bytes that `write` fills in, unless one of the same key waits."""
        if self._waiting(key) is not None:
            return
        run, api, slot = self._run, self._run.api, self._unused()
        if slot.was_used:
            api.event_synchronize(slot.arrived)  # long ago: the host may write its memory again
        write(slot.host)
        if slot.was_taken:
            api.stream_wait_event(run.uploads, slot.taken)
        with run.timer.copied(HOST_TO_DEVICE, slot.device.nbytes, run.uploads):
            api.memcpy_async(slot.device.address, address_of(slot.host), slot.device.nbytes, run.uploads)
        api.event_record(slot.arrived, run.uploads)
        slot.key, slot.is_waiting, slot.was_used = key, True, True

    def take(self, key: object) -> None:
        """Copy what was uploaded for `key` to its place, before what is launched from now on."""
        slot, run, api = self._waiting(key), self._run, self._run.api
        assert slot is not None, "it was uploaded"
        api.stream_wait_event(run.stream, slot.arrived)
        run.copy(self._into, slot.device)
        api.event_record(slot.taken, run.stream)
        slot.key, slot.is_waiting, slot.was_taken = None, False, True

    def close(self) -> None:
        """Give page-locked memory back, once nothing is copied from it. Idempotent."""
        for slot in self._slots:
            if slot.was_used:
                self._run.api.event_synchronize(slot.arrived)
            host: Any = slot.host
            del slot.host, host
            self._run.api.host_free(slot.memory)
        self._slots.clear()

    def _waiting(self, key: object) -> _Staged | None:
        return next((one for one in self._slots if one.is_waiting and one.key is key), None)

    def _unused(self) -> _Staged:
        """Return a slot that nothing waits in; if both are full, that of an upload nobody came for."""
        found = next((one for one in self._slots if not one.is_waiting), None)
        if found is None and len(self._slots) < SLOTS:
            found = _Staged(self._run, self._into.nbytes)
            self._slots.append(found)
        elif found is None:
            found = self._slots.pop(0)
            self._slots.append(found)
        return found


class StateCopy:
    """Copies a state to host memory beside what the device computes, with its digest, by a thread of its own.

    The digest is that of what the device holds: `sum_of` of the arrays, one behind the other. It is computed
    on the device, so a host copy of other bits has another one. One copy is under way at a time.
    """

    def __init__(self, run: Executor) -> None:
        self._run, self._downloads = run, TimedDownloads(run.api, run.timer)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-state")
        self._under_way: Future[int] | None = None

    def begin(self, pairs: Sequence[tuple[DeviceArray, npt.NDArray[np.float32]]]) -> None:
        """Begin to copy each array to the host, as it is after what the device was asked for so far.

        The device may not be asked to write them before `settle`.
        """
        self._begin([array for array, _ in pairs], pairs)

    def note(self, arrays: Sequence[DeviceArray]) -> None:
        """Begin to compute the digest of arrays alone, whose bits the host has."""
        self._begin(arrays, ())

    def _begin(self, arrays: Sequence[DeviceArray], pairs: Sequence[tuple[DeviceArray, Any]]) -> None:
        self.settle()
        sums, first = list[DeviceArray](), 0
        for array in arrays:
            sums.append(self._sums(array, first))
            first += array.size
        self._downloads.follow(self._run.stream)
        if (of_step := self._run.timer.step) is not None:
            of_step.expect()
        self._under_way = self._pool.submit(self._timed_copy, list(pairs), sums, of_step)

    def settle(self) -> int:
        """Return once the host has what was begun last, with its digest; 0 if nothing was. For any thread."""
        under_way = self._under_way
        return 0 if under_way is None else under_way.result()

    def _sums(self, array: DeviceArray, first: int) -> DeviceArray:
        run, blocks = self._run, -(-array.size // SQUARES_BLOCK)
        sums = run.empty(blocks, np.uint64)
        run.launch("state_sums", blocks, Out(sums), array, np.uint64(first), np.uint64(array.size))
        return sums

    def _timed_copy(self, pairs: Pairs, sums: Sequence[DeviceArray], of_step: StepTimes | None) -> int:
        """Copy. of_step: the step that has begun it, whose times have it, although it may be over."""
        try:
            return self._copy(pairs, sums, of_step)
        finally:
            if of_step is not None:
                of_step.arrived()

    def _copy(self, pairs: Pairs, sums: Sequence[DeviceArray], of_step: StepTimes | None) -> int:
        total = 0
        for one in sums:
            found = np.empty(one.shape, np.uint64)
            self._downloads.copy(one, found, of_step=of_step)
            total += int(found.sum(dtype=np.uint64))
        for array, into in pairs:
            self._downloads.copy(array, into, of_step=of_step)
        return total % (1 << 64)


def sum_of(state: npt.NDArray[np.float32]) -> int:
    """Return the digest of a state in host memory that `StateCopy` computes on a device.

    The sum, modulo 2**64, of each 32-bit word times an odd number that depends on its place alone: a hash
    by inner products, whose order is free. A word that changes always changes it.
    """
    return state_sum(state.reshape(-1).view(np.uint32), 0)
