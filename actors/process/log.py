"""Logging: zbmd's own log on standard error, and a rank's events as JSON lines in a bounded file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

import structlog
from structlog.typing import EventDict, FilteringBoundLogger

from zbmd.transport.errors import UserError

LOG_BYTES_MAX: Final = 256 << 20
"""Beyond this size the file is renamed to `NAME.1`, replacing the previous one."""


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Send zbmd's log to standard error, unless the program has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=StderrLogger,
    )


class StderrLogger:
    """The final logger of the chain: prints to the current standard error.

    If that is closed or full, the line is dropped: logging must never end a thread.
    """

    def __init__(self, *_: object) -> None:
        """Accept the arguments of `get_logger`, which structlog passes to a logger factory."""

    def msg(self, message: str) -> None:
        """Print one line, in one write: others may share the descriptor, and `print` writes its end apart."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None, if it never was open
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()

    debug = info = warning = error = critical = exception = msg


class RankLogFile:
    """The final logger of the chain: appends whole lines, so that incarnations may share the file.

    Raises `UserError` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = _open(path)
        except OSError as error:
            raise UserError(
                f"cannot write logs to {path.parent}: {error.strerror}. Give --log-dir (or ZBMD_LOG_DIR) a "
                "directory that you may write to."
            ) from error
        self._size_bytes = os.fstat(self._fd).st_size
        self._full = False

    def write(self, line: str) -> None:
        """Append one line in one write. A full disk ends the log, not the job."""
        if self._full:
            return
        data = line.encode() + b"\n"
        try:
            if self._size_bytes + len(data) > LOG_BYTES_MAX:
                os.replace(self._path, self._path.with_suffix(self._path.suffix + ".1"))
                os.close(self._fd)
                self._fd = -1
                self._fd = _open(self._path)
                self._size_bytes = 0
            os.write(self._fd, data)
        except OSError as error:
            self._full = True
            print(f"zbmd: the log {self._path} ends here: {error.strerror}", file=sys.stderr)
        self._size_bytes += len(data)

    debug = info = warning = error = critical = exception = msg = write

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)


def rank_logger(file: RankLogFile | None, *, rank: int, incarnation: int) -> FilteringBoundLogger:
    """A structlog logger for the fields `step, group, op, peer`; rank and time_us are added.

    `worker.log.info("all_reduce", step=3, group="world", op="ring", peer=2)`. Without a file, events
    are discarded at almost no cost.
    """
    if file is None:
        nowhere = structlog.make_filtering_bound_logger(logging.CRITICAL)
        silent: FilteringBoundLogger = structlog.wrap_logger(None, processors=[_drop], wrapper_class=nowhere)
        return silent
    logger = structlog.wrap_logger(
        file,
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _add_time,
            structlog.processors.JSONRenderer(default=repr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    bound: FilteringBoundLogger = logger.bind(rank=rank, incarnation=incarnation)
    return bound


def _add_time(_logger: object, _method: str, event: EventDict) -> EventDict:
    event["time_us"] = time.time_ns() // 1000
    return event


def _drop(_logger: object, _method: str, _event: EventDict) -> EventDict:
    raise structlog.DropEvent


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
