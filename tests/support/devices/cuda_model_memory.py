"""Memory of a modelled device: its addresses, and what models in other processes map."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.cuda.api import HANDLE_BYTES

Bytes = NDArray[np.uint8]
_HANDLE: Final = struct.Struct("<cIIQ")
_MARK: Final = b"S"
FIRST_ADDRESS: Final = 1 << 40


def is_device(address: int) -> bool:
    """Return whether it is one of a device."""
    return FIRST_ADDRESS <= address < 1 << 46


def of_host(address: int, nbytes: int) -> Bytes:
    """Return bytes of this process's own memory, whatever they are in."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def shared_copy(data: Bytes) -> tuple[Bytes, bytes]:
    """Return a copy of an array in shared memory, and the handle by which others map it."""
    fd = os.memfd_create("zbmd-model-device", os.MFD_CLOEXEC)
    os.ftruncate(fd, data.nbytes)
    made = _mapped(fd, data.nbytes)
    made[:] = data
    return made, _HANDLE.pack(_MARK, os.getpid(), fd, data.nbytes).ljust(HANDLE_BYTES, b"\0")


def shared_memory(handle: bytes) -> Bytes | None:
    """Map what another process shares by that handle; None if it does not, or no more."""
    mark, pid, fd, nbytes = _HANDLE.unpack_from(handle)
    if mark != _MARK or pid == os.getpid():
        return None
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mapped(opened, nbytes)
    finally:
        os.close(opened)


def _mapped(fd: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
