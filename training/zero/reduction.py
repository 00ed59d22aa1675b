"""Reduce the gradients of units whose state is sharded, over all ranks that divide the data.

The ranks that share one state scatter and fold their partial sums: each then has the sum of their logical
shards, of its part. Where other ranks hold the same shard, along `dp`, these sums are all-reduced among them.
Both follow one tree over all logical shards, so the bits do not depend on how the mesh divides them. (Hybrid
sharding: Y. Zhao and others, "PyTorch FSDP", 2023, arXiv:2304.11277, section 3.2.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from zbmd.collectives.algorithms.shard_tree import Node
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.training.autograd.array_module import Array
from zbmd.training.job.mesh import DATA_AXIS, MeshGroups
from zbmd.training.step.reduction import ShardSum, all_reduce_partials
from zbmd.transport.errors import LocalProtocolError

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


class ShardedReduction:
    """The reductions of one view, over `groups`, of gradients that `shards` logical shards add up to.

    sums: what the ranks that share this rank's state hold of the shards, and how they add them up.
    """

    def __init__(self, groups: MeshGroups, shards: int) -> None:
        mesh = groups.mesh
        if groups.sharding is None:
            raise LocalProtocolError("a state is sharded along an axis: the mesh needs a group there")
        self._sharding, self._replicas = groups.sharding, groups.replicas
        ranks, states = mesh.size(mesh.sharded_axis), mesh.size(DATA_AXIS) if mesh.has_shards_alike else 1
        place = groups.place(DATA_AXIS) if mesh.has_shards_alike else 0
        self.sums = ShardSum.of(shards, ranks, groups=states, group=place)
        self._among_replicas = ShardSum.of(shards, states)

    @property
    def has_replicas(self) -> bool:
        """Return whether other ranks hold the same shard, so that `submit` needs room for the sum."""
        return self._replicas is not None

    def submit(self, sent: Sequence[Array], received: Sequence[Array], out: Array | None) -> Future[Array]:
        """Return the future sum of all shards, of this rank's part: (part,).

        sent: this rank's partial sums, (ranks, part); received: as much room; out: (part,), with replicas.
        The arrays are in use until the future is done.
        """
        sharding, replicas, sums = self._sharding, self._replicas, self.sums
        end_ns = sharding.deadline_ns()

        def scattered(communicator: Communicator) -> dict[Node, Array]:
            for array, into in zip(sent, received, strict=True):
                communicator.all_to_all(array, into, deadline_ns=end_ns)
            return sums.fold(received)

        def alone(communicator: Communicator) -> Array:
            (total,) = scattered(communicator).values()
            return total

        if replicas is None:
            return sharding.submit(alone)
        assert out is not None, "the sum of several has room of its own"
        among, total = self._among_replicas, out

        def all_reduced(partials: dict[Node, Array]) -> Future[Array]:
            return replicas.submit(
                lambda c: all_reduce_partials(c, partials, total, among, deadline_ns=end_ns)
            )

        return _then(sharding.submit(scattered), all_reduced)


def _then(first: Future[FirstT], begin: Callable[[FirstT], Future[SecondT]]) -> Future[SecondT]:
    """Return the end of what `begin` starts with the result of `first`, or the failure of either."""
    ended: Future[SecondT] = Future()

    def second_done(second: Future[SecondT]) -> None:
        if not _failed(second, ended):
            ended.set_result(second.result())

    def first_done(done: Future[FirstT]) -> None:
        if _failed(done, ended):
            return
        try:
            second = begin(done.result())
        except BaseException as error:  # noqa: BLE001 -- who waits for the end gets it
            ended.set_exception(error)
        else:
            second.add_done_callback(second_done)

    first.add_done_callback(first_done)
    return ended


def _failed(done: Future[FirstT], ended: Future[SecondT]) -> bool:
    """Pass a failure on; return whether it was one."""
    if done.cancelled():
        ended.cancel()
        return True
    error = done.exception()
    if error is not None:
        ended.set_exception(error)
    return error is not None
