"""The directory of a run: taken for one run at a time, and cleared for another once that has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from zbmd.actors.snapshots.client import HolderAddress, drop, find_holders
from zbmd.training.checkpoint.index import is_checkpoint_file
from zbmd.training.data.sources import RECORD_NAME
from zbmd.training.job.records import METRICS_NAME, TENSORBOARD_NAME
from zbmd.training.model.weights import WEIGHTS_NAME
from zbmd.training.profiler.lines import PROFILE_DIRECTORY
from zbmd.training.run.ledger import LOG_NAME, has_log, locked, nobody_writes, read_header, under_way
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import unusable

FILES: Final = (METRICS_NAME, WEIGHTS_NAME, RECORD_NAME)
FOLDERS: Final = (PROFILE_DIRECTORY, TENSORBOARD_NAME)
CLAIM_NAME: Final = "claim.lock"
CLAIM_S: Final = 2.0
"""Seconds that the processes of a killed run may take to end."""
LOOK_S: Final = 0.05
_JOB: Final = re.compile("[0-9a-f]{16}")


def holders_of(directory: Path) -> list[HolderAddress]:
    """Return the snapshot processes of this host with memory of the run in `directory`.

    A launcher may go on from there, if the identity of its job is the same. Raises `UserError` for a log that
    cannot be read.
    """
    path = directory / LOG_NAME
    run = read_header(path).run_id if has_log(path) else ""
    return find_holders(job=int(run, 16)) if _JOB.fullmatch(run) else []


def drop_held(directory: Path) -> None:
    """Give back memory that is held of the run in `directory`, which does not go on from there."""
    for holder in holders_of(directory):
        drop(holder.name)


def remove_run(directory: Path) -> None:
    """Remove what a run has written in `directory`, its commit log last, and its snapshots; other files stay.

    Raises `UserError` if the run goes on, or if something cannot be removed.
    """
    if not (directory / LOG_NAME).exists():
        return
    with nobody_writes(directory):
        drop_held(directory)
        try:
            for name in FOLDERS:
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
            saved = [path for path in directory.iterdir() if is_checkpoint_file(path.name)]
            for path in (*(directory / name for name in FILES), *saved, directory / LOG_NAME):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot remove {error.filename}: {error.strerror}.") from error


def make_new(directory: Path) -> bool:
    """Make a directory; return False if it exists. One that cannot be made is reported when it is claimed."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def claimed(directory: Path) -> Generator[None]:
    """Keep other runs out of `directory`, which is made, while the block runs.

    The lock ends with its process. A file system without locks keeps nobody out. Raises `UserError` if a run
    is under way there.
    """
    end_s = time.monotonic() + CLAIM_S
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while (claim := locked(directory / CLAIM_NAME, fcntl.LOCK_EX)) is None:
            if time.monotonic() > end_s:
                raise under_way(directory)
            time.sleep(LOOK_S)
    except OSError as error:
        raise unusable(directory, error) from error
    try:
        yield
    finally:
        os.close(claim)
