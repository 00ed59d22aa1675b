"""Registered device memory: `DeviceExports` at its owner, `CudaRegion` at a peer, by CUDA's IPC.

`CudaRegion` is a `zbmd.transport.memory.region.RemoteRegion`. What is put or got is a buffer of the host or
an array of a device. A buffer that is not page-locked is copied by CUDA through memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from zbmd.transport.cuda.api import CudaApi
from zbmd.transport.cuda.array import DeviceHandle, DeviceSpan, is_device_array, span_of
from zbmd.transport.cuda.peer import Copy, CudaPeer
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.region import REGIONS_MAX, CheckedRegion, read_only, require_cell, require_range
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import address_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

# CUDA leaves undefined what becomes of memory that is freed while another process has it open. So an array
# lives from `register` to `release`, and then until each process that got its handle has let go of it or is
# proven gone, as in shared memory (`zbmd.transport.memory.region.Regions`).


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

        Returns the slots of the processes that must let go of it (`CudaPeer.take_back` there, then
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


class CudaRegion(CheckedRegion):
    """See `zbmd.transport.memory.region.RemoteRegion`. `view` gives None: see `array`.

    What a put copies from a device array is what the array's own stream has been asked to put there by then;
    until the transfer is done it must not change. The peer's cell is set once every byte is there.
    """

    def __init__(self, peer: CudaPeer, handle: DeviceHandle) -> None:
        """Raises as `CudaPeer.open`."""
        super().__init__(handle)
        self._peer = peer
        self._device_handle = handle
        self._address = peer.open(handle)
        self._device = peer.api.device_of(handle.device)

    def put(self, src: Buffer | NDArray[Any] | Any, offset: int = 0, *, channel: int, value: int) -> Transfer:
        """See `RemoteRegion.put`; `src` may be a device array."""
        if not is_device_array(src):
            return super().put(src, offset, channel=channel, value=value)
        span = self._writing(src, offset)
        require_cell(channel, value)
        return self._copy_to(span, src, offset, channel, value)

    def get(self, into: Buffer | NDArray[Any] | Any, offset: int = 0) -> Transfer:
        """See `RemoteRegion.get`; `into` may be a device array, whose stream is waited for."""
        if not is_device_array(into):
            return super().get(into, offset)
        self._check_usable()
        span = span_of(into)
        if span.readonly:
            raise LocalProtocolError("get into a device array that cannot be written")
        require_range(self._handle, offset, span.nbytes)
        src = self._address + offset
        return self._peer.copy(
            lambda stream: self._between(span.address, src, span.nbytes, stream, reading=True),
            into,
            after=span.stream,
        )

    def put_behind(self, src: Any, offset: int = 0, *, channel: int, value: int) -> Transfer:
        """Put a device array as `put` does, but set the cell at once: it stands for the device's order alone.

        A peer that has seen the cell calls `CudaPeer.follow`: what it queues on its stream then runs after
        the copy.
        """
        span = self._writing(src, offset)
        require_cell(channel, value)
        transfer = self._copy_to(span, src, offset, None, 0)
        self._peer.signal(channel, value)
        return transfer

    def array(self) -> DeviceSpan:
        """Return the peer's array in place, with the CUDA array interface, for kernels; valid until `close`.

        Ordering is the caller's: `CudaPeer.follow` before, `CudaPeer.signal` after.
        """
        self._check_usable()
        handle = self._device_handle
        return DeviceSpan(
            address=self._address, shape=handle.shape, typestr=handle.typestr, readonly=not handle.writable
        )

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: the host cannot read it in place."""
        self._check_open()
        return super().view(offset, nbytes)

    def close(self) -> None:
        """See `RemoteRegion.close`."""
        if not self._closed:
            super().close()
            self._peer.shut(self._device_handle)

    def __enter__(self) -> CudaRegion:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what `CheckedRegion` asks for, of buffers of the host -------------------------------------------

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        into, nbytes = self._address + offset, view.nbytes
        copy = self._with_host(into, address_of(view) if nbytes else 0, nbytes)
        return self._peer.copy(copy, view, owner, after=None, channel=channel, value=value)

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        src, nbytes = self._address + offset, view.nbytes
        copy = self._with_host(address_of(view) if nbytes else 0, src, nbytes)
        return self._peer.copy(copy, view, owner, after=None)

    def _with_host(self, into: int, src: int, nbytes: int) -> Copy:
        def copy(stream: int) -> None:
            if nbytes:
                self._peer.api.memcpy_async(into, src, nbytes, stream)

        return copy

    def _notify(self, channel: int, value: int) -> None:
        self._peer.notify(channel, value)

    def _check_usable(self) -> None:
        super()._check_usable()
        self._peer.require_alive()

    # -- of device arrays --------------------------------------------------------------------------------

    def _writing(self, src: Any, offset: int) -> DeviceSpan:
        self._check_usable()
        if not self._handle.writable:
            raise read_only(self._handle)
        span = span_of(src)
        require_range(self._handle, offset, span.nbytes)
        return span

    def _copy_to(self, span: DeviceSpan, src: Any, offset: int, channel: int | None, value: int) -> Transfer:
        into = self._address + offset
        return self._peer.copy(
            lambda stream: self._between(into, span.address, span.nbytes, stream, reading=False),
            src,
            after=span.stream,
            channel=channel,
            value=value,
        )

    def _between(self, into: int, src: int, nbytes: int, stream: int, *, reading: bool) -> None:
        """Copy between our device and the peer's."""
        api = self._peer.api
        if not nbytes:
            return
        if self._device is None or self._device == api.device:
            api.memcpy_async(into, src, nbytes, stream)
            return
        into_device, src_device = (api.device, self._device) if reading else (self._device, api.device)
        api.memcpy_peer_async(into, into_device, src, src_device, nbytes, stream)
