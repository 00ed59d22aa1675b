"""A group: the members of one view, and collectives among them that a coroutine can await.

Operations run in call order on the group's own data-plane thread, which holds no GIL while it works. A group
belongs to one epoch: after a loss, get a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from numpy.typing import NDArray

from zbmd.actors.member import Node
from zbmd.actors.view import View
from zbmd.collectives.communicator import Communicator
from zbmd.transport.errors import LocalProtocolError

OPERATIONS_IN_FLIGHT_MAX = 1024
"""Operations submitted and not yet done; one more is refused."""

ResultT = TypeVar("ResultT")
Array = NDArray[Any]


class Group:
    """The members of one epoch, from this rank's side. Make it with `zbmd.group(node)`."""

    def __init__(self, communicator: Communicator, view: View) -> None:
        self.communicator = communicator
        self.view = view
        self.epoch = view.epoch
        self.rank = communicator.rank
        self.members = communicator.members
        self._data_plane = ThreadPoolExecutor(1, thread_name_prefix="zbmd-data")
        self._slots = threading.BoundedSemaphore(OPERATIONS_IN_FLIGHT_MAX)

    def __repr__(self) -> str:
        return f"<Group epoch {self.epoch}: rank {self.rank} of {list(self.members)}>"

    @property
    def size(self) -> int:
        """How many members the group has."""
        return len(self.members)

    def submit(self, operation: Callable[[Communicator], ResultT]) -> Future[ResultT]:
        """Queue `operation` for the data-plane thread; callable from any thread.

        Raises `LocalProtocolError` when too many operations are in flight or the group is closed.
        """
        if not self._slots.acquire(blocking=False):
            raise LocalProtocolError(
                f"{OPERATIONS_IN_FLIGHT_MAX} operations are in flight on {self!r}: await some of them first"
            )
        try:
            future = self._data_plane.submit(operation, self.communicator)
        except RuntimeError:
            self._slots.release()
            raise LocalProtocolError(f"{self!r} is closed: get a group of the new view") from None
        future.add_done_callback(lambda _: self._slots.release())
        return future

    async def run(self, operation: Callable[[Communicator], ResultT]) -> ResultT:
        """Run `operation` on the data-plane thread and await its result.

        A cancelled await leaves the operation running: it owns its buffers until it has drained, and peers
        may be waiting for this rank's part.
        """
        return await asyncio.shield(asyncio.wrap_future(self.submit(operation)))

    async def all_reduce(
        self, x: Array, *, out: Array | None = None, op: str = "sum", algorithm: str = "auto"
    ) -> Array:
        """Reduce `x` over all members, elementwise, and return the result, the same bits on every rank.

        In place (`x` is overwritten) without `out`; with it `x` stays intact until the operation is complete.
        Raises `PeerLost` when a member ends meanwhile; `x`, if in place, is then to be computed again.
        """
        return await self.run(lambda c: c.all_reduce(x, out, op=op, algorithm=algorithm))

    async def broadcast(self, x: Array, root: int) -> Array:
        """Copy `x` of rank `root` to all members' `x`, and return it. Raises `PeerLost`."""
        return await self.run(lambda c: c.broadcast(x, root))

    async def all_gather(self, x: Array, *, out: Array | None = None) -> Array:
        """Return (size, *x.shape): every member's `x`, in rank order. Raises `PeerLost`."""
        return await self.run(lambda c: c.all_gather(x, out))

    async def reduce_scatter(self, x: Array, *, out: Array | None = None) -> Array:
        """Sum `x`, (size, ...), over all members and return this member's part of it. Raises `PeerLost`."""
        return await self.run(lambda c: c.reduce_scatter(x, out))

    async def barrier(self) -> None:
        """Return once every member has called this. Raises `PeerLost`."""
        await self.run(lambda c: c.barrier())

    def abort(self) -> None:
        """End the operations in flight; they raise `OperationAborted`. Callable from any thread."""
        self.communicator.abort()

    async def close(self) -> None:
        """Abort what is in flight, return once it has drained, and give back the group's memory; idempotent.

        After a loss call it once the next view has been entered: until then a dead member's last store may
        still be under way into that memory.
        """
        self.abort()
        await asyncio.to_thread(self._data_plane.shutdown, cancel_futures=True)
        self.communicator.close()


async def group(node: Node, *, after: int = 0, channel: int = 0) -> Group:
    """The group of the first view with an epoch greater than `after`; waits for it.

    Each group of a process at one time needs a channel of its own.
    """
    view = await node.view(after=after)
    return group_of(node, view, channel=channel)


def group_of(node: Node, view: View, *, channel: int = 0) -> Group:
    """The group of a view that `node` has already got. Waits for nobody."""
    communicator = Communicator(
        segment=node.segment,
        peers={rank: node.peers[rank].segment for rank in view.ranks if rank != node.rank},
        members=view.ranks,
        rank=node.rank,
        epoch=view.epoch,
        channel=channel,
    )
    return Group(communicator, view)
