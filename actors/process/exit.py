"""The end of a process: exit codes, the marked exit reason on standard error, callbacks at the script's end.

Ranks that fail often fail together and for the same reason. A failing rank marks its reason on standard
error, so that its host can print it once instead of once per rank. A process that a rank has forked shares
its standard error and unwinds through the same frames, but has no part in the job: it marks nothing, and
calls no callback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from zbmd.transport.errors import ArenaFull, LocalProtocolError, OutOfMemory, UserError

EXIT_FAILED: Final = 1
USAGE_EXIT_CODE: Final = 2
"""As argparse: the request cannot be carried out, and repeating it will not help."""

MARK: Final = b"\x1ezbmd:last-words\x1e"
"""Begins each line of an exit reason; the ASCII record separators keep ordinary output from matching."""
TERMINAL_MARK: Final = b"\x1ezbmd:terminal\x1e"
TERMINAL_BACK_MARK: Final = b"\x1ezbmd:terminal-back\x1e"
"""Lines of these ask for the terminal of the run, and give it back (`debugger`)."""
MARKS_BEGIN: Final = b"\x1ezbmd:"
STDERR_FD: Final = 2
CALLBACKS_MAX: Final = 16

OnEnd = Callable[[bool], None]
"""Takes whether the script failed."""

_callbacks: list[tuple[int, OnEnd]] = []
"""Each with the process that registered it."""
_script_pid = 0
"""The process that runs a rank's script."""
_host_pipe: tuple[int, int] | None = None
"""The file that the host reads as standard error of the rank: device and inode."""


def script_begins() -> None:
    """Note that this process runs a rank's script: its exit reason is the rank's.

    The host reads what is standard error now; a script may put a file in its place.
    """
    global _script_pid, _host_pipe
    _script_pid, _host_pipe = os.getpid(), _stderr_file()


def describe_exit(code: int) -> str:
    """Describe an exit code, or minus a signal number, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed ({name})"


def _stderr_file() -> tuple[int, int] | None:
    try:
        found = os.fstat(STDERR_FD)
    except OSError:
        return None  # the script has closed it
    return found.st_dev, found.st_ino


def write_exit_reason(text: str) -> None:
    """Write `text` to standard error at once.

    Each line is marked if this process is the rank itself, and its host reads it.
    """
    with contextlib.suppress(OSError, ValueError):  # closed, or full
        sys.stderr.flush()
    is_read = os.getpid() == _script_pid and _stderr_file() == _host_pipe
    mark = MARK if is_read else b""
    data = b"".join(mark + line.encode(errors="replace") + b"\n" for line in text.splitlines())
    while data:
        data = data[os.write(STDERR_FD, data) :]


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the error's message says what to do, so that a traceback would not help."""
    return isinstance(error, UserError | OutOfMemory) and not isinstance(error, ArenaFull)


def at_script_end(callback: OnEnd) -> None:
    """Have `callback` called on the main thread when the script has ended, the last registered first.

    That is before the interpreter shuts down, when executors still take work. A forked child does not call
    it. Raises `LocalProtocolError`.
    """
    if len(_callbacks) >= CALLBACKS_MAX:
        raise LocalProtocolError(f"at most {CALLBACKS_MAX} callbacks can be registered for the script's end")
    _callbacks.append((os.getpid(), callback))


def script_ended(*, failed: bool) -> None:
    """Call each callback that this process registered, once."""
    while _callbacks:
        pid, callback = _callbacks.pop()
        if pid == os.getpid():
            callback(failed)
