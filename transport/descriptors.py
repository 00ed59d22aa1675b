"""File descriptors that run out: one typed error, with what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Generator

from zbmd.transport.errors import OutOfDescriptors

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


def check_left(wanted_for: str) -> None:
    """Raise `OutOfDescriptors` if none is free: the kernel drops those of a message without a word."""
    with exhaustion_is_typed(wanted_for):
        os.close(os.memfd_create("zbmd-probe", os.MFD_CLOEXEC))
