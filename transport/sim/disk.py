"""A simulated disk: what was written but not synced may be lost, or torn, when its process crashes.

The model is that of a journalling file system at a power cut. Calls see their own effects at once. What
survives a crash: every file's bytes up to its last `fsync`, and of the writes after it a prefix (with
`TornWrites`: any subset, each possibly cut short). Names are ordered among themselves: after the last `fsync`
of anything, or `sync_directory`, a prefix of what was created, renamed and removed. So a rename without an
fsync of the file before it may leave an empty file under the name, as it does on real disks.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

DISK_BYTES_DEFAULT = 1 << 30
OPERATION_NS = 50_000
"""Time of one operation, unless the disk is slow; the caller is blocked for so long."""
SYNC_NS = 2_000_000
UNSYNCED_MAX = 4096
"""Writes of a file, or changes of names, that may wait for a sync; then the oldest becomes durable."""
NS_PER_BYTE_LOG2 = 1
"""Twice as many bytes as nanoseconds: 2 GB/s."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    @staticmethod
    def apply(target: bytearray, offset: int, data: bytes) -> None:
        """Write `data` at `offset`; a gap before it is zeros."""
        if len(target) < offset:
            target.extend(bytes(offset - len(target)))
        target[offset : offset + len(data)] = data


class SimDisk:
    """The disk of one process; it outlives the process's incarnations. Paths are plain names.

    Raises OSError as the kernel would: ENOENT, ENOSPC when it is full, EIO for a read that fails.
    """

    def __init__(
        self, rng: random.Random, charge: Callable[[int], None], *, limit_bytes: int = DISK_BYTES_DEFAULT
    ) -> None:
        self.limit_bytes = limit_bytes
        self.full = False
        self.delay_ns = 0
        self.torn = False
        self.read_errors = 0.0
        self._rng = rng
        self._charge = charge
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._changes: list[dict[str, _File]] = []
        """The names after each change since they were last durable."""

    @property
    def used_bytes(self) -> int:
        """Bytes in all files."""
        return sum(len(file.content) for file in self._names.values())

    def write(self, path: str, data: bytes, *, offset: int = 0) -> None:
        """Write at `offset`, making the file if there is none. Not durable before `fsync`."""
        self._work(OPERATION_NS + (len(data) >> NS_PER_BYTE_LOG2))
        file = self._names.get(path)
        grows = offset + len(data) - (0 if file is None else len(file.content))
        if self.full or self.used_bytes + max(0, grows) > self.limit_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if file is None:
            file = self._names[path] = _File()
            self._changed()
        file.apply(file.content, offset, data)
        file.pending.append((offset, bytes(data)))
        if len(file.pending) > UNSYNCED_MAX:
            file.apply(file.durable, *file.pending.pop(0))

    def append(self, path: str, data: bytes) -> None:
        """Write behind what is there."""
        file = self._names.get(path)
        self.write(path, data, offset=0 if file is None else len(file.content))

    def read(self, path: str) -> bytes:
        """The whole file."""
        file = self._file(path)
        self._work(OPERATION_NS + (len(file.content) >> NS_PER_BYTE_LOG2))
        if self.read_errors and self._rng.random() < self.read_errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return bytes(file.content)

    def fsync(self, path: str) -> None:
        """Make the file durable, and all names with it."""
        file = self._file(path)
        file.durable = bytearray(file.content)
        file.pending.clear()
        self.sync_directory()

    def sync_directory(self) -> None:
        """Make all names durable, not what is in the files."""
        self._work(SYNC_NS)
        self._durable_names = dict(self._names)
        self._changes.clear()

    def rename(self, path: str, to: str) -> None:
        """Give a file another name, in place of a file that has it: atomic, not durable."""
        self._work(OPERATION_NS)
        self._names[to] = self._file(path)
        if to != path:
            del self._names[path]
        self._changed()

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._work(OPERATION_NS)
        self._file(path)
        del self._names[path]
        self._changed()

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""
        return tuple(sorted(self._names))

    def crash(self) -> None:
        """The process is gone with all that it had not synced, but for what the seed lets survive."""
        kept = self._rng.randint(0, len(self._changes))
        self._names = dict(self._changes[kept - 1] if kept else self._durable_names)
        # In the order of their names: the files of a dict of this process have one, ids have not.
        for name in sorted(self._names):
            self._lose(self._names[name])
        self._durable_names = dict(self._names)
        self._changes.clear()

    def _lose(self, file: _File) -> None:
        survived = file.durable
        count = self._rng.randint(0, len(file.pending))
        for index, (offset, data) in enumerate(file.pending):
            if self.torn and self._rng.random() < 0.5:
                file.apply(survived, offset, data[: self._rng.randint(0, len(data))])
            elif not self.torn and index < count:
                file.apply(survived, offset, data)
        file.durable = survived
        file.content = bytearray(survived)
        file.pending.clear()

    def _file(self, path: str) -> _File:
        try:
            return self._names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _changed(self) -> None:
        self._changes.append(dict(self._names))
        if len(self._changes) > UNSYNCED_MAX:
            self._durable_names = self._changes.pop(0)

    def _work(self, busy_ns: int) -> None:
        self._charge(busy_ns + self.delay_ns)
