"""Processes that a rank makes: none of them is the rank.

A forked child has a copy of all that its parent has: links in shared memory, frames that would leave the job
when they unwind, signal handlers that write to the parent's event loop. While a rank is a member, a fork
gives up these copies in the child; and no child may join in the name of the rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Generator, Mapping
from typing import Any, Final, NoReturn

from zbmd.actors.process.exit import EXIT_FAILED
from zbmd.transport.errors import UserError

JOINED_VARIABLE: Final = "ZBMD_JOINED_PID"
"""Set by a rank while it is a member, for its children: its process id."""
_LOOP_MODULES: Final = ("asyncio.unix_events", "asyncio.runners", "uvloop.loop")

_member_pid = 0
"""This process, while it is a member of a job."""


@contextlib.contextmanager
def children_end_here() -> Generator[None]:
    """Run code whose callers are this process's own. A forked child that leaves the block ends there.

    It ends as processes of `multiprocessing` do: with the exit code, traceback and output of a script, but
    without the handlers of `atexit` and the destructors that it has inherited. Those wait for threads that
    no child has, and end processes that are its parent's.
    """
    pid = os.getpid()
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if os.getpid() != pid:
            _end(error)
        raise
    if os.getpid() != pid:
        _end(None)


@contextlib.contextmanager
def membership() -> Generator[None]:
    """Be a member of a job within; see `children_end_here`."""
    global _member_pid
    pid, before = os.getpid(), _member_pid
    os.environ[JOINED_VARIABLE], _member_pid = str(pid), pid
    try:
        with children_end_here():
            yield
    finally:
        _member_pid = before
        if not before:
            os.environ.pop(JOINED_VARIABLE, None)


def check_is_no_child(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if this process is a child of a rank that is a member."""
    parent = environment.get(JOINED_VARIABLE, "")
    if parent and parent != str(os.getpid()):
        raise UserError(
            f"this process ({os.getpid()}) was made by the process {parent}, which is rank "
            f"{environment.get('RANK', '?')} of this job already; a rank is one process. Call this in the "
            "rank itself, or start more ranks (-n). A script that makes processes by `spawn` guards what "
            'only the rank does with `if __name__ == "__main__":`'
        )


def _end(error: BaseException | None) -> NoReturn:
    """End this forked child. error: what it unwinds by; None if it returns."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _after_fork() -> None:
    """Have signals to a member's child mean what they mean to a new process.

    The handlers of an event loop write to a socket that the child shares with its parent: the parent would
    take a SIGTERM for the child as its own, and the child would not end.
    """
    if not _member_pid:
        return
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if _is_of_a_loop(signal.getsignal(number)):
            interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)


def _is_of_a_loop(handler: Any) -> bool:
    if isinstance(handler, functools.partial):
        handler = handler.func
    return callable(handler) and getattr(handler, "__module__", "") in _LOOP_MODULES


os.register_at_fork(after_in_child=_after_fork)
