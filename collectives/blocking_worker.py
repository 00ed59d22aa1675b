"""Blocking front door: scripts and notebooks join a job and call collectives without `async`.

    with zbmd.init() as worker:
        group = worker.group()
        total = group.all_reduce(numpy.ones(4))

`init` runs the event loop of the membership in a thread of its own, so it also works where the caller's
thread has a loop already, as in a notebook. Operations of a plain group run on the calling thread; those of
an elastic group pass the loop, which repairs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from zbmd.actors.rank.member import Worker, join
from zbmd.actors.session import Session
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import View
from zbmd.collectives.elastic.group import ElasticBlocking, ElasticGroup, elastic_group
from zbmd.collectives.group.group import Group, GroupBlocking, group


class BlockingGroup(GroupBlocking):
    """The members of one view, with blocking operations. Made by `BlockingWorker.group`.

    Its operations have the arguments, results and errors of `zbmd.Group`. After `PeerLost` or
    `OperationAborted` it is unusable: get the group of the next view by `worker.group(after=group.epoch)`.
    """

    def __init__(self, worker: BlockingWorker, made: Group) -> None:
        super().__init__(made)
        self._worker = worker
        self.rank = made.rank
        self.size = made.size
        self.members = made.members
        self.epoch = made.epoch

    def __repr__(self) -> str:
        return repr(self._group)

    def close(self) -> None:
        """Close the group; operations in flight on other members end with `OperationAborted`."""
        self._worker.run(self._group.close())

    def split(self, color: int | None, *, key: int = 0, timeout: float | None = None) -> BlockingGroup | None:  # type: ignore[override]
        """Return the sub-group of the members with the same `color`, ordered by `key`; None without one."""
        made = super().split(color, key=key, timeout=timeout)
        return None if made is None else BlockingGroup(self._worker, made)

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> BlockingGroup:  # type: ignore[override]
        """Return the sub-group of these ranks of the group; each of them makes the same call."""
        return BlockingGroup(self._worker, super().subgroup(ranks, timeout=timeout))


class BlockingElasticGroup(ElasticBlocking):
    """A group that repairs itself when a member dies, with blocking operations.

    Made by `BlockingWorker.elastic_group`. Its operations have the arguments, results and errors of
    `zbmd.ElasticGroup`; a death in the middle of one is repaired before the call returns.
    """

    def __init__(self, worker: BlockingWorker, made: ElasticGroup) -> None:
        super().__init__(made, made.blocking.on_loop)
        self._worker = worker
        self._group = made

    def __repr__(self) -> str:
        return repr(self._group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._group.rank

    @property
    def members(self) -> tuple[int, ...]:
        """The job's ranks in the current view; it changes when a member dies or joins."""
        return self._group.members

    @property
    def epoch(self) -> int:
        """The epoch of the current view."""
        return self._group.epoch

    def close(self) -> None:
        """Close the group; operations in flight on other members end with `OperationAborted`."""
        self._worker.run(self._group.close())


class BlockingWorker(Session):
    """This process as a member of its job, for code that blocks. Made by `zbmd.init`.

    It is a `Session` too: `spawn`, `ask`, `tell`, `ref` and the other calls use the actor system of the
    membership. `worker.worker` is the `Worker` of the async API. `close` leaves the job: it closes the groups
    and stops the actors.
    """

    worker: Worker

    def __init__(self, *, arena: int | None = None) -> None:
        self._membership = AsyncExitStack()
        self._arena = arena
        super().__init__("worker", opens=self._join)

    async def _join(self) -> ActorSystem:
        self.worker = await self._membership.enter_async_context(join(arena=self._arena))
        return self.worker.system

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return self.worker.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host."""
        return self.worker.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks that the job was started with."""
        return self.worker.world_size

    @property
    def incarnation(self) -> int:
        """1 for the first process of this rank, one more for each replacement."""
        return self.worker.incarnation

    def view(self, *, after: int = 0) -> View:
        """Wait for a view with an epoch greater than `after`, enter it, and return it."""
        return self.run(self.worker.view(after=after))

    def group(self, *, after: int = 0, channel: int = 0, priorities: bool = False) -> BlockingGroup:
        """Return the group of the first view with an epoch greater than `after`; see `zbmd.group`."""
        made = self.run(group(self.worker, after=after, channel=channel, priorities=priorities))
        return BlockingGroup(self, made)

    def elastic_group(self, *, channel: int = 0, timeout: float | None = None) -> BlockingElasticGroup:
        """Return the elastic group of the job; see `zbmd.elastic_group`."""
        return BlockingElasticGroup(
            self, self.run(elastic_group(self.worker, channel=channel, timeout=timeout))
        )

    async def _leave(self) -> None:
        await self._membership.aclose()

    def __repr__(self) -> str:
        return f"<BlockingWorker {'closed' if self._loop.is_closed() else repr(self.worker)}>"


def init(*, arena: int | None = None) -> BlockingWorker:
    """Join the job that this process was started for, from code that blocks; use it in a `with` statement.

    arena: bytes of shared memory for arrays (default: ZBMD_ARENA, or 64 MiB). Started by hand, without a
    launcher, the process is a world of one. The errors are those of `zbmd.join`.
    """
    return BlockingWorker(arena=arena)
