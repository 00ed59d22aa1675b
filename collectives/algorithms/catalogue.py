"""The catalogue of algorithms: which programs a request stands for and what they must achieve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from zbmd.collectives.algorithms import (
    bruck,
    direct,
    exchange,
    halving,
    hierarchical,
    reduction_trees,
    ring,
    rooted,
    shard_tree,
    shared_reduce,
    swap,
    tree,
)
from zbmd.collectives.algorithms.drafts import shared_drafts
from zbmd.collectives.algorithms.shard_tree import Assignment
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    IN,
    MAX_CHUNKS,
    MAX_RANKS,
    OUT,
    Program,
    chunk_range,
    hash_text,
    input_buffer,
)
from zbmd.collectives.programs.spec import (
    Spec,
    all_gather_spec,
    all_reduce_spec,
    all_to_all_spec,
    barrier_spec,
    broadcast_spec,
    gather_spec,
    left_fold,
    reduce_scatter_spec,
    reduce_spec,
    scatter_spec,
)


class Operation(Enum):
    """The collective operations; the value is the code in an operation's descriptor."""

    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    BARRIER = 5
    ALL_REDUCE_SHARDS = 6
    REDUCE = 7
    GATHER = 8
    SCATTER = 9
    ALL_TO_ALL = 10


ROOTED: Final = (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER)
"""Those that one rank, the root, has a part of its own in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that decides the programs of all ranks. `chunks` counts those of the full vector.

    `hosts[r]` numbers the host of rank r, for a hierarchical algorithm; empty: one host.
    """

    operation: Operation
    algorithm: str
    n: int
    chunks: int = 1
    root: int = 0
    shards: int = 0
    assignment: Assignment = ()
    hosts: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of the full vector: one, one a rank, or one a pair of ranks."""
        match self.operation:
            case Operation.ALL_TO_ALL:
                return self.n * self.n
            case Operation.ALL_GATHER | Operation.REDUCE_SCATTER | Operation.GATHER | Operation.SCATTER:
                return self.n
            case _:
                return 1

    def __str__(self) -> str:
        ranges = ",".join(f"{lo}:{hi}" for lo, hi in self.assignment)
        text = (
            f"{self.operation.name.lower()}/{self.algorithm} n={self.n} chunks={self.chunks} "
            f"root={self.root} shards={self.shards} assignment={ranges}"
        )
        return f"{text} hosts={','.join(map(str, self.hosts))}" if self.hosts else text

    def digest(self) -> int:
        """64 bits that ranks compare: equal requests mean matching programs."""
        return hash_text(f"{self} v{PROGRAMS_VERSION}")


PROGRAMS_VERSION = 3
"""Raised whenever an algorithm's programs change: it enters `Request.digest`."""


Sends: TypeAlias = Callable[[Request, int, int], range]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One entry of the catalogue.

    `exposes` gives the buffers of a rank that its peers read: these must lie in the arena. The full
    vector of a `blocked` one has a block a rank, or one a pair of ranks. An `eager` one reads inputs from the
    descriptors: `sends`, of (request, rank, reader), gives the chunks of a rank's input that a reader reads,
    and between hosts is sent. One that is `laid_out` always finds its blocks by a `Layout`. The programs of
    one that goes `over_hosts` depend on who is where.
    """

    build: Callable[[Request, int], Program]
    spec: Callable[[Request, bool], Spec]
    exposes: Callable[[Request, int], frozenset[int]]
    blocked: bool = False
    sends: Sends | None = None
    laid_out: bool = False
    over_hosts: bool = False

    @property
    def eager(self) -> bool:
        """Whether inputs travel with the descriptors."""
        return self.sends is not None


def _exposes(*buffers: int) -> Callable[[Request, int], frozenset[int]]:
    return lambda request, rank: frozenset(buffers)


def _exposes_at_root(buffer: int) -> Callable[[Request, int], frozenset[int]]:
    return lambda request, rank: frozenset((buffer,)) if rank == request.root else frozenset()


def _exposes_partials(request: Request, rank: int) -> frozenset[int]:
    nodes = shard_tree.shard_tree_nodes(request.shards, *request.assignment[rank])
    return frozenset((OUT, *(input_buffer(k) for k in range(len(nodes)))))


def _sends_all(request: Request, rank: int, reader: int) -> range:
    return range(request.chunks)


def _sends_own_block(request: Request, rank: int, reader: int) -> range:
    return chunk_range(rank, request.n, request.chunks)


def _sends_block_of_reader(request: Request, rank: int, reader: int) -> range:
    return chunk_range(reader, request.n, request.chunks)


def _sends_block_of_pair(request: Request, rank: int, reader: int) -> range:
    return chunk_range(rank * request.n + reader, request.n**2, request.chunks)


def _from_root(sends: Sends) -> Sends:
    return lambda request, rank, reader: sends(request, rank, reader) if rank == request.root else range(0)


def _to_root(sends: Sends) -> Sends:
    return lambda request, rank, reader: sends(request, rank, reader) if reader == request.root else range(0)


def _plain(builder: Callable[[int, int, int], Program]) -> Callable[[Request, int], Program]:
    return lambda request, rank: builder(request.n, rank, request.chunks)


def _rooted(builder: Callable[[int, int, int, int], Program]) -> Callable[[Request, int], Program]:
    return lambda request, rank: builder(request.n, rank, request.chunks, request.root)


def _reduce_in_rank_order(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    order = left_fold(range(request.n))
    return all_reduce_spec(
        request.n, request.chunks, order=lambda chunk: order, in_place=in_place, eager=eager
    )


def _scatter_in_rank_order(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    order = left_fold(range(request.n))
    return reduce_scatter_spec(
        request.n, request.chunks, order=lambda chunk: order, in_place=in_place, eager=eager
    )


def _reduce_to_root(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    order = left_fold(range(request.n))
    return reduce_spec(
        request.n,
        request.chunks,
        root=request.root,
        order=lambda chunk: order,
        in_place=in_place,
        eager=eager,
    )


def _gather_to_root(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    return gather_spec(request.n, request.chunks, root=request.root, in_place=in_place, eager=eager)


def _scatter_from_root(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    return scatter_spec(request.n, request.chunks, root=request.root, in_place=in_place, eager=eager)


def _all_to_all(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    return all_to_all_spec(request.n, request.chunks, eager=eager)


def _reduce_in_ring_order(request: Request, in_place: bool) -> Spec:
    n, chunks = request.n, request.chunks
    return all_reduce_spec(n, chunks, order=partial(ring.ring_order, n, chunks), in_place=in_place)


def _scatter_in_ring_order(request: Request, in_place: bool) -> Spec:
    n, chunks = request.n, request.chunks
    return reduce_scatter_spec(
        n, chunks, order=partial(ring.ring_scatter_order, n, chunks), in_place=in_place
    )


def _reduce_both_ways(request: Request, in_place: bool) -> Spec:
    order = partial(ring.bidirectional_order, request.n, request.chunks)
    return all_reduce_spec(request.n, request.chunks, order=order, in_place=in_place)


def _reduce_by_halves(request: Request, in_place: bool) -> Spec:
    order = partial(halving.halving_order, request.n, request.chunks)
    return all_reduce_spec(request.n, request.chunks, order=order, in_place=in_place)


def _reduce_up_a_tree(request: Request, in_place: bool) -> Spec:
    order = reduction_trees.tree_order(reduction_trees.balanced_tree(request.n))
    return all_reduce_spec(request.n, request.chunks, order=lambda chunk: order, in_place=in_place)


def _reduce_up_two_trees(request: Request, in_place: bool) -> Spec:
    orders = [reduction_trees.tree_order(tree) for tree in reduction_trees.two_trees(request.n)]
    return all_reduce_spec(
        request.n, request.chunks, order=lambda chunk: orders[chunk % 2], in_place=in_place
    )


def _reduce_up_to_root(request: Request, in_place: bool) -> Spec:
    n, chunks, root = request.n, request.chunks, request.root
    order = reduction_trees.tree_order(reduction_trees.balanced_tree(n, root))
    return reduce_spec(n, chunks, root=root, order=lambda chunk: order, in_place=in_place)


def _reduce_over_hosts(request: Request, in_place: bool) -> Spec:
    n, chunks = request.n, request.chunks
    order = partial(hierarchical.hierarchical_order, n, chunks, request.hosts)
    return all_reduce_spec(n, chunks, order=order, in_place=in_place)


def _reduce_up_a_tree_of_hosts(request: Request, in_place: bool) -> Spec:
    order = hierarchical.hierarchical_tree_order(request.n, request.hosts)
    return all_reduce_spec(request.n, request.chunks, order=lambda chunk: order, in_place=in_place)


def _gather(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    return all_gather_spec(request.n, request.chunks, in_place=in_place, eager=eager)


def _broadcast(request: Request, in_place: bool, *, eager: bool = False) -> Spec:
    return broadcast_spec(request.n, request.chunks, root=request.root, eager=eager)


def _shards(request: Request, in_place: bool) -> Spec:
    return shard_tree.shard_tree_spec(
        request.n, request.chunks, request.shards, request.assignment, in_place=in_place
    )


ALGORITHMS: Mapping[tuple[Operation, str], Algorithm] = MappingProxyType(
    {
        (Operation.ALL_REDUCE, "eager"): Algorithm(
            build=_plain(direct.eager_all_reduce),
            spec=partial(_reduce_in_rank_order, eager=True),
            exposes=_exposes(),
            sends=_sends_all,
        ),
        (Operation.ALL_REDUCE, "direct"): Algorithm(
            build=_plain(direct.direct_all_reduce), spec=_reduce_in_rank_order, exposes=_exposes(IN, OUT)
        ),
        (Operation.ALL_REDUCE, "swap"): Algorithm(
            build=_plain(swap.swap_all_reduce), spec=_reduce_in_rank_order, exposes=_exposes()
        ),
        (Operation.ALL_REDUCE, "ring"): Algorithm(
            build=_plain(ring.ring_all_reduce), spec=_reduce_in_ring_order, exposes=_exposes()
        ),
        (Operation.ALL_REDUCE, "bidirectional_ring"): Algorithm(
            build=_plain(ring.bidirectional_ring_all_reduce), spec=_reduce_both_ways, exposes=_exposes()
        ),
        (Operation.ALL_REDUCE, "halving_doubling"): Algorithm(
            build=_plain(halving.halving_doubling_all_reduce),
            spec=_reduce_by_halves,
            exposes=_exposes(IN, OUT),
        ),
        (Operation.ALL_REDUCE, "tree"): Algorithm(
            build=_plain(reduction_trees.tree_all_reduce), spec=_reduce_up_a_tree, exposes=_exposes()
        ),
        (Operation.ALL_REDUCE, "double_tree"): Algorithm(
            build=_plain(reduction_trees.double_tree_all_reduce),
            spec=_reduce_up_two_trees,
            exposes=_exposes(),
        ),
        (Operation.ALL_REDUCE, "hierarchical"): Algorithm(
            build=lambda request, rank: hierarchical.hierarchical_all_reduce(
                request.n, rank, request.chunks, request.hosts
            ),
            spec=_reduce_over_hosts,
            exposes=_exposes(IN, OUT),
            over_hosts=True,
        ),
        (Operation.ALL_REDUCE, "hierarchical_tree"): Algorithm(
            build=lambda request, rank: hierarchical.hierarchical_tree_all_reduce(
                request.n, rank, request.chunks, request.hosts
            ),
            spec=_reduce_up_a_tree_of_hosts,
            exposes=_exposes(IN, OUT),
            over_hosts=True,
        ),
        (Operation.REDUCE, "tree"): Algorithm(
            build=_rooted(reduction_trees.tree_reduce), spec=_reduce_up_to_root, exposes=_exposes()
        ),
        (Operation.ALL_TO_ALL, "bruck"): Algorithm(
            build=_plain(bruck.bruck_all_to_all),
            spec=_all_to_all,
            exposes=_exposes(),
            blocked=True,
            laid_out=True,
        ),
        (Operation.BROADCAST, "eager"): Algorithm(
            build=_rooted(direct.eager_broadcast),
            spec=partial(_broadcast, eager=True),
            exposes=_exposes(),
            sends=_from_root(_sends_all),
        ),
        (Operation.BROADCAST, "direct"): Algorithm(
            build=_rooted(direct.direct_broadcast), spec=_broadcast, exposes=_exposes_at_root(OUT)
        ),
        (Operation.BROADCAST, "tree"): Algorithm(
            build=_rooted(tree.tree_broadcast), spec=_broadcast, exposes=_exposes(OUT)
        ),
        (Operation.ALL_GATHER, "eager"): Algorithm(
            build=_plain(direct.eager_all_gather),
            spec=partial(_gather, eager=True),
            exposes=_exposes(),
            blocked=True,
            sends=_sends_own_block,
        ),
        (Operation.ALL_GATHER, "direct"): Algorithm(
            build=_plain(direct.direct_all_gather), spec=_gather, exposes=_exposes(IN), blocked=True
        ),
        (Operation.ALL_GATHER, "ring"): Algorithm(
            build=_plain(ring.ring_all_gather), spec=_gather, exposes=_exposes(), blocked=True
        ),
        (Operation.REDUCE_SCATTER, "direct"): Algorithm(
            build=_plain(direct.direct_reduce_scatter),
            spec=_scatter_in_rank_order,
            exposes=_exposes(IN),
            blocked=True,
        ),
        (Operation.REDUCE_SCATTER, "ring"): Algorithm(
            build=_plain(ring.ring_reduce_scatter),
            spec=_scatter_in_ring_order,
            exposes=_exposes(),
            blocked=True,
        ),
        (Operation.REDUCE_SCATTER, "eager"): Algorithm(
            build=_plain(direct.eager_reduce_scatter),
            spec=partial(_scatter_in_rank_order, eager=True),
            exposes=_exposes(),
            blocked=True,
            sends=_sends_block_of_reader,
            laid_out=True,
        ),
        (Operation.REDUCE, "eager"): Algorithm(
            build=_rooted(rooted.eager_reduce),
            spec=partial(_reduce_to_root, eager=True),
            exposes=_exposes(),
            sends=_to_root(_sends_all),
        ),
        (Operation.REDUCE, "direct"): Algorithm(
            build=_rooted(rooted.direct_reduce), spec=_reduce_to_root, exposes=_exposes(IN)
        ),
        (Operation.REDUCE, "shared"): Algorithm(
            build=_rooted(shared_reduce.shared_reduce), spec=_reduce_to_root, exposes=_exposes(IN)
        ),
        (Operation.GATHER, "eager"): Algorithm(
            build=_rooted(rooted.eager_gather),
            spec=partial(_gather_to_root, eager=True),
            exposes=_exposes(),
            blocked=True,
            sends=_to_root(_sends_own_block),
            laid_out=True,
        ),
        (Operation.GATHER, "direct"): Algorithm(
            build=_rooted(rooted.direct_gather),
            spec=_gather_to_root,
            exposes=_exposes(IN),
            blocked=True,
            laid_out=True,
        ),
        (Operation.SCATTER, "eager"): Algorithm(
            build=_rooted(rooted.eager_scatter),
            spec=partial(_scatter_from_root, eager=True),
            exposes=_exposes(),
            blocked=True,
            sends=_from_root(_sends_block_of_reader),
            laid_out=True,
        ),
        (Operation.SCATTER, "direct"): Algorithm(
            build=_rooted(rooted.direct_scatter),
            spec=_scatter_from_root,
            exposes=_exposes_at_root(IN),
            blocked=True,
            laid_out=True,
        ),
        (Operation.ALL_TO_ALL, "eager"): Algorithm(
            build=_plain(exchange.eager_all_to_all),
            spec=partial(_all_to_all, eager=True),
            exposes=_exposes(),
            blocked=True,
            sends=_sends_block_of_pair,
            laid_out=True,
        ),
        (Operation.ALL_TO_ALL, "direct"): Algorithm(
            build=_plain(exchange.direct_all_to_all),
            spec=_all_to_all,
            exposes=_exposes(IN),
            blocked=True,
            laid_out=True,
        ),
        (Operation.BARRIER, "dissemination"): Algorithm(
            build=lambda request, rank: tree.dissemination_barrier(request.n, rank),
            spec=lambda request, in_place: barrier_spec(request.n),
            exposes=_exposes(),
        ),
        (Operation.ALL_REDUCE_SHARDS, "shard_tree"): Algorithm(
            build=lambda request, rank: shard_tree.shard_tree_all_reduce(
                request.n, rank, request.chunks, request.shards, request.assignment
            ),
            spec=_shards,
            exposes=_exposes_partials,
        ),
    }
)


def algorithm_of(request: Request) -> Algorithm:
    """The catalogue's entry; raises `ProgramError` if there is none or the request is out of bounds."""
    algorithm = ALGORITHMS.get((request.operation, request.algorithm))
    if algorithm is None:
        known = sorted(name for operation, name in ALGORITHMS if operation is request.operation)
        raise ProgramError(
            f"{request.operation.name.lower()} has no algorithm {request.algorithm!r}; "
            f"choose from {', '.join(known)}"
        )
    if not 1 <= request.n <= MAX_RANKS:
        raise ProgramError(f"a group has 1..{MAX_RANKS} ranks, not {request.n}")
    if not 1 <= request.chunks <= MAX_CHUNKS or (algorithm.blocked and request.chunks % request.blocks):
        raise ProgramError(
            f"{request.chunks} chunks: there must be 1..{MAX_CHUNKS}, "
            f"and a multiple of the {request.blocks} blocks"
        )
    if not 0 <= request.root < request.n:
        raise ProgramError(f"the root is rank {request.root} of a group of {request.n}")
    return algorithm


def build(request: Request, rank: int) -> Program:
    """The program of `rank`, a rank of the group (0..n-1). Raises `ProgramError` on a bad request."""
    algorithm = algorithm_of(request)
    if not 0 <= rank < request.n:
        raise ProgramError(f"rank {rank} is not of a group of {request.n}")
    return algorithm.build(request, rank)


def build_all(request: Request) -> list[Program]:
    """The programs of all ranks. Raises `ProgramError` on a bad request."""
    with shared_drafts():
        return [build(request, rank) for rank in range(request.n)]


def spec_of(request: Request, *, in_place: bool = False) -> Spec:
    """What the request's programs must achieve, for `verify`."""
    algorithm = algorithm_of(request)
    spec = algorithm.spec(request, in_place)
    return spec if algorithm.sends is None else replace(spec, sent=partial(algorithm.sends, request))
