"""Errors of a run that only a person can mend, each with what to do.

A rank that runs out of memory is replaced once, since memory that other processes had taken may be free
again; the failure is recorded in a note. A replacement that fails in the same way at that step, or at the
first step that it computes, would fail each time: that ends the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import msgspec

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.checkpoint.sharded import checkpoint_in
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.step.memory_estimate import StepOutOfMemory
from zbmd.transport.errors import OutOfMemory, UserError
from zbmd.transport.host.files import DiskFull, write_atomically


@contextlib.contextmanager
def errors_explained(out: Path, launched: RankEnvironment | None, *, memory: str) -> Generator[None]:
    """Raise what only a person can mend as `UserError`. memory: the beginning of an error for too little.

    `out`: the directory of the run; `launched`: this rank's environment.
    """
    try:
        yield
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, out, launched)
    except (OutOfMemory, MemoryError) as error:
        raise UserError(f"{memory}: {error}") from error
    except DiskFull as error:
        raise UserError(_to_continue(error, out, otherwise="free some space and start again")) from error
    except StepFailed as error:
        otherwise = "start again, with a smaller --checkpoint-every"
        raise UserError(_to_continue(error, out, otherwise=otherwise)) from error


def _to_continue(error: Exception, out: Path, *, otherwise: str) -> str:
    """Return what happened, and the checkpoint to resume from; `otherwise`: what to do if there is none."""
    what, path = str(error).removesuffix("."), checkpoint_in(out)
    if path is None:
        return f"{what}. No checkpoint had been written yet: {otherwise}."
    return f"{what}. The last durable checkpoint is {path}: resume with --resume {path}."


# ---- a rank that has no memory again

NOTE_BYTES_MAX = 1 << 12


class ShortNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notes that rank `rank` of job `job`, in incarnation `incarnation`, had no memory for step `step`."""

    job: int
    rank: int
    incarnation: int
    step: int


def raise_for(error: StepOutOfMemory, out: Path, launched: RankEnvironment | None) -> NoReturn:
    """Raise `error`, for which the rank is replaced, or a `UserError`, which ends the job.

    `out`: the run's directory, where the first failure is noted for the replacement of this rank.
    """
    if launched is None:
        raise UserError(f"{error} {_last_in(out)}") from error
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
        raise UserError(
            f"{error} It was replaced for this before, at step {before.step}, and its replacement has no "
            f"more memory, so the run ends. {_last_in(out)}"
        ) from error
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


def _last_in(out: Path) -> str:
    """Say from which checkpoint to resume."""
    path = checkpoint_in(out)
    if path is None:
        return "No checkpoint had been written yet: start again with a smaller --checkpoint-every."
    return f"The last checkpoint is {path}: resume with --resume {path} and a new --out."
