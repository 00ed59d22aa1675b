"""Map the pages of new memory on a thread, ahead of what is written there.

The kernel maps and clears a page when it is first written to, which takes several times as long as the
copy of its bytes. On a second core that passes beside the copy.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from numpy.typing import NDArray

from zbmd.transport.native._native import MADV_POPULATE_WRITE, address_of

TOGETHER_BYTES: Final = 8 << 20
"""Mapped at once, between two looks whether pages are still wanted. Smaller arrays are left alone."""


@contextmanager
def mapped_ahead(arrays: Sequence[NDArray[Any]]) -> Generator[threading.Thread | None]:
    """Meanwhile map the pages of these arrays, in their order; yield the thread that does so, if one does.

    The arrays are contiguous; their contents do not change. A kernel before Linux 5.14 maps nothing ahead.
    """
    large = [each for each in arrays if each.nbytes >= TOGETHER_BYTES]
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not large:
        yield None
        return
    over = threading.Event()
    thread = threading.Thread(target=_map, args=(madvise, large, over), name="zbmd-pages")
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def _map(madvise: Any, arrays: Sequence[NDArray[Any]], over: threading.Event) -> None:
    for array in arrays:
        address = address_of(array)
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(begin, end, TOGETHER_BYTES):
            nbytes = min(TOGETHER_BYTES, end - at)
            refused = madvise(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE)
            if refused or over.is_set():
                return
