"""A step that runs out of memory again: a rank's first such failure is noted, the second one ends the job.

Memory that others had taken may be there again, so a rank that runs out of it is replaced once. A
replacement that meets the same at that step, or at the first that it computes, will meet it each time.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NoReturn

import msgspec

from zbmd.actors.rank_env import RankEnvironment
from zbmd.training.checkpoint.sharded import checkpoint_in
from zbmd.training.run.atomic_files import write_atomically
from zbmd.training.step.memory_estimate import StepOutOfMemory
from zbmd.transport.errors import UserError

NOTE_BYTES_MAX = 1 << 12


class ShortNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """That rank `rank` of job `job`, in incarnation `incarnation`, had no memory for step `step`."""

    job: int
    rank: int
    incarnation: int
    step: int


def raise_for(error: StepOutOfMemory, out: Path, launched: RankEnvironment | None) -> NoReturn:
    """Raise `error`, for which the rank is replaced, or a `UserError`, which ends the job.

    out: the run's directory, where the first failure is noted for whoever replaces this rank.
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
            f"{error} It was replaced for that before, at step {before.step}, and its replacement has no "
            f"more memory for it, so the run ends. {_last_in(out)}"
        ) from error
    note = ShortNote(job=launched.job, rank=launched.rank, incarnation=launched.incarnation, step=error.step)
    data = msgspec.json.encode(note)
    with contextlib.suppress(UserError):  # then its supervisor's bound on restarts ends the job
        write_atomically(path, lambda file: file.write(data))
    raise error


def read_note(path: Path) -> ShortNote | None:
    """The note at `path`, or None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=ShortNote)
    except (OSError, ValueError, RecursionError):
        return None


def _last_in(out: Path) -> str:
    """Where to go on from."""
    path = checkpoint_in(out)
    if path is None:
        return "No checkpoint had been written yet: start again, with a smaller --checkpoint-every."
    return f"The last checkpoint is {path}: go on from it with --resume {path} and a new --out."
