"""The capture of one process of a job: a log if one was asked for, else the last seconds in memory.

With `ZBMD_CAPTURE` (what `--capture` sets) every input goes to `<directory>/<process>#<incarnation>/`, see
`zbmd.transport.capture`. Without it a ring in memory is kept, and written down when the process fails: into
`crash-<job>` in the run's log directory, or else `$XDG_STATE_HOME/zbmd/crashes/<job>`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from zbmd.actors.process.exit import needs_no_traceback
from zbmd.transport.capture.errors import CaptureError
from zbmd.transport.capture.log import LogRecorder, RingRecorder, dump_on_crash
from zbmd.transport.capture.recorder import Clocks, Detail, Recorder, origin_of
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, user_directory
from zbmd.transport.identity import Identity

CAPTURE_VARIABLE = "ZBMD_CAPTURE"
CAPTURE_BULK_VARIABLE = "ZBMD_CAPTURE_BULK"
LOG_DIR_VARIABLE = "ZBMD_LOG_DIR"
CRASHES_KEPT_MAX = 16
"""Of so many jobs the last records are kept where no log directory was given; older ones are removed."""

log: Final = structlog.stdlib.get_logger("zbmd.capture")


def parse_bulk(text: str) -> Detail:
    """Return how much of a bulk payload is recorded. Raises `UserError`."""
    try:
        return Detail(text)
    except ValueError:
        choices = " or ".join(detail.value for detail in Detail)
        raise UserError(f"{text!r} does not say how bulk data is captured. Choose {choices}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """The place where a process records. directory: None for the ring; crashes: where those go, or None."""

    directory: Path | None
    bulk: Detail
    crashes: Path | None

    @classmethod
    def read(cls, environment: Mapping[str, str], *, job: int) -> CaptureSettings:
        """Return the settings that the environment asks for. Raises `UserError`."""
        directory = environment.get(CAPTURE_VARIABLE)
        return cls(
            directory=Path(directory).absolute() if directory else None,
            bulk=parse_bulk(environment.get(CAPTURE_BULK_VARIABLE) or Detail.DIGEST.value),
            crashes=_crashes(environment, f"{job:016x}" if job else f"pid{os.getpid()}"),
        )


def _crashes(environment: Mapping[str, str], job: str) -> Path | None:
    if given := environment.get(LOG_DIR_VARIABLE):
        return Path(given).absolute() / f"crash-{job}"
    state = user_directory(UserFiles.STATE, environment)
    return None if state is None else state / "crashes" / job


class ProcessCapture:
    """The recorder of this process, from its start to its end.

    clock: the one that the process's links share. Used from the event loop's thread. Raises `CaptureError`
    (a `UserError`) if the log cannot be begun.
    """

    def __init__(self, identity: Identity, clock: HybridClock, settings: CaptureSettings) -> None:
        origin, clocks = origin_of(identity), Clocks(hybrid=clock)
        self._crashes = settings.crashes
        self._ring: RingRecorder | None = None
        self._forget_hooks: Callable[[], None] = _nothing
        self.recorder: Recorder
        self.bulk = settings.bulk
        if settings.directory is not None:
            self.recorder = LogRecorder(settings.directory, origin, clocks, bulk=settings.bulk)
            return
        self.recorder = self._ring = RingRecorder(origin, clocks, bulk=settings.bulk)
        if self._crashes is not None and threading.current_thread() is threading.main_thread():
            self._forget_hooks = dump_on_crash(self._ring, self._crashes)

    @property
    def whole(self) -> Recorder | None:
        """Return the recorder if it writes a log: for inputs too many, or too large, to keep always."""
        return self.recorder if isinstance(self.recorder, LogRecorder) else None

    def failed(self, error: BaseException) -> None:
        """Write the ring when the process ends with `error`, unless its user can fix it."""
        if isinstance(error, Exception) and not needs_no_traceback(error):
            self.dump(f"{type(error).__name__}: {error}")

    def dump(self, reason: str) -> Path | None:
        """Write the ring once and return its directory; a log gets a note instead.

        A failure to write is logged, and told by None.
        """
        ring, self._ring = self._ring, None
        if ring is None:
            self.recorder.note(reason)
            return None
        self._forget_hooks()
        self._forget_hooks = _nothing
        if self._crashes is None:
            log.warning("there is no directory for the last records: set ZBMD_LOG_DIR, or HOME")
            return None
        try:
            path = ring.dump(self._crashes, reason)
            if not os.environ.get(LOG_DIR_VARIABLE):
                _forget_oldest(self._crashes)
        except (CaptureError, OSError) as error:
            log.error("the last records cannot be written", error=str(error))
            return None
        log.info("the last records are written", path=str(path))
        return self._crashes

    def close(self, reason: str) -> None:
        """End the recording. Idempotent."""
        self._forget_hooks()
        self._forget_hooks = _nothing
        self.recorder.close(reason)


def _nothing() -> None:
    """There are no hooks."""


def _forget_oldest(latest: Path) -> None:
    """Keep `CRASHES_KEPT_MAX` jobs in the directory of `latest`; another process may do the same now."""
    with contextlib.suppress(OSError):
        jobs = sorted(latest.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for job in jobs[:-CRASHES_KEPT_MAX]:
            if job != latest:
                shutil.rmtree(job, ignore_errors=True)
