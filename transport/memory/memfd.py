"""Shared memory that is really there: memfds, checked against the machine's and the cgroup's limits.

A mapping that was only promised dies by SIGBUS at its first touch, so every page is allocated at creation;
and a cgroup over its limit kills the process instead of failing the call, so the limit is read first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.errors import LocalProtocolError, OutOfMemory, RemoteProtocolError
from zbmd.transport.host.process import exhaustion_is_typed
from zbmd.transport.host.topology.cpus import groups
from zbmd.transport.native._native import Mapping

HEADROOM_BYTES = 32 << 20
"""Left free beside a new memfd, so that the process itself can go on."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 spells "no limit" as a number near 2**63."""

_V2_NAMES = ("memory.max", "memory.current", "inactive_file")
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """How many bytes can be allocated now, and which limit says so."""

    nbytes: int
    limited_by: str


def available_memory(root: Path = Path("/")) -> Available:
    """The tightest of MemAvailable and the limits of every cgroup (v2 or v1) that this process is in.

    `root` is where `proc` and `sys` are mounted.
    """
    found = [Available(nbytes=_mem_available(root), limited_by="the machine (MemAvailable)")]
    found += _cgroup_limits(root)
    return min(found, key=lambda a: a.nbytes)


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED_BYTES


def _cgroup_limits(root: Path) -> Iterator[Available]:
    for group in groups("memory", root):
        limit_name, used_name, reclaimable_name = _V2_NAMES if group.v2 else _V1_NAMES
        limit, used = _read_number(group.path / limit_name), _read_number(group.path / used_name)
        if limit is None or used is None or limit >= _UNLIMITED_BYTES:
            continue
        reclaimable = _read_stat(group.path / "memory.stat", reclaimable_name)
        yield Available(nbytes=max(0, limit - used + reclaimable), limited_by=f"the cgroup {group.path}")


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file, or None if there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def in_words(nbytes: int) -> str:
    """`nbytes` as `12.0 MiB`, `1.5 GiB` or `2.0 TiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / (1 << 20):,.1f} MiB"


def create_memfd(name: str, nbytes: int) -> int:
    """A close-on-exec memfd of `nbytes`, every page allocated, its size sealed; the caller closes it.

    Raises `OutOfMemory` before anything is allocated if that much is not there, `OutOfDescriptors`, and
    `LocalProtocolError` on a size that is not positive.
    """
    fd = open_memfd(name, nbytes)
    try:
        fill_memfd(name, fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memfd(name: str, nbytes: int) -> int:
    """The first half of `create_memfd`: nothing is allocated yet, but there is room. Raises as it does."""
    if nbytes <= 0:
        raise LocalProtocolError(f"shared memory {name!r} of {nbytes} bytes: the size must be positive")
    with exhaustion_is_typed(f"shared memory {name!r}"):
        available = available_memory()
    if nbytes + HEADROOM_BYTES > available.nbytes:
        raise _out_of_memory(name, nbytes, available)
    with exhaustion_is_typed(f"shared memory {name!r}"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def fill_memfd(name: str, fd: int, nbytes: int) -> None:
    """The second half: allocate what is not there yet, and seal the size. Raises `OutOfMemory`."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _out_of_memory(name, nbytes, available_memory()) from error
        raise


def _out_of_memory(name: str, nbytes: int, available: Available) -> OutOfMemory:
    return OutOfMemory(
        f"{in_words(nbytes)} of shared memory asked for {name!r}, but {available.limited_by} has "
        f"{in_words(available.nbytes)} available and {in_words(HEADROOM_BYTES)} are kept free. "
        "Ask for less with --arena (or ZBMD_ARENA), start fewer ranks, or raise the memory limit.",
        asked_bytes=nbytes,
        available_bytes=available.nbytes,
    )


def map_own(what: str, fd: int, nbytes: int) -> Mapping:
    """Map all of a memfd of ours for writing. Raises `OutOfMemory` if the kernel has no place for it."""
    try:
        return Mapping(fd, nbytes, nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise _no_place(f"{in_words(nbytes)} of shared memory for {what!r}", nbytes) from error


def _no_place(what: str, nbytes: int) -> OutOfMemory:
    """There is memory, but the process may map no more of it. The kernel does not say which bound was met."""
    return OutOfMemory(
        f"{what} cannot be mapped: this process has as many mappings as it may (raise vm.max_map_count by "
        "sysctl, or open fewer links), or its address space is used up (raise ulimit -v, or choose a smaller "
        "--arena).",
        asked_bytes=nbytes,
    )


def sealed_size(fd: int) -> int:
    """The size of a memfd that came from a peer, once it is certain that it can no longer shrink.

    Raises `RemoteProtocolError` if `fd` is not a memfd with its size sealed: a peer could truncate it and
    kill us by SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError("shared memory from a peer is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RemoteProtocolError("shared memory from a peer can still shrink: its size is not sealed")
    return os.fstat(fd).st_size


def map_from_peer(fd: int, nbytes: int, writable_bytes: int) -> Mapping:
    """Map memory that came from a peer, the first `writable_bytes` for writing.

    Raises `OutOfMemory` if there is no room for it in our address space, and `RemoteProtocolError` if the
    kernel refuses otherwise: it is sealed against writing, say, or the descriptor is open for reading alone.
    """
    try:
        return Mapping(fd, nbytes, writable_bytes)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _no_place(f"{in_words(nbytes)} of a peer's shared memory", nbytes) from error
        raise RemoteProtocolError(f"shared memory from a peer cannot be mapped: {error.strerror}") from error
