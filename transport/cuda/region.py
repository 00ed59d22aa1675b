"""A peer's registered device memory: `zbmd.transport.memory.region.RemoteRegion` by CUDA's IPC.

What is put or got is a buffer of the host or an array of a device. A buffer that is not page-locked is
copied by CUDA through memory of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from zbmd.transport.cuda.array import DeviceHandle, DeviceSpan, is_device_array, span_of
from zbmd.transport.cuda.peer import CudaPeer
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.region import CheckedRegion, read_only, require_cell, require_range
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import address_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
        src = address_of(view) if nbytes else 0

        def copy(stream: int) -> None:
            if nbytes:
                self._peer.api.memcpy_async(into, src, nbytes, stream)

        return self._peer.copy(copy, view, owner, after=None, channel=channel, value=value)

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        src, nbytes = self._address + offset, view.nbytes
        into = address_of(view) if nbytes else 0

        def copy(stream: int) -> None:
            if nbytes:
                self._peer.api.memcpy_async(into, src, nbytes, stream)

        return self._peer.copy(copy, view, owner, after=None)

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
