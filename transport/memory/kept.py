"""Named blocks that outlive their process, in an arena or a file, listed in a table before them.

The process that launched a rank keeps a memfd, and gives it to the replacement, which so finds its
predecessor's blocks where they were. The rank has its arena there, or, where peers may read an arena after
its process has ended, blocks alone. Whether what is in a block is whole is for its user to know.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Generator, Iterator, MutableMapping
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import ArenaFull, LocalProtocolError
from zbmd.transport.memory.arena import ALIGNMENT, Arena, Memory
from zbmd.transport.memory.memfd import TABLE_BYTES, grow_memfd

KEPT_FDS_VARIABLE: Final = "ZBMD_KEPT_FDS"
"""Descriptors of a rank that was launched: the memfd in which it is to have its arena, and the pidfd of the
process before it, if that is still ending."""
ENDING_MS_MAX: Final = 30_000
"""Within that the kernel ends a process that was killed, but for one that is stuck in a system call: 3 GiB in
0.3 s on an idle machine, and in 4 to 11 s where others have the processors: the process itself frees its
memory. A state whose ranks are all killed at once has no other copy."""
LOCK_LOOK_MS: Final = 5
NAME_BYTES: Final = 48
_ENTRY: Final = struct.Struct(f"<{NAME_BYTES}s2Q")  # name, offset from the table, bytes
ENTRIES: Final = TABLE_BYTES // _ENTRY.size
_GIVEN_BACK: Final = 1
"""The first byte of an entry whose block was given back."""
_FILE: Final = "the state that outlives this process"


def take_kept_fd(
    environment: MutableMapping[str, str], *, wanted: bool, wait_ms: int = ENDING_MS_MAX
) -> int | None:
    """Return the memfd that outlives this process, if it was given one that nothing has taken yet.

    Waits for the end of the process before; None if that takes too long, or if it is not wanted.
    """
    words = environment.pop(KEPT_FDS_VARIABLE, "").split()
    if not words or not all(word.isdecimal() for word in words):
        return None
    memory, *pidfds = map(int, words)
    try:
        fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:  # a program that the rank has started has the variable, but not the descriptor
        return None
    for pidfd in pidfds:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        wanted = wanted and bool(ended.poll(wait_ms))
        os.close(pidfd)
    if not wanted:
        os.close(memory)
        return None
    return memory


@contextlib.contextmanager
def exclusively(memory: int | None, *, wait_ms: int = ENDING_MS_MAX) -> Generator[int | None]:
    """Yield `memory`, locked by this process until the block or the process ends; None if it cannot be had.

    Another process has it while it can write there, also one whose launcher is gone. Its end is waited for;
    `memory` is closed if that takes longer than `wait_ms`.
    """
    lock = None if memory is None else _locked(memory, wait_ms)
    if lock is None and memory is not None:
        os.close(memory)
    try:
        yield None if lock is None else memory
    finally:
        if lock is not None:
            os.close(lock)


def _locked(memory: int, wait_ms: int) -> int | None:
    # A description of its own: the lock must not be held by who was sent a duplicate of the descriptor.
    lock = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
    for _ in range(1 + wait_ms // LOCK_LOOK_MS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_LOOK_MS / 1000)  # the kernel tells nobody of a lock in time
        else:
            return lock
    os.close(lock)
    return None


def blocks_in(table: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset from the table, and bytes of what a table lists. Nothing of it is checked."""
    for number in range(ENTRIES):
        name, begin, nbytes = _ENTRY.unpack_from(table, number * _ENTRY.size)
        if name[:1] == b"\0":
            return
        if name[0] != _GIVEN_BACK:
            yield name.rstrip(b"\0"), begin, nbytes


def file_of(fd: int) -> tuple[int, int]:
    """Return the identity of what a descriptor is of, which its duplicates have in any process."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def span_of(fd: int, name: str) -> tuple[int, int] | None:
    """Return where a block begins in a memfd that outlives its process, and its bytes; None if it has none.

    It is untrusted: a table that is damaged is one without blocks. Raises OSError.
    """
    size = os.fstat(fd).st_size
    if size <= TABLE_BYTES:
        return None
    for listed, begin, nbytes in blocks_in(memoryview(os.pread(fd, TABLE_BYTES, 0))):
        if listed == name.encode() and begin >= TABLE_BYTES and 0 < nbytes <= size - begin:
            return begin, nbytes
    return None


def block_of(fd: int, name: str) -> memoryview | None:
    """Return the memory of a block, read-only, as of `span_of`. Raises OSError."""
    span = span_of(fd, name)
    if span is None:
        return None
    begin, nbytes = span
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    whole = mmap.mmap(fd, begin - first + nbytes, prot=mmap.PROT_READ, offset=first)
    return memoryview(whole)[begin - first :]


class _Table:
    """The table of a memory's blocks, in `view`. For one process at a time."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._entries = view, 0

    def adopt(self, claim: Callable[[bytes, int, int], bool]) -> None:
        """Take over what is listed, as far as `claim` takes name, offset and bytes; the rest is cleared."""
        for number in range(ENTRIES):
            raw, begin, nbytes = _ENTRY.unpack_from(self._view, number * _ENTRY.size)
            name = raw.rstrip(b"\0")
            if not name or (name[0] != _GIVEN_BACK and not claim(name, begin, nbytes)):
                break  # the end, or a table that is damaged; what follows is no better
            self._entries = number + 1
        self._view[self._entries * _ENTRY.size :] = bytes(TABLE_BYTES - self._entries * _ENTRY.size)

    def find(self, key: bytes) -> int | None:
        """Return the number of the entry that lists a block."""
        for number in range(self._entries):
            raw = bytes(self._view[number * _ENTRY.size :][:NAME_BYTES])
            if raw.rstrip(b"\0") == key:
                return number
        return None

    def free(self, nbytes: int) -> int:
        """Return the number of an entry for a block of so many bytes. Raises `ArenaFull`."""
        for number in range(self._entries):
            if self._view[number * _ENTRY.size] == _GIVEN_BACK:
                return number
        if self._entries == ENTRIES:
            raise ArenaFull(
                f"{ENTRIES} blocks are kept, as many as there can be", asked_bytes=nbytes, available_bytes=0
            )
        return self._entries

    def put(self, number: int, key: bytes, begin: int, nbytes: int) -> None:
        """List a block."""
        entry = _ENTRY.pack(key, begin, nbytes)
        at = number * _ENTRY.size
        # The name last, and its first byte last of it: whoever is killed before has listed nothing.
        self._view[at + 1 : at + _ENTRY.size] = entry[1:]
        self._view[at : at + 1] = entry[:1]
        self._entries = max(self._entries, number + 1)

    def strike(self, key: bytes) -> None:
        """Take a block out of the table by one byte: whoever is killed has listed all others."""
        number = self.find(key)
        assert number is not None, "it is listed"
        self._view[number * _ENTRY.size] = _GIVEN_BACK


def _key_of(name: str) -> bytes:
    key = name.encode()
    if not 0 < len(key) <= NAME_BYTES or b"\0" in key:
        raise LocalProtocolError(f"{name!r} is no name of a block: 1 to {NAME_BYTES} bytes")
    return key


class KeptMemory(Protocol):
    """Named blocks in memory that outlives this process."""

    def has(self, name: str) -> bool:
        """Whether a block of this name is in use, or was left by a predecessor."""
        ...

    def left(self, name: str) -> int:
        """Return the bytes of the block that a predecessor has left under this name; 0 if it has none."""
        ...

    def peek(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of what a predecessor has left."""
        ...

    def release(self, name: str) -> None:
        """Give a block back: its memory is free once its array and all views of it are gone. Idempotent."""
        ...

    def block(self, name: str, nbytes: int) -> tuple[NDArray[Any], bool]:
        """Return the block of this name, (nbytes,) uint8, and whether it is a predecessor's.

        A new one is zero. It is there until `release`, or the end of the process. Raises `OutOfMemory`, and
        `LocalProtocolError` for a name that is asked for twice or is too long.
        """
        ...

    def ready(self, array: NDArray[Any]) -> None:
        """Return when all pages of a block, or of a part of one, exist. Raises `OutOfMemory`."""
        ...


class KeptBlocks(KeptMemory):
    """The blocks of `arena`; their table lies at `offset` of `memory`."""

    def __init__(self, arena: Arena, memory: Memory, offset: int) -> None:
        self._arena, self._memory, self._base = arena, memory, offset
        self._table = _Table(memory.view(offset, TABLE_BYTES, writable=True))
        self._claimed: dict[bytes, tuple[int, int]] = {}
        """Offset and bytes of what a predecessor has left, and nobody has asked for yet."""
        self._made: dict[bytes, NDArray[Any]] = {}
        """Held, so that their memory is not given to others before `release`."""
        self._table.adopt(self._claim)

    def _claim(self, name: bytes, begin: int, nbytes: int) -> bool:
        if name in self._claimed or not nbytes:
            return False
        try:
            self._arena.claim(self._base + begin, nbytes)
        except (ArenaFull, LocalProtocolError):
            return False
        self._claimed[name] = self._base + begin, nbytes
        return True

    def has(self, name: str) -> bool:
        """See `KeptMemory`."""
        return self._table.find(name.encode()) is not None

    def left(self, name: str) -> int:
        """See `KeptMemory`."""
        return self._claimed.get(name.encode(), (0, 0))[1]

    def peek(self, name: str, nbytes: int) -> bytes:
        """See `KeptMemory`."""
        begin, size = self._claimed[name.encode()]
        return bytes(self._memory.view(begin, min(nbytes, size)))

    def release(self, name: str) -> None:
        """See `KeptMemory`."""
        key = name.encode()
        begin, found = self._claimed.pop(key, (0, 0))
        if found:
            self._arena.unreserve(begin)
        if found or self._made.pop(key, None) is not None:
            self._table.strike(key)

    def block(self, name: str, nbytes: int) -> tuple[NDArray[Any], bool]:
        """See `KeptMemory`. Its pages may not exist yet. Raises `ArenaFull`."""
        key = _key_of(name)
        begin, found = self._claimed.pop(key, (0, 0))
        if found == nbytes > 0:
            self._made[key] = self._arena.taken(begin, nbytes)
            return self._made[key], True
        if found:
            self._arena.unreserve(begin)
            self._table.strike(key)
        elif self._table.find(key) is not None:
            raise LocalProtocolError(f"the block {name!r} is in use already")
        number = self._table.free(nbytes)
        made = self._arena.lazy_zeros(nbytes, np.uint8)
        offset = self._arena.offset_of(made)
        assert offset is not None, "it lies in the arena"
        self._made[key] = made
        self._table.put(number, key, offset - self._base, nbytes)
        return made, False

    def ready(self, array: NDArray[Any]) -> None:
        """See `KeptMemory`."""
        self._arena.ready(array)


class KeptFile(KeptMemory):
    """The blocks of a memfd in which no arena lies, and which grows with them. For one thread at a time.

    fd: empty, or as a predecessor has left it; it is this object's from now on, and of no other process while
    this one lives (`exclusively`).
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._claimed = fd, dict[bytes, tuple[int, int]]()
        self._made: dict[bytes, mmap.mmap] = {}
        if os.fstat(fd).st_size < TABLE_BYTES:
            grow_memfd(_FILE, fd, TABLE_BYTES)
        self._size = os.fstat(fd).st_size
        self._table = _Table(memoryview(mmap.mmap(fd, TABLE_BYTES)))
        self._table.adopt(self._claim)
        end = TABLE_BYTES
        for begin, nbytes in sorted(self._claimed.values()):
            self._remove(end, begin)
            end = begin + _whole_pages(nbytes)
        self._remove(end, self._size)

    def _claim(self, name: bytes, begin: int, nbytes: int) -> bool:
        end = begin + _whole_pages(nbytes)
        others = ((first, first + _whole_pages(size)) for first, size in self._claimed.values())
        free = all(end <= first or last <= begin for first, last in others)
        if name in self._claimed or not nbytes or begin % mmap.PAGESIZE or not free:
            return False
        if begin < TABLE_BYTES or end > self._size:
            return False
        self._claimed[name] = begin, nbytes
        return True

    def _remove(self, begin: int, end: int) -> None:
        """Give pages back that no block lists: a predecessor was killed as it made or released one."""
        if begin < end:
            with contextlib.closing(mmap.mmap(self._fd, end - begin, offset=begin)) as gap:
                gap.madvise(mmap.MADV_REMOVE)

    def has(self, name: str) -> bool:
        """See `KeptMemory`."""
        return self._table.find(name.encode()) is not None

    def left(self, name: str) -> int:
        """See `KeptMemory`."""
        return self._claimed.get(name.encode(), (0, 0))[1]

    def peek(self, name: str, nbytes: int) -> bytes:
        """See `KeptMemory`."""
        begin, size = self._claimed[name.encode()]
        return os.pread(self._fd, min(nbytes, size), begin)

    def release(self, name: str) -> None:
        """See `KeptMemory`. Its pages are free at once, and zeros are read there."""
        key = name.encode()
        begin, found = self._claimed.pop(key, (0, 0))
        memory = self._made.pop(key, None)
        if found or memory is not None:
            self._table.strike(key)
        self._remove(begin, begin + _whole_pages(found))
        if memory is not None:
            memory.madvise(mmap.MADV_REMOVE)

    def block(self, name: str, nbytes: int) -> tuple[NDArray[Any], bool]:
        """See `KeptMemory`."""
        key = _key_of(name)
        begin, found = self._claimed.pop(key, (0, 0))
        if found == nbytes > 0:
            return self._mapped(key, begin, nbytes), True
        if found:
            self._table.strike(key)
            self._remove(begin, begin + _whole_pages(found))
        elif self._table.find(key) is not None:
            raise LocalProtocolError(f"the block {name!r} is in use already")
        number, begin = self._table.free(nbytes), self._size
        grow_memfd(_FILE, self._fd, _whole_pages(nbytes))
        self._size += _whole_pages(nbytes)
        made = self._mapped(key, begin, nbytes)
        self._table.put(number, key, begin, nbytes)
        return made, False

    def _mapped(self, key: bytes, begin: int, nbytes: int) -> NDArray[Any]:
        self._made[key] = mmap.mmap(self._fd, _whole_pages(nbytes), offset=begin)
        return np.frombuffer(self._made[key], np.uint8, nbytes)

    def close(self) -> None:
        """Close the descriptor; arrays of blocks stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def ready(self, array: NDArray[Any]) -> None:
        """See `KeptMemory`: they are allocated with their block."""


def take_kept_file(environment: MutableMapping[str, str], *, wait_ms: int = ENDING_MS_MAX) -> KeptFile | None:
    """Return the memory that outlives this process, for blocks alone; None if it was given none.

    No other process has it while this one lives: what it forks lets go of the lock. Waits for the processes
    before, which may be ending, and raises `OutOfMemory` as `KeptFile`.
    """
    memory = take_kept_fd(environment, wanted=True, wait_ms=wait_ms)
    lock = None if memory is None else _locked(memory, wait_ms)
    if memory is None or lock is None:
        if memory is not None:
            os.close(memory)
        return None
    os.register_at_fork(after_in_child=partial(os.close, lock))
    return KeptFile(memory)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


assert TABLE_BYTES % ALIGNMENT == 0
