"""Records of the jobs that a node of a cluster runs ranks of: `zbmd diagnose JOB` asks all nodes for them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankStarted
from zbmd.actors.cluster.node.contracts import RECORD_PAGE_BYTES, RECORDS_MAX, RecordInfo
from zbmd.actors.cluster.state.job_table import Job, JobPhase
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.process.output import OutputLine, OutputSink
from zbmd.tools.node.recorder import AnnouncedRuns, LaunchRecorder, begins_now, outcome_word
from zbmd.tools.runs.launches import WORDS_MAX, LaunchBegan, launch_files, read_beginning

ENDING_MAX: Final = 256
"""Processes whose exit reasons are held until their end is reported."""
RankProcessKey = tuple[int, int, int]
"""Job, rank and incarnation."""


@dataclass(slots=True)
class _Kept:
    """The record of a job that goes on. alive: ranks and incarnations here; nodes: of the job, by their keys.

    over: the job's last entry in the table; the record ends once its processes here have.
    """

    began: LaunchBegan
    record: LaunchRecorder
    alive: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    nodes: dict[NodeKey, str] = field(default_factory=dict[NodeKey, str])
    over: Job | None = None


class JobRecords:
    """Keeps a record of each job that this node runs ranks of, below a directory of the node.

    A `ClusterListener`, the `OutputSink` of the ranks, and a `JobRecordStore`. On the node's loop, but for
    the store. name: of the node; output: takes all lines; captures: where the ranks of jobs record.
    """

    def __init__(self, directory: Path, name: str, *, captures: Path | None = None) -> None:
        self._directory, self._name, self._captures = directory, name, captures
        self._runs = AnnouncedRuns()
        self._me: NodeKey | None = None
        self._kept: dict[int, _Kept] = {}
        self._reasons: OrderedDict[RankProcessKey, list[str]] = OrderedDict()
        self._open_ns: frozenset[int] = frozenset()
        """When the records began that go on: read by other threads."""
        self.output: OutputSink | None = None
        os.register_at_fork(after_in_child=self._close_in_fork)

    def listen(self) -> None:
        """Have ranks announce the directories of their runs: before their template is forked."""
        self._runs.listen()

    def close(self) -> None:
        """End all records: the node ends. Idempotent."""
        for job in list(self._kept):
            self._end(job, "stopped", "the node has ended", exit_code=0)
        self._runs.close()

    def _close_in_fork(self) -> None:
        for kept in self._kept.values():
            kept.record.close()

    # -- `ClusterListener` -------------------------------------------------------------------------------

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        self._me = me.key

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `ClusterListener`: begin a record of each job with ranks here; end those that are over."""
        jobs = {job.id: job for job in view.jobs.jobs}
        for number, kept in list(self._kept.items()):
            job = jobs.get(number)
            lost = [name for key, name in kept.nodes.items() if not view.holds(key)]
            for name in lost:
                kept.record.note(f"node {name} is lost: {reason}")
            kept.nodes = {} if job is None else _nodes_of(job, view)
            if job is None:
                self._end(number, "stopped", "the cluster knows the job no more", exit_code=0)
            elif job.phase is JobPhase.ENDED:
                kept.over = job
                self._end_if_over(number)
        for job in jobs.values():
            is_here = self._me is not None and self._me in job.nodes()
            if is_here and job.id not in self._kept and job.phase is not JobPhase.ENDED:
                self._begin(job, view)

    def received(self, sender: NodeKey, message: Contract) -> None:
        """See `ClusterListener`."""

    def stopped(self, reason: str) -> None:
        """See `ClusterListener`: the next incarnation hears what became of the jobs."""
        self._me = None
        for kept in self._kept.values():
            kept.record.note(f"this node's ranks end, as it is in the cluster no more: {reason}")

    # -- ranks ---------------------------------------------------------------------------------------------

    async def write_line(self, line: OutputLine) -> None:
        """See `OutputSink`: hold exit reasons, and pass all lines on."""
        if line.is_exit_reason and line.rank >= 0:
            key = (line.job, line.rank, line.incarnation)
            words = self._reasons.setdefault(key, [])
            if len(words) >= 4 * WORDS_MAX:  # the first lines and the last are recorded
                del words[WORDS_MAX]
            words.append(line.text.decode(errors="replace"))
            if len(self._reasons) > ENDING_MAX:
                self._reasons.popitem(last=False)
        if self.output is not None:
            await self.output.write_line(line)

    def happened(self, job: int, event: HostEvent) -> None:
        """Record an event of a job."""
        for run in self._runs.look():
            if (of_run := self._kept.get(run.job)) is not None:
                of_run.record.found(run.directory)
        words: Sequence[str] = ()
        if isinstance(event, RankDown):
            words = self._reasons.pop((job, event.rank, event.incarnation), ())
        kept = self._kept.get(job)
        if kept is None:
            return
        kept.record.take(event, words)
        if isinstance(event, RankStarted):
            kept.alive.add((event.rank, event.incarnation))
        elif isinstance(event, RankDown):
            kept.alive.discard((event.rank, event.incarnation))
            self._end_if_over(job)

    def _begin(self, job: Job, view: ClusterView) -> None:
        spec = job.spec
        name = f"{job.id:x}"
        began = begins_now(
            (*(("-m",) if spec.is_module else ()), spec.target, *spec.arguments),
            ranks=spec.ranks_per_node,
            nodes=spec.nodes_max,
            on_loss=spec.on_loss.value,
            capture=None if self._captures is None else self._captures / f"job-{name}",
            job=name,
            node=self._name,
        )
        record = LaunchRecorder(began, self._directory)
        self._kept[job.id] = _Kept(began, record, nodes=_nodes_of(job, view))
        self._open_ns |= {began.unix_ns}

    def _end_if_over(self, number: int) -> None:
        kept = self._kept[number]
        job = kept.over
        if job is not None and not kept.alive:
            self._end(
                number,
                outcome_word(job.outcome),
                job.reason,
                exit_code=job.exit_code,
                restarts=job.restarts_total,
            )

    def _end(self, number: int, outcome: str, reason: str, *, exit_code: int, restarts: int = 0) -> None:
        kept = self._kept.pop(number)
        kept.record.end(outcome, reason, exit_code=exit_code, restarts=restarts)
        self._open_ns -= {kept.began.unix_ns}

    # -- `JobRecordStore`, on any thread ---------------------------------------------------------------------

    def listed(self) -> tuple[RecordInfo, ...]:
        """See `JobRecordStore`."""
        found = [read_beginning(path) for path in launch_files(self._directory)]
        ours = [began for began in found if began is not None and began.job]
        return tuple(
            RecordInfo(
                job=int(began.job, 16),
                began_ns=began.unix_ns,
                words=began.command,
                is_open=began.unix_ns in self._open_ns,
            )
            for began in ours[-RECORDS_MAX:]
        )

    def page(self, began_ns: int, offset: int) -> bytes:
        """See `JobRecordStore`."""
        for path in launch_files(self._directory):
            if not path.name.startswith(f"{began_ns:019d}-"):
                continue
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    return file.read(RECORD_PAGE_BYTES)
            except OSError:  # it was the oldest, and is gone
                return b""
        return b""


def _nodes_of(job: Job, view: ClusterView) -> dict[NodeKey, str]:
    return {
        key: node.name or str(key)
        for key in job.nodes()
        if (node := view.by_id.get(key.id)) is not None and node.key == key
    }
