"""Has as many mappings as the kernel allows, then maps memory and prints the error."""

from __future__ import annotations

import ctypes
import mmap
import pathlib

from zbmd.transport.errors import OutOfMemory
from zbmd.transport.memory.memfd import create_memfd, map_own

most = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
libc = ctypes.CDLL(None, use_errno=True)
held = mmap.mmap(-1, (most + 2) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = ctypes.addressof(ctypes.c_char.from_buffer(held))
for page in range(0, most + 2, 2):  # each splits the mapping once more
    if libc.mprotect(ctypes.c_void_p(base + page * mmap.PAGESIZE), mmap.PAGESIZE, mmap.PROT_READ):
        break
fd = create_memfd("test", 1 << 21)
try:
    kept = [map_own("test", fd, 1 << 21) for _ in range(16)]
except OutOfMemory as error:
    print(error)
