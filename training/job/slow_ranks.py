"""Stragglers in a job: the driver of `StragglerMachine`, and what `--on-straggler` asks for.

Each rank measures its steps and sends a sample with the losses of the next step, so that all ranks have all
samples, run the same machine over them, and know the same stragglers after the same step. The lowest rank
reports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zbmd.actors.process.exit import write_exit_reason
from zbmd.actors.rank.member import Worker
from zbmd.training.autograd import spans
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.stragglers.delays import delay_path, wait_for_data
from zbmd.training.job.stragglers.machine import (
    Cause,
    Entered,
    Moved,
    Named,
    Stepped,
    StragglerAction,
    StragglerMachine,
)
from zbmd.training.job.stragglers.policy import OnStraggler, shares_for
from zbmd.training.job.stragglers.samples import Sampler, no_sample
from zbmd.training.job.task import Trainer
from zbmd.training.profiler.lines import StepLine, StragglerLine
from zbmd.training.profiler.profiler import Profiler
from zbmd.transport.native._native import now_ns

MOVABLE = (Cause.COMPUTE, Cause.RUNTIME)
"""Causes whose cost grows with a rank's logical shards."""


class SlowRanks:
    """Stragglers of a run in `out`, as one rank sees them; for the thread that trains.

    reports: whether this rank reports for all.
    """

    def __init__(
        self, worker: Worker, out: Path, on_straggler: OnStraggler, reports: Callable[[], bool]
    ) -> None:
        self._worker, self._on_straggler, self._reports = worker, on_straggler, reports
        self._delay = os.fspath(delay_path(out, worker.rank))
        self._machine = StragglerMachine()
        self._sampler: Sampler | None = None
        self._begun = False
        self._factors: dict[int, float] = {}
        """Of ranks that are named for what moves with their shards, by place in the world."""

    def enter(self, groups: MeshGroups, trainer: Trainer) -> None:
        """Go on in a new view, whose first step is not measured."""
        self.leave()
        mesh, world = groups.mesh, groups.world
        along = (axis for axis in mesh.data_axes if axis in mesh.axes)
        alike = {rank: key for key, group in enumerate(mesh.groups(*along)) for rank in group}
        self._machine.handle(
            Entered(
                ranks=tuple(world.members),
                shards=trainer.shares,
                alike=tuple(alike[place] for place in range(world.size)),
                hosts=hosts_of(self._worker, world.members),
            )
        )
        self._factors = {}
        self._sampler = Sampler(self._worker.incarnation) if world.size > 1 else None

    def leave(self) -> None:
        """Measure no longer. Idempotent."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler, self._begun = None, False

    def begin_step(self, trainer: Trainer, line: StepLine | None) -> None:
        """A step begins; `line` is of the one before it. Waits, if an injector delays this rank's data."""
        sampler = self._sampler
        if sampler is not None and self._begun and line is not None:
            trainer.sample = sampler.sample(line)
        elif sampler is not None:
            trainer.sample = no_sample()
            sampler.restart()
        self._begun = True
        with spans.DATA:
            wait_for_data(self._delay)

    def stepped(self, groups: MeshGroups, trainer: Trainer, profiler: Profiler) -> None:
        """A step has ended on all ranks: report who is slow, and do what is asked for."""
        if self._sampler is None:
            return
        for action in self._machine.handle(Stepped(trainer.step, trainer.samples)):
            done = self._done_about(action, groups, trainer)
            if self._reports():
                report(self._worker, profiler, action, done)
            end_if_replaced(self._worker, action, done)

    def _done_about(self, action: StragglerAction, groups: MeshGroups, trainer: Trainer) -> str:
        """Act on it, alike on all ranks; return what was done, for the report."""
        if self._on_straggler is OnStraggler.REBALANCE and action.cause in MOVABLE:
            return self._rebalanced(action, groups, trainer)
        return done_about(action, self._on_straggler, NOTHING)

    def _rebalanced(self, action: StragglerAction, groups: MeshGroups, trainer: Trainer) -> str:
        mesh, place = groups.mesh, groups.world.members.index(action.rank)
        self._factors.pop(place, None)
        if isinstance(action, Named):
            self._factors[place] = action.factor
        before, costs = trainer.shares, [1.0] * mesh.data_ranks
        for slow, factor in self._factors.items():
            costs[mesh.data_place(slow)] = max(costs[mesh.data_place(slow)], factor)
        shards = sum({mesh.data_place(rank): share for rank, share in enumerate(before)}.values())
        of_places = shares_for(shards, costs)
        shares = tuple(of_places[mesh.data_place(rank)] for rank in range(mesh.world_size))
        if shares == before:
            return "no whole logical shard can move: give more --shards"
        if not trainer.rebalance(shares):
            return "the ranks have no memory for other shares"
        self._machine.handle(Moved(trainer.shares))
        return f"logical shards of ranks are now {', '.join(map(str, shares))}"


def hosts_of(worker: Worker, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the address of each rank's host, for reports; of a rank that has left since, a sign for it."""
    known = {member.rank: member.tcp_address.rpartition(":")[0] for member in worker.latest.members}
    return tuple(known.get(rank) or "?" for rank in ranks)


def done_about(action: StragglerAction, wanted: OnStraggler, nothing: str) -> str:
    """Return what is done about it where no shards move, for the report. nothing: the words for `WARN`."""
    if not isinstance(action, Named):
        return ""
    if action.together:
        return NOT_OF_A_RANK
    if wanted is OnStraggler.REPLACE:
        return REPLACED if action.incarnation == 1 else REPLACED_BEFORE
    return nothing if wanted is OnStraggler.WARN else NOT_MOVABLE


def end_if_replaced(worker: Worker, action: StragglerAction, done: str) -> None:
    """End this process if it is the one that is to be replaced."""
    if done == REPLACED and isinstance(action, Named) and action.rank == worker.rank:
        write_exit_reason(f"{action.text}; {done}")
        os.kill(os.getpid(), signal.SIGKILL)


def report(worker: Worker, profiler: Profiler, action: StragglerAction, done: str) -> None:
    """Report a straggler for all ranks: on stderr, in this rank's profile, and to the launcher."""
    text, named = f"{action.text}; {done}" if done else action.text, isinstance(action, Named)
    print(f"step {action.step} {text}", file=sys.stderr, flush=True)
    factor = action.factor if isinstance(action, Named) else 1.0
    line = StragglerLine(
        step=action.step,
        slow=action.rank,
        cause=action.cause.value,
        factor=factor,
        text=text[:1024],
        at_ns=now_ns(),
        over=not named,
    )
    profiler.straggler(line)
    worker.report(
        {
            "kind": "straggler",
            "step": action.step,
            "rank": action.rank,
            "cause": line.cause,
            "factor": factor,
            "text": line.text,
            "over": line.over,
        }
    )


NOTHING = "nothing is done about it (--on-straggler rebalance or replace would)"
NOTHING_IN_LOOPS = 'nothing is done about it (on_straggler="replace" would)'
NOT_OF_A_RANK = "nothing is done about it: no rank alone is the cause"
NOT_MOVABLE = "nothing is done about it: its shards are not the cause"
REPLACED = "it is ended, as if it had died"
REPLACED_BEFORE = "nothing is done about it: it was replaced before"
