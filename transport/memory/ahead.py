"""Map the pages of new memory on a thread, ahead of what is written there, and in large pages.

The kernel maps and clears a page when it is first written to, which takes several times as long as the
copy of its bytes. On a second core that passes beside the copy, and in pages of 2 MiB it takes a fifth.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from numpy.typing import NDArray

from zbmd.transport.native._native import MADV_HUGEPAGE, MADV_POPULATE_WRITE, address_of

TOGETHER_BYTES: Final = 8 << 20
"""Mapped at once, between two looks whether pages are still wanted. Smaller arrays are left alone."""


def prefer_large_pages(array: NDArray[Any]) -> None:
    """Have the kernel map the pages of a large array in large ones, where it has them. Contents stay."""
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
    begin, end = _whole_pages(array)
    if madvise is not None and array.nbytes >= TOGETHER_BYTES:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)


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
    for each in large:
        prefer_large_pages(each)
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
        begin, end = _whole_pages(array)
        for at in range(begin, end, TOGETHER_BYTES):
            nbytes = min(TOGETHER_BYTES, end - at)
            refused = madvise(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE)
            if refused or over.is_set():
                return


def _whole_pages(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses between which an array has whole pages."""
    address = address_of(array)
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return begin, (address + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
