"""Copies between host and device that run beside what the device computes, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.transport.native._native import address_of

SLOTS: Final = 2
"""What kernels read, and what follows."""
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
