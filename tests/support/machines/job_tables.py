"""A job table under change in a test, with the invariants that are checked after each change."""

from __future__ import annotations

from collections.abc import Sequence

from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import (
    JOBS_MAX,
    NO_JOBS,
    Command,
    Job,
    JobPhase,
    JobSpec,
    JobTable,
    Order,
    RankDown,
    RankUp,
    SlotState,
    Submit,
)
from zbmd.actors.cluster.state.node_id import NodeKey


class Table:
    """A table under change, and the nodes of its cluster."""

    def __init__(self, *node_ids: int) -> None:
        self.nodes = [NodeKey(node_id, 1) for node_id in node_ids]
        self.table = NO_JOBS
        self.epoch = 1

    def change(
        self,
        *orders: tuple[NodeKey, Order],
        removed: Sequence[int] = (),
        added: Sequence[NodeKey] = (),
        elapsed_ns: int = 0,
    ) -> None:
        gone = {key for key in self.nodes if key.id in removed}
        self.nodes = sorted([key for key in self.nodes if key not in gone] + list(added))
        self.epoch += 1
        numbers: dict[NodeKey, int] = {}
        commands: list[Command] = []
        for origin, order in orders:
            numbers[origin] = numbers.get(origin, self.table.applied(origin)) + 1
            commands.append(Command(origin=origin, number=numbers[origin], order=order))
        self.table = after_change(
            self.table,
            epoch=self.epoch,
            members=self.nodes,
            removed=gone,
            commands=commands,
            elapsed_ns=elapsed_ns,
        )
        check(self.table, self.nodes)

    def submit(self, **options: object) -> None:
        options = {"job": 1, "target": "job.py", **options}
        self.change((self.nodes[0], Submit(spec=JobSpec(**options))))  # type: ignore[arg-type]

    def job(self, job_id: int = 1) -> Job:
        job = self.table.job(job_id)
        assert job is not None
        return job

    def up(self, *ranks: int, job_id: int = 1) -> None:
        job = self.job(job_id)
        starting = [entry for entry in job.ranks if entry.state is SlotState.STARTING]
        self.change(*(ordered_up(job, e.rank) for e in starting if not ranks or e.rank in ranks))

    def down(self, rank: int, code: int | None, *, elapsed_ns: int = 0, job_id: int = 1) -> None:
        entry = self.job(job_id).ranks[rank]
        assert entry.node is not None
        down = RankDown(
            job=job_id, rank=rank, incarnation=entry.incarnation, code=code, reason=f"code {code}"
        )
        self.change((entry.node, down), elapsed_ns=elapsed_ns)

    def states(self, job_id: int = 1) -> str:
        """One letter a rank: v, s, u, f or l."""
        return "".join(entry.state.value[0] for entry in self.job(job_id).ranks)

    def places(self, job_id: int = 1) -> list[int | None]:
        return [entry.node.id if entry.node is not None else None for entry in self.job(job_id).ranks]


def ordered_up(job: Job, rank: int) -> tuple[NodeKey, Order]:
    entry = job.ranks[rank]
    assert entry.node is not None
    address, host = f"a{rank}.{entry.incarnation}", f"h{entry.node.id}"
    up = RankUp(job=job.id, rank=rank, incarnation=entry.incarnation, address=address, host=host)
    return entry.node, up


def check(table: JobTable, nodes: Sequence[NodeKey]) -> None:
    """The invariants of every table."""
    assert len(table.jobs) <= JOBS_MAX
    assert len({job.id for job in table.jobs}) == len(table.jobs)
    assert [origin.node for origin in table.origins] == sorted({origin.node for origin in table.origins})
    assert all(origin.node in nodes for origin in table.origins)
    for job in table.jobs:
        slots: dict[NodeKey, int] = {}
        for entry in job.ranks:
            if entry.lives:
                assert entry.node in nodes and entry.node is not None and entry.incarnation > 0, entry
                slot = entry.rank // job.spec.ranks_per_node
                assert slots.setdefault(entry.node, slot) == slot, f"two slots of one job on {entry.node}"
            assert (entry.state is SlotState.UP) == bool(entry.address), entry
            assert (entry.state is SlotState.VACANT) == (entry.node is None), entry
        if job.phase in (JobPhase.WAITING, JobPhase.ENDED):
            assert not any(entry.lives for entry in job.ranks), job
        assert (job.outcome is not None) == (job.phase in (JobPhase.STOPPING, JobPhase.ENDED)), job
        assert job.reason or job.phase is JobPhase.RUNNING, job
        view = job.view()
        if view is not None:
            assert view.members, job
