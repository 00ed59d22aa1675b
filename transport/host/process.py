"""The calling process: its name, its parent's death, its threads' priority, its file descriptors.

`python -m zbmd.transport.host.process PARENT COMMAND [ARGUMENT …]` becomes a command that ends with the
process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Generator
from enum import Enum
from typing import Final, TypeVar

import msgspec

from zbmd.transport.errors import OutOfDescriptors, RemoteProtocolError

# ---- the other end of a unix socket

_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket, from the kernel. Raises OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


MessageT = TypeVar("MessageT")


def decoded_packet(
    decoder: msgspec.msgpack.Decoder[MessageT], packet: bytes, problem: str, bytes_max: int
) -> MessageT:
    """Decode a packet of another process of this host. problem: the beginning of the error for a bad one.

    Raises `RemoteProtocolError`.
    """
    if len(packet) > bytes_max:
        raise RemoteProtocolError(f"a packet of {len(packet)} bytes: at most {bytes_max}")
    try:
        return decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{problem}: {error}") from error


# ---- prctl(2): name, parent-death signal, child subreaper

NAME_BYTES_MAX: Final = 15

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, cut to `NAME_BYTES_MAX` bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES_MAX]))


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends.

    Exits at once if the parent has already ended.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: ctypes.c_char_p | ctypes.c_ulong) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


# ---- threads that must run when due, on a busy machine too: those whose silence is taken for a death

PRIORITY: Final = 1
"""The lowest of the real-time ones: above all that computes, below all that the kernel does."""
NICE: Final = -15


class ThreadPriority(Enum):
    """The priority that a thread was given."""

    REAL_TIME = "real-time priority"
    NICE = "a high share"
    NONE = "no priority: CAP_SYS_NICE, RLIMIT_RTPRIO or RLIMIT_NICE would allow it"


def raise_thread_priority() -> ThreadPriority:
    """Have the calling thread run before those that compute, as far as this process may; what it got.

    For threads that sleep nearly always. Real-time threads share their core in turn (SCHED_RR), the kernel
    keeps a part of it for the others, and processes that are forked from such a thread do not inherit it.
    """
    try:
        # 0 is the calling thread: sched_setscheduler(2) is about threads.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        except OSError:
            return ThreadPriority.NONE
        return ThreadPriority.NICE
    return ThreadPriority.REAL_TIME


# ---- file descriptors that run out: one typed error, with what to do about it

FILES_A_PEER: Final = 8
"""That a process may hold for each rank of its job: links and stripes, or a host's pipes and pidfds."""
FILES_KEPT: Final = 256
"""For all else."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})


def advice(error_number: int) -> str:
    """What EMFILE or ENFILE means and what helps, as the end of a sentence."""
    if error_number == errno.ENFILE:
        return "this machine has no file descriptors left: raise fs.file-max"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return (
        f"this process may hold {soft} file descriptors and has no more: end links, or raise the limit "
        f"(`ulimit -n`, LimitNOFILE= of a systemd unit; up to {most} without being root)"
    )


@contextlib.contextmanager
def exhaustion_is_typed(wanted_for: str) -> Generator[None]:
    """Turn EMFILE and ENFILE within into `OutOfDescriptors`, and say what for, such as `a link to rank1`."""
    try:
        yield
    except OutOfDescriptors as error:
        raise OutOfDescriptors(f"{wanted_for}: {error}") from error
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        raise OutOfDescriptors(f"no file descriptor for {wanted_for}: {advice(error.errno)}") from error


def files_of(ranks: int) -> int:
    """Descriptors that a process of a job of so many ranks may hold."""
    return FILES_KEPT + FILES_A_PEER * ranks


def make_room(ranks: int) -> None:
    """Raise this process's own limit to `files_of(ranks)` if it is lower, as far as it may be raised."""
    wanted = files_of(ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_left(wanted_for: str) -> None:
    """Raise `OutOfDescriptors` if none is free: the kernel drops those of a message without a word."""
    with exhaustion_is_typed(wanted_for):
        os.close(os.memfd_create("zbmd-probe", os.MFD_CLOEXEC))


def main() -> None:
    """Request a SIGKILL at the parent's end, which outlasts `execvp`, and become the command."""
    end_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
