"""Delays of a rank's batches, which `zbmd inject` asks for in the directory of a run, for tests of detection.

A delay is a file that its injector holds locked: the kernel unlocks it when the injector ends, however it
ends, and the rank waits no longer.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zbmd.transport.errors import UserError

DELAY_BYTES_MAX: Final = 1 << 10
DELAY_MS_MAX: Final = 60_000


class DataDelay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of such a file: the batch of each step comes so much later."""

    delay_ms: Annotated[float, msgspec.Meta(ge=0.0, le=DELAY_MS_MAX)]


def delay_path(directory: Path, rank: int) -> Path:
    """Return the file that delays the batches of `rank` of the run in `directory`."""
    return directory / f"inject-data-rank{rank}.json"


def read_delay(data: bytes) -> DataDelay | None:
    """Return the delay in a file; None for one that is damaged."""
    try:
        return msgspec.json.decode(data[:DELAY_BYTES_MAX], type=DataDelay)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


@contextmanager
def delaying_data(directory: Path, rank: int, delay: DataDelay) -> Generator[None]:
    """Delay the batches of `rank` within the context, or until this process ends.

    Raises `UserError` if another process does.
    """
    path = delay_path(directory, rank)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, msgspec.json.encode(delay), 0)
        yield
        path.unlink(missing_ok=True)
    except BlockingIOError:
        raise UserError(f"another process delays the batches of rank {rank}: {path} is locked") from None
    finally:
        os.close(file)


def wait_for_data(path: str) -> None:
    """Sleep as long as the file at `path` says, if a living injector holds it. Costs 3 us without one."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        delay = read_delay(os.pread(file, DELAY_BYTES_MAX, 0))
        if delay is not None:
            time.sleep(delay.delay_ms / 1e3)
    except OSError:
        pass  # a file system without locks: there can be no injector
    finally:
        os.close(file)
