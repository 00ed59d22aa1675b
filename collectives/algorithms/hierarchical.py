"""All-reduce over hosts: within each in shared memory, between them as little as may be.

The chunks are cut into as many slices as the smallest host has ranks. The i-th rank of each host reduces
slice i over its host, then the i-th ranks of all hosts reduce it between them, then everybody reads the
results of its host. Between hosts a slice goes round a ring (`ring`): every byte crosses between two hosts
twice, whatever the number of ranks on them, and all links are used. Or it goes up and down a tree of the
hosts (`trees`): more bytes at the tree's inner hosts, in as few steps as its height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from zbmd.collectives.algorithms.compose import (
    Await,
    Draft,
    Signal,
    TreeReduction,
    finish_program,
    number_waits,
)
from zbmd.collectives.algorithms.ring import WINDOW_SLOTS, Hop, Place, walk_ring
from zbmd.collectives.algorithms.trees import Climb, balanced_tree, inbox_slots, tree_order
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    IN,
    OUT,
    SCRATCH,
    Copy,
    Notify,
    Operand,
    Program,
    Reduce,
    chunk_range,
)
from zbmd.collectives.programs.spec import Tree, left_fold

PARTITIONS_KEPT = 8


def hosts_of(n: int, hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, in order of its first rank; one host of all if `hosts` is empty.

    `hosts[r]` is a number for the host of rank r. Raises `ProgramError` unless there is one a rank.
    """
    if not hosts:
        return [list(range(n))]
    if len(hosts) != n:
        raise ProgramError(f"hosts are given for {len(hosts)} ranks of {n}")
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


class _Partition:
    """The ranks of each host, and the chunks of each rank."""

    def __init__(self, n: int, hosts: Sequence[int], chunks: int) -> None:
        self.hosts = hosts_of(n, hosts)
        self.slices = min(map(len, self.hosts))
        self.chunks = chunks
        self._places = {rank: (h, i) for h, host in enumerate(self.hosts) for i, rank in enumerate(host)}

    def place_of(self, rank: int) -> tuple[int, int]:
        """(host, place in it) of a rank."""
        return self._places[rank]

    def slice_of(self, i: int) -> range:
        return chunk_range(i, self.slices, self.chunks)

    def block_of(self, i: int, b: int) -> range:
        """The chunks of block b of slice i: what is at home on host b."""
        whole = self.slice_of(i)
        part = chunk_range(b % len(self.hosts), len(self.hosts), len(whole))
        return whole[part.start : part.stop]


_partition = lru_cache(maxsize=PARTITIONS_KEPT)(_Partition)
_Between = Callable[[_Partition, int, int, int], Draft]
"""What (rank, host, slice) do between hosts with the sum of their host."""


def hierarchical_all_reduce(n: int, rank: int, chunks: int, hosts: Sequence[int]) -> Program:
    """Reduce in each host, all-reduce round rings over the hosts, read in each host. In place or not.

    Order (`hierarchical_order`): left folds over the ranks of a host, combined round the ring of hosts.
    """
    return _program("hierarchical_all_reduce", n, rank, chunks, hosts, _ring_over_hosts, WINDOW_SLOTS)


def hierarchical_tree_all_reduce(n: int, rank: int, chunks: int, hosts: Sequence[int]) -> Program:
    """Reduce in each host, go up and down a binary tree of the hosts, read in each host. In place or not.

    Order (`hierarchical_tree_order`): left folds over the ranks of a host, combined up the tree.
    """
    count = len(_partition(n, tuple(hosts), chunks).hosts)
    slots = inbox_slots((balanced_tree(count),)) if count > 1 else 0
    return _program("hierarchical_tree_all_reduce", n, rank, chunks, hosts, _tree_over_hosts, slots)


def _program(
    name: str, n: int, rank: int, chunks: int, hosts: Sequence[int], between: _Between, slots: int
) -> Program:
    partition = _partition(n, tuple(hosts), chunks)
    h, i = partition.place_of(rank)
    many, works = len(partition.hosts) > 1, i < partition.slices
    own = len(partition.slice_of(i)) if works else 0
    stack = 1 if len(partition.hosts[h]) > 2 else 0
    return finish_program(
        name,
        n,
        rank,
        1,
        chunks,
        number_waits(partial(_all_reduce_draft, partition, between), rank),
        scratch_slots=(own if many else 0) + stack,
        inbox_slots=slots if many and works else 0,
    )


def hierarchical_order(n: int, chunks: int, hosts: Sequence[int], chunk: int) -> Tree:
    """The order in which `hierarchical_all_reduce` combines ranks on `chunk`."""
    partition = _Partition(n, hosts, chunks)
    count = len(partition.hosts)
    i = next(i for i in range(partition.slices) if chunk in partition.slice_of(i))
    block = next(b for b in range(count) if chunk in partition.block_of(i, b))
    folds = [left_fold(partition.hosts[(block + k) % count]) for k in range(count)]
    total = folds[0]
    for fold in folds[1:]:
        total = (total, fold)
    return total


def hierarchical_tree_order(n: int, hosts: Sequence[int]) -> Tree:
    """The order in which `hierarchical_tree_all_reduce` combines ranks, on every chunk."""
    groups = hosts_of(n, hosts)
    return tree_order(balanced_tree(len(groups)), lambda h: left_fold(groups[h]))


def _all_reduce_draft(partition: _Partition, between: _Between, rank: int) -> Draft:
    h, i = partition.place_of(rank)
    draft: Draft = []
    if i < partition.slices:
        draft += _reduce_in_host(partition, rank, h, i)
        if len(partition.hosts) > 1:
            draft += between(partition, rank, h, i)
    return draft + _read_in_host(partition, rank, h, i)


def _reduce_in_host(partition: _Partition, rank: int, h: int, i: int) -> Draft:
    """The sum over the host of slice i: into scratch, a slot a chunk, or into `out` if there is one host."""
    many, host = len(partition.hosts) > 1, partition.hosts[h]
    if many and len(host) == 1:
        return []
    chunks = partition.slice_of(i)
    reduction = TreeReduction(rank, first_slot=len(chunks) if many else 0)
    order = left_fold(host)
    draft: Draft = []
    for k, chunk in enumerate(chunks):
        places = {peer: Operand(peer, IN, chunk) for peer in host}
        target = Operand(rank, SCRATCH, k) if many else Operand(rank, OUT, chunk)
        draft += reduction.emit(order, chunk, places.__getitem__, target)
    return draft


def _ring_over_hosts(partition: _Partition, rank: int, h: int, i: int) -> Draft:
    count, first = len(partition.hosts), partition.slice_of(i).start
    alone = len(partition.hosts[h]) == 1

    def own(chunk: int) -> Operand:
        return Operand(rank, IN, chunk) if alone else Operand(rank, SCRATCH, chunk - first)

    def partial_sum(chunk: int, j: int) -> Operand:
        return Operand(rank, SCRATCH, chunk - first)

    def result(chunk: int, j: int) -> Operand:
        return Operand(rank, OUT, chunk)

    def hop(s: int) -> Hop:
        target = partial_sum if s < count - 2 else result
        return Hop(
            partition.block_of(i, h - s),
            partition.block_of(i, h - s - 1),
            partial_sum if s else lambda chunk, j: own(chunk),
            lambda chunk, j, slot: Reduce(chunk, target(chunk, j), slot, own(chunk)),
        )

    def keep(chunk: int, j: int, slot: Operand) -> Copy:
        return Copy(chunk, result(chunk, j), slot)

    reducing = [hop(s) for s in range(count - 1)]
    gathering = [
        Hop(partition.block_of(i, h + 1 - s), partition.block_of(i, h - s), result, keep)
        for s in range(count - 1)
    ]
    following, preceding = (partition.hosts[(h + way) % count][i] for way in (1, -1))
    return walk_ring(Place(rank, following, preceding, count), reducing + gathering)


def _tree_over_hosts(partition: _Partition, rank: int, h: int, i: int) -> Draft:
    alone = len(partition.hosts[h]) == 1
    chunks = partition.slice_of(i)

    def partial_sum(k: int) -> Operand:
        return Operand(rank, SCRATCH, k)

    climb = Climb(
        trees=(balanced_tree(len(partition.hosts)),),
        ranks=[host[i] for host in partition.hosts],
        node=h,
        chunks=chunks,
        own=(lambda k: Operand(rank, IN, chunks[k])) if alone else partial_sum,
        partial=partial_sum,
    )
    return climb.both_ways()


def _read_in_host(partition: _Partition, rank: int, h: int, i: int) -> Draft:
    """Announce the own slice, read those of the host's others, and end when all have read the own."""
    host = partition.hosts[h]
    owners = host[: partition.slices]
    draft: Draft = []
    if rank in owners:
        draft += [Signal(Notify(peer), "slice") for peer in host if peer != rank]
    for k, owner in enumerate(owners):
        if owner == rank:
            continue
        draft.append(Await(owner, "slice"))
        draft += [
            Copy(chunk, Operand(rank, OUT, chunk), Operand(owner, OUT, chunk))
            for chunk in partition.slice_of(k)
        ]
    # The others' inputs and slices have been read; the end of who works comes after it has read all inputs.
    draft += [Signal(Notify(peer), "read") for peer in host if peer != rank]
    return draft + [Await(peer, "read") for peer in host if peer != rank]
