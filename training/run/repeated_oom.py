"""End the job if a replaced rank runs out of memory again at the same step.

A rank that runs out of memory is replaced once, since memory that other processes had taken may be free
again; the failure is recorded in a note. A replacement that fails in the same way at that step, or at the
first step that it computes, would fail each time.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NoReturn

import msgspec

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.checkpoint.sharded import checkpoint_in
from zbmd.training.step.memory_estimate import StepOutOfMemory
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

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
