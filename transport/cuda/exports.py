"""The device memory of this process that peers may open: held until nobody can have it open any more.

CUDA leaves undefined what becomes of memory that is freed while another process has it open. So an array
lives from `register` to `release`, and then until each process that got its handle has let go of it or is
proven gone, as in shared memory (`zbmd.transport.memory.region.Regions`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from zbmd.transport.cuda.api import CudaApi
from zbmd.transport.cuda.array import DeviceHandle, span_of
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.region import REGIONS_MAX


class _Export:
    """An array, and the slots of those that may have it open."""

    __slots__ = ("array", "released", "writers")

    def __init__(self, array: object) -> None:
        self.array = array
        self.released = False
        self.writers: set[int] = set()


class DeviceExports:
    """The registered device memory of this process. For any thread."""

    def __init__(self, api: CudaApi, *, slot: int, incarnation: int) -> None:
        self._api = api
        self._uuid = api.facts().uuid
        self._slot = slot
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._exports: dict[DeviceHandle, _Export] = {}

    def register(self, array: object, *, writable: bool = True, writers: Iterable[int] = ()) -> DeviceHandle:
        """Describe an array in memory of cudaMalloc for the processes in the slots `writers`.

        Any C-contiguous array with the CUDA array interface; memory of cudaMallocAsync and of torch's
        expandable segments cannot be opened.
        Registering it again gives the same handle, and adds writers. writable: what its users may do with
        it, which CUDA does not enforce. Raises `LocalProtocolError` on another array or if `REGIONS_MAX` are
        registered, `CudaFault` if CUDA refuses.
        """
        span = span_of(array)
        if not span.nbytes:
            raise LocalProtocolError("an empty device array cannot be registered")
        base, nbytes = self._api.address_range(span.address)
        if span.address + span.nbytes > base + nbytes:  # as with expandable segments of torch
            raise LocalProtocolError(
                f"a device array of {span.nbytes} bytes cannot be registered: it lies in more than one "
                "allocation"
            )
        handle = DeviceHandle(
            slot=self._slot,
            incarnation=self._incarnation,
            offset=span.address - base,
            nbytes=span.nbytes,
            writable=writable and not span.readonly,
            device=self._uuid,
            memory=self._api.ipc_get_mem_handle(base),
            typestr=span.typestr,
            shape=span.shape,
        )
        with self._lock:
            if handle not in self._exports and len(self._exports) >= REGIONS_MAX:
                raise LocalProtocolError(f"{REGIONS_MAX} device regions are registered: release some")
            export = self._exports.setdefault(handle, _Export(array))
            export.released = False
            export.writers.update(writers)
        return handle

    def release(self, handle: DeviceHandle) -> frozenset[int]:
        """Let go of the array as soon as can be. Idempotent.

        Returns the slots of those that are to be told to let go of it (`CudaPeer.take_back` there, then
        `let_go` here): until then it lives.
        """
        with self._lock:
            export = self._exports.get(handle)
            if export is None:
                return frozenset()
            export.released = True
            self._drop_if_free(handle, export)
            return frozenset(export.writers)

    def let_go(self, slot: int, handle: DeviceHandle) -> None:
        """Record that the process in `slot` has closed it. Idempotent."""
        with self._lock:
            export = self._exports.get(handle)
            if export is not None:
                export.writers.discard(slot)
                self._drop_if_free(handle, export)

    def writer_gone(self, slot: int) -> None:
        """Record that the process in `slot` is proven gone. Idempotent."""
        with self._lock:
            for handle, export in list(self._exports.items()):
                export.writers.discard(slot)
                self._drop_if_free(handle, export)

    def _drop_if_free(self, handle: DeviceHandle, export: _Export) -> None:
        if export.released and not export.writers:
            self._exports.pop(handle, None)

    @property
    def held(self) -> int:
        """Arrays that live because of it."""
        with self._lock:
            return len(self._exports)
