"""Failures that repeat (sans-I/O): what ends a job before its restarts are used up.

A rank that fails reports a **cause**: the kind, place and shape of its error, or that the kernel ended it for
want of memory. A cause that comes again, without progress in between, comes a third time: the job ends after
the second. Progress is a step that no rank had committed before (`Progressed`), or, in jobs that report no
steps, a view that lasted for a restart window.

- An error counts whichever rank has it: what one rank raises in this round, another may in the next.
- Until all ranks are together again only the first error counts, and none after a rank was killed: the others
  may follow from that. Ranks report no cause for errors that say so themselves (`process.causes`).
- Memory counts for one rank: the kernel's choice among several says nothing about the rank it chose.
"""

from __future__ import annotations

import dataclasses

from zbmd.actors.cluster.state.job_table import (
    MEMORY_ADVICE,
    MEMORY_CAUSE,
    Job,
    RankDown,
    RankEntry,
    SlotState,
)
from zbmd.actors.process.causes import CAUSE_MARK
from zbmd.actors.view import rank_name


def noted(job: Job, entry: RankEntry, order: RankDown, age_ns: int) -> tuple[Job, str]:
    """Return the job with the cause of a failure noted, and why it ends by that; empty if it does not."""
    cause = entry.failing
    follows = entry.state is SlotState.UP and job.origin and cause != MEMORY_CAUSE
    if cause or order.code is None or order.code < 0:
        job = dataclasses.replace(job, origin=True)
    if not cause or follows:
        return job, ""
    if _lasted(job, entry, age_ns):
        job = without_causes(job)
    before = {e.cause for e in job.ranks if e.cause and (e.rank == entry.rank or cause != MEMORY_CAUSE)}
    if cause in before:
        return job, _why(entry, order.reason)
    ranks = [dataclasses.replace(e, cause=cause) if e.rank == entry.rank else e for e in job.ranks]
    return dataclasses.replace(job, ranks=tuple(ranks)), ""


def noted_late(job: Job, entry: RankEntry, cause: str) -> tuple[Job, str]:
    """Return as `noted` for a failure that was reported before its cause. entry: of the replacement."""
    failed_ns = job.restarts_ns[-1] if job.restarts_ns else 0
    if failed_ns - job.together_ns >= job.spec.restart_window_ns:
        job = without_causes(job)
    late = dataclasses.replace(entry, failing=cause)
    if cause in {e.cause for e in job.ranks}:
        return job, _why(late, "its end was proven before its exit code was known")
    ranks = [dataclasses.replace(e, cause=cause) if e.rank == entry.rank else e for e in job.ranks]
    return dataclasses.replace(job, ranks=tuple(ranks)), ""


def without_causes(job: Job) -> Job:
    """Return the job after progress: what failed before may fail again."""
    return dataclasses.replace(job, ranks=tuple(dataclasses.replace(e, cause="") for e in job.ranks))


def _lasted(job: Job, entry: RankEntry, age_ns: int) -> bool:
    """Whether the ranks were together, with this one, for a restart window."""
    began_ns = max(job.together_ns, entry.up_ns)
    return entry.state is SlotState.UP and age_ns - began_ns >= job.spec.restart_window_ns


def _why(entry: RankEntry, reason: str) -> str:
    child, cause = rank_name(entry.rank), entry.failing
    if cause == MEMORY_CAUSE:
        return f"{child} was lost twice, with no progress in between: {reason}. {MEMORY_ADVICE}"
    what = cause.partition(CAUSE_MARK)[0]
    return f"{child} failed again as a rank did before, with no progress in between: {what} ({reason})"
