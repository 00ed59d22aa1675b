"""A job whose state is cut for all of its ranks, through views: it goes on whenever all of them are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from zbmd.actors.rank.member import Worker
from zbmd.actors.view import View
from zbmd.collectives.commit.driver import StepFailed
from zbmd.collectives.commit.events import FailureKind

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Ended(Generic[ResultT]):
    """The job has come to its end on this rank."""

    result: ResultT | None


async def through_epochs(
    worker: Worker, epoch: Callable[[View | None], Awaitable[Ended[ResultT] | None]]
) -> ResultT | None:
    """Call `epoch` with each view of all ranks until it says that the job has ended; what that resulted in.

    It is called with None where a view is no view of all, and there is nothing to do but leave the groups of
    the one before. Raises `StepFailed` if ranks are lost and will not be replaced.
    """
    seen = 0
    while True:
        view = await worker.view(after=seen)
        seen = view.epoch
        whole = not view.finished and is_whole(worker, view)
        ended = await epoch(view if whole else None)
        if view.finished:
            return None  # nobody leaves before what the job makes is on disk
        if ended is not None:
            return ended.result


def is_whole(worker: Worker, view: View) -> bool:
    """Whether all ranks are there. Raises `StepFailed` if some will not come back."""
    if view.lost:
        lost = ", ".join(map(str, view.lost))
        raise StepFailed(
            FailureKind.STATE_LOST,
            f"rank {lost} is lost and will not be replaced, and the state is cut for {worker.world_size}: "
            "run with --on-loss replace",
        )
    return len(view.members) == worker.world_size
