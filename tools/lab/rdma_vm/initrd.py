"""The machine's first file system: a cpio archive in the format that the kernel unpacks ("newc").

The format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.
"""

from __future__ import annotations

import stat
from pathlib import PurePosixPath
from typing import Final

_TRAILER: Final = "TRAILER!!!"
_ALIGN: Final = 4


class Archive:
    """Collects files; parents of each come by themselves, before it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names: set[str] = set()

    def file(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """A regular file. name: relative to the root."""
        self._add(name, stat.S_IFREG | (0o755 if executable else 0o644), data)

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._add(name, stat.S_IFLNK | 0o777, target.encode())

    def folder(self, name: str) -> None:
        """A folder; nothing if it is there."""
        if name not in self._names:
            self._add(name, stat.S_IFDIR | 0o755, b"")

    def console(self) -> None:
        """The device that the first process writes to."""
        self._add("dev/console", stat.S_IFCHR | 0o600, b"", device=(5, 1))

    def whole(self) -> bytes:
        """The whole archive."""
        trailer = _record(_TRAILER, 0, b"", 0, (0, 0))
        return b"".join((*self._parts, trailer))

    def _add(self, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            self.folder(str(parent))
        self._names.add(name)
        self._parts.append(_record(name, mode, data, len(self._names), device))


def _record(name: str, mode: int, data: bytes, inode: int, device: tuple[int, int]) -> bytes:
    path = name.encode() + b"\0"
    #        inode  mode  uid gid links time size       device major, minor, of the node major, minor
    numbers = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGN)
