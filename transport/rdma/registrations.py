"""What is registered with an RDMA device beside the segment: arrays while they live, and peers' regions."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import LinkClosed
from zbmd.transport.rdma.native._rdma_device import Device, Registration

KEPT_MAX: Final = 256
"""Arrays outside of the segment whose registration is kept; past it, the one that was unused longest goes."""


class Registrations:
    """Registrations of what users own. For any thread.

    That of a NumPy array is kept until the array is gone, which is told before its memory is: so none
    outlives its memory, and no array lives longer for it. What transfers use lives until they are done. Other
    buffers are registered for one transfer.
    """

    def __init__(self, device: Device) -> None:
        self._device: Device | None = device
        self._lock = threading.RLock()  # an array may go at any line of ours
        self._kept: OrderedDict[int, tuple[weakref.ref[NDArray[Any]], Registration]] = OrderedDict()

    @property
    def kept(self) -> int:
        """Return how many there are."""
        return len(self._kept)

    def lend(self, owner: object, address: int, nbytes: int) -> tuple[Registration, bool]:
        """One that covers these bytes of `owner`, and whether it was there. Raises `UserError`."""
        root, device = _root(owner), self._device
        if device is None:
            raise LinkClosed("the RDMA data plane of this process is closed")
        if root is None:
            return device.register(address, nbytes), False
        key = id(root)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0]() is root:
                self._kept.move_to_end(key)
                return found[1], True
            made = device.register(root.ctypes.data, root.nbytes)
            self._kept[key] = weakref.ref(root, lambda gone: self._forget(key, gone)), made
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
            return made, False

    def close(self) -> None:
        """Let go of all of them, and of the device. Idempotent."""
        with self._lock:
            self._kept.clear()
            self._device = None

    def _forget(self, key: int, gone: weakref.ref[NDArray[Any]]) -> None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0] is gone:
                del self._kept[key]


class RdmaRegionKeys:
    """A registration of its own for each region that peers may put into: `RegionKeys` of a segment.

    To end it costs those who put into it after its end their connection, and us nothing.
    """

    def __init__(self, device: Device, base: int) -> None:
        self._device: Device | None = device
        self._base = base
        self._lock = threading.Lock()
        self._made: dict[int, Registration] = {}

    def add(self, offset: int, nbytes: int) -> int:
        """See `RegionKeys`."""
        with self._lock:
            if self._device is None:
                return 0
            made = self._device.register(self._base + offset, nbytes, remote_read=True, remote_write=True)
            self._made[made.key] = made
            return made.key

    def revoke(self, key: int) -> None:
        """See `RegionKeys`."""
        with self._lock:
            made = self._made.pop(key, None)
        if made is not None:
            made.revoke()

    def close(self) -> None:
        """Revoke all of them, and let go of the device. Idempotent."""
        with self._lock:
            self._device = None
            made, self._made = self._made, {}
        for registration in made.values():
            registration.revoke()


def _root(owner: object) -> NDArray[Any] | None:
    """The array that owns the memory, if it is one and its memory cannot move."""
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner, np.ndarray) and owner.flags.owndata and owner.flags.c_contiguous:
        return owner
    return None
