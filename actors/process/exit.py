"""The end of a process: exit codes, the marked exit reason on standard error, callbacks, causes.

Ranks that fail often fail together and for the same reason. A failing rank marks its reason on standard
error, so that its host can print it once instead of once per rank. A process that a rank has forked shares
its standard error and unwinds through the same frames, but has no part in the job: it marks nothing, and
calls no callback.

The cause tells a failure from others, and stays when the failure repeats. It is made of the exception's
type, the place of the user's code that it passed last, the place that raised it, and the shape of its
message: numbers, addresses and paths differ from one incarnation to the next.

An event loop reports the exception of a callback and goes on. A node whose machine stopped half-way would
then hang, and be waited for. If it ends, the other nodes go on without it, as after any death.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import signal
import site
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

from zbmd.transport.errors import ArenaFull, LocalProtocolError, OutOfMemory, UserError

EXIT_FAILED: Final = 1
USAGE_EXIT_CODE: Final = 2
"""As argparse: the request cannot be carried out, and repeating it will not help."""
REQUEUE_EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h: the host was at fault, and the same command may succeed on another one."""

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
_cause_page: CausePage | None = None
_script_pid = 0
"""The process that runs a rank's script."""
_host_pipe: tuple[int, int] | None = None
"""The file that the host reads as standard error of the rank: device and inode."""


def script_begins(cause: CausePage | None = None) -> None:
    """Note that this process runs a rank's script: its exit reason is the rank's.

    cause: takes the cause of its failure. The host reads what is standard error now; a script may put a file
    in its place.
    """
    global _script_pid, _host_pipe, _cause_page
    _cause_page = cause
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


ResultT = TypeVar("ResultT")


async def ending_at_broken_invariant(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`, the main coroutine of its loop.

    Raises the `AssertionError` of a callback of this loop, after cancelling `work`.
    """
    loop, main = asyncio.get_running_loop(), asyncio.ensure_future(work)
    broken: list[AssertionError] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, AssertionError) and not main.done():
            broken.append(error)
            main.cancel()

    loop.set_exception_handler(handle)
    try:
        return await main
    except asyncio.CancelledError:
        if broken:
            raise broken[0] from None
        raise


CAUSE_MARK: Final = "|"
"""Before the part of a cause that is not for people."""
CAUSE_BYTES_MAX: Final = 400
CHAIN_MAX: Final = 16
"""Exceptions of a chain that are looked at."""

_CONSEQUENCES: Final = frozenset({"PeerLost", "MembersLost", "OperationAborted"})
"""Errors that another rank's end has: they repeat with it."""
_TOLD_BY_TEXT: Final = re.compile(r"\b(?:PeerLost|MembersLost|OperationAborted): |\bpeer (?:rank)?\d+ lost\b")
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|(?:/[^\s/'\":,]+)+/?|\d+(?:\.\d+)?")


def cause_of(error: BaseException) -> str:
    """Return the cause of a failure, such as `ValueError at train.py:12`; empty if it follows from another's.

    Behind `CAUSE_MARK` are where it was raised and a checksum of its message's shape.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if _is_consequence(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)] or frames
    place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    raised = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    shape = zlib.crc32(_VARYING.sub("#", str(error))[:CAUSE_BYTES_MAX].encode(errors="replace"))
    name = type(error).__name__
    text = f"{name}{place[-CAUSE_BYTES_MAX // 2 :]}{CAUSE_MARK}{zlib.crc32(raised.encode()):08x}{shape:08x}"
    return text[-CAUSE_BYTES_MAX:]


def _is_consequence(error: BaseException) -> bool:
    """Whether it, or what it was raised from, is about the end of another rank."""
    seen: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if seen is None:
            return False
        names = {kind.__name__ for kind in type(seen).__mro__}
        if names & _CONSEQUENCES or _TOLD_BY_TEXT.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _is_users(path: str) -> bool:
    return not path.startswith(_LIBRARIES) and not path.startswith("<")


_LIBRARIES: Final = tuple(
    {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    }
)
"""Folders of code that is not the user's: Python's, installed packages, our own."""


@contextlib.contextmanager
def noting_failure() -> Generator[None]:
    """Leave the cause of a rank's failure once the block raises: it may be ended while it leaves the job."""
    try:
        yield
    except Exception as error:
        if os.getpid() == _script_pid and _cause_page is not None:
            _cause_page.write(cause_of(error))
        raise


class CausePage:
    """Memory that a process shares with the one that forks it: the cause of its failure, if it has one."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, cause: str) -> None:
        """Leave the cause there. In the fork."""
        data = cause.encode(errors="replace")[:CAUSE_BYTES_MAX].replace(b"\0", b"")
        self._page[:CAUSE_BYTES_MAX] = data.ljust(CAUSE_BYTES_MAX, b"\0")

    def read(self) -> str:
        """Return the cause; empty if there is none. A fork may have written anything."""
        return self._page[:CAUSE_BYTES_MAX].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Give the memory back, in this process."""
        self._page.close()
