"""The end of a process: exit codes, the marked exit reason on standard error, callbacks at the script's end.

Ranks that fail often fail together and for the same reason. A failing rank marks its reason on standard
error, so that its host can print it once instead of once per rank.
"""

from __future__ import annotations

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
STDERR_FD: Final = 2
CALLBACKS_MAX: Final = 16

OnEnd = Callable[[bool], None]
"""Takes whether the script failed."""

_callbacks: list[OnEnd] = []


def describe_exit(code: int) -> str:
    """Describe an exit code, or minus a signal number, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed ({name})"


def write_exit_reason(text: str) -> None:
    """Write `text` to standard error at once, each line marked."""
    sys.stderr.flush()
    data = b"".join(MARK + line.encode(errors="replace") + b"\n" for line in text.splitlines())
    while data:
        data = data[os.write(STDERR_FD, data) :]


def without_mark(line: bytes) -> tuple[bytes, bool]:
    """Return the line as it is to be shown, and whether it was marked as an exit reason."""
    return line.removeprefix(MARK), line.startswith(MARK)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the error's message says what to do, so that a traceback would not help."""
    return isinstance(error, UserError | OutOfMemory) and not isinstance(error, ArenaFull)


def at_script_end(callback: OnEnd) -> None:
    """Have `callback` called on the main thread when the script has ended, the last registered first.

    That is before the interpreter shuts down, when executors still take work. Raises `LocalProtocolError`.
    """
    if len(_callbacks) >= CALLBACKS_MAX:
        raise LocalProtocolError(f"at most {CALLBACKS_MAX} callbacks can be registered for the script's end")
    _callbacks.append(callback)


def script_ended(*, failed: bool) -> None:
    """Call each registered callback once."""
    while _callbacks:
        _callbacks.pop()(failed)
