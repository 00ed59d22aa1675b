"""Errors of a run that only a person can mend, each with what to do.

A rank that runs out of memory is replaced once, since memory that other processes had taken may be free
again; the failure is recorded in a note. A replacement that fails in the same way at that step, or at the
first step that it computes, would fail each time: that ends the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.checkpoint.sharded import last_in
from zbmd.training.checkpoint.storage import storage_of
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.step.memory_estimate import StepOutOfMemory
from zbmd.transport.errors import OutOfMemory, UserError
from zbmd.transport.host.files import DiskFull, write_atomically

Places: TypeAlias = tuple[Path | str, ...]
"""Directories and URLs that may have checkpoints of a run; empty ones have none."""


class Diverged(UserError):
    """A gradient was not finite: training cannot go on from there."""


class ShortOfMemory(UserError):
    """A rank has too little memory for what it was asked to do."""


@contextlib.contextmanager
def errors_explained(
    out: Path, checkpoint_to: str, launched: RankEnvironment | None, *, memory: str
) -> Generator[None]:
    """Raise what only a person can mend as `UserError`. memory: the beginning of an error for too little.

    `out`: the directory of the run; `checkpoint_to`: where its checkpoints are, empty: in `out`; `launched`:
    this rank's environment.
    """
    places = (checkpoint_to, out)
    try:
        yield
    except TrainingDiverged as error:
        raise Diverged(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, out, places, launched)
    except (OutOfMemory, MemoryError) as error:
        raise ShortOfMemory(f"{memory}: {error}") from error
    except DiskFull as error:
        raise DiskFull(_to_continue(error, places, otherwise="free some space and start again")) from error
    except StepFailed as error:
        raise UserError(_to_continue(error, places)) from error


def _to_continue(
    what: object, places: Places, *, otherwise: str = "start again with a smaller --checkpoint-every"
) -> str:
    """Return what happened, and the checkpoint to resume from; `otherwise`: what to do if there is none."""
    text = str(what).removesuffix(".")
    for place in places:
        if not place:
            continue
        with contextlib.suppress(UserError):  # a place that cannot be used has none
            if (path := last_in(storage_of(place))) is not None:
                return f"{text}. The last durable checkpoint is {path}: resume with --resume {path}."
    return f"{text}. No checkpoint had been written yet: {otherwise}."


# ---- a rank that has no memory again

NOTE_BYTES_MAX = 1 << 12


class ShortNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notes that rank `rank` of job `job`, in incarnation `incarnation`, had no memory for step `step`."""

    job: int
    rank: int
    incarnation: int
    step: int


def raise_for(
    error: StepOutOfMemory, out: Path, places: Places, launched: RankEnvironment | None
) -> NoReturn:
    """Raise `error`, for which the rank is replaced, or a `UserError`, which ends the job.

    `out`: the run's directory, where the first failure is noted for the replacement of this rank; `places`:
    where checkpoints may be.
    """
    if launched is None:
        raise ShortOfMemory(_to_continue(error, places)) from error
    path = out / f"out-of-memory-{launched.rank}.json"
    before = read_note(path)
    is_again = (
        before is not None
        and (before.job, before.rank, before.incarnation)
        == (launched.job, launched.rank, launched.incarnation - 1)
        and (before.step == error.step or error.is_first)
    )
    if is_again and before is not None:
        path.unlink(missing_ok=True)
        what = (
            f"{error} It was replaced for this before, at step {before.step}, and its replacement has no "
            "more memory, so the run ends"
        )
        raise ShortOfMemory(_to_continue(what, places)) from error
    note = ShortNote(job=launched.job, rank=launched.rank, incarnation=launched.incarnation, step=error.step)
    data = msgspec.json.encode(note)
    with contextlib.suppress(UserError):  # then its supervisor's bound on restarts ends the job
        write_atomically(path, lambda file: file.write(data))
    raise error


def read_note(path: Path) -> ShortNote | None:
    """Return the note at `path`, or None if there is no readable one."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=ShortNote)
    except (OSError, ValueError, RecursionError):
        return None
