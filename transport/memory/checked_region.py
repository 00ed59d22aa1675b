"""A peer's region that is reached by messages: what is checked here before anything is sent, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.region import RegionHandle, flat_bytes, read_only, require_cell, require_range
from zbmd.transport.memory.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CheckedRegion(ABC):
    """See `zbmd.transport.memory.region.RemoteRegion`. A transport adds how bytes travel."""

    def __init__(self, handle: RegionHandle) -> None:
        self._handle = handle
        self._closed = False

    @abstractmethod
    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        """Send the bytes of `view`, which are `owner`'s, and the notification behind them."""

    def _put_now(self, view: memoryview, offset: int, channel: int, value: int) -> bool:
        """Do so, if the bytes of `view` are needed no more when it returns; else nothing, and False."""
        return False

    @abstractmethod
    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        """Fill `view`, whose bytes are `owner`'s."""

    @abstractmethod
    def _notify(self, channel: int, value: int) -> None:
        """Send the notification."""

    def _check_usable(self) -> None:
        """Raise if nothing can be sent; see `RemoteRegion.put`."""
        self._check_open()

    @property
    def handle(self) -> RegionHandle:
        """What was opened."""
        return self._handle

    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer:
        """See `RemoteRegion.put`."""
        return self._put(self._what_is_put(src, offset, channel, value), offset, channel, value, src)

    def put_now(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> bool:
        """As `put`, if `src` may be reused as soon as this returns, whatever becomes of the connection.

        False: nothing has been put, since that cannot be had now. Raises as `put`.
        """
        return self._put_now(self._what_is_put(src, offset, channel, value), offset, channel, value)

    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer:
        """See `RemoteRegion.get`."""
        self._check_usable()
        view = flat_bytes(into)
        if view.readonly:
            raise LocalProtocolError("get into a buffer that cannot be written")
        require_range(self._handle, offset, view.nbytes)
        return self._get(view, offset, into)

    def notify(self, channel: int, value: int) -> None:
        """See `RemoteRegion.notify`."""
        self._check_usable()
        require_cell(channel, value)
        self._notify(channel, value)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: the memory is not shared with us. Raises `RemoteProtocolError` outside the region."""
        require_range(self._handle, offset, self._handle.nbytes - offset if nbytes is None else nbytes)
        return None

    def close(self) -> None:
        """See `RemoteRegion.close`."""
        self._closed = True

    def _what_is_put(self, src: Buffer | NDArray[Any], offset: int, channel: int, value: int) -> memoryview:
        self._check_usable()
        require_cell(channel, value)
        if not self._handle.writable:
            raise read_only(self._handle)
        view = flat_bytes(src)
        require_range(self._handle, offset, view.nbytes)
        return view

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError(f"the region of slot {self._handle.slot} is closed")
