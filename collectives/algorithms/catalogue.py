"""The catalogue of algorithms: which programs a request stands for and what they must achieve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never

from zbmd.collectives.algorithms import direct, hierarchical, log_rounds, one_host, ring, shard_tree, trees
from zbmd.collectives.algorithms.compose import shared_drafts
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
    Order,
    Spec,
    Tree,
    all_gather_spec,
    all_reduce_spec,
    all_to_all_spec,
    at_root,
    barrier_spec,
    broadcast_spec,
    left_fold,
    reduce_scatter_spec,
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

    @property
    def blocked(self) -> bool:
        """Whether the full vector has a block a rank, or one a pair of ranks."""
        return self in _BLOCKED


ROOTED: Final = (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER)
"""Those that one rank, the root, has a part of its own in."""
_BLOCKED: Final = (
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.GATHER,
    Operation.SCATTER,
    Operation.ALL_TO_ALL,
)


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
        if self.operation is Operation.ALL_TO_ALL:
            return self.n**2
        return self.n if self.operation.blocked else 1

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
OrderOf: TypeAlias = Callable[[Request], Order]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One entry of the catalogue.

    `order` gives the order of a reduction; an operation that moves bytes alone has none. `exposes` gives the
    buffers of a rank that its peers read: these must lie in the arena. An `eager` one reads inputs from the
    descriptors: `sends`, of (request, rank, reader), gives the chunks of a rank's input that a reader reads,
    and between hosts is sent. The programs of one that goes `over_hosts` depend on who is where.
    """

    build: Callable[[Request, int], Program]
    order: OrderOf | None = None
    exposes: Callable[[Request, int], frozenset[int]] = lambda request, rank: frozenset()
    sends: Sends | None = None
    over_hosts: bool = False

    @property
    def eager(self) -> bool:
        """Whether inputs travel with the descriptors."""
        return self.sends is not None


# -- orders: how a chunk is reduced -------------------------------------------------------------------


def _by_rank(request: Request) -> Order:
    order = left_fold(range(request.n))
    return lambda chunk: order


def _by_chunk(order: Callable[[int, int, int], Tree]) -> OrderOf:
    return lambda request: partial(order, request.n, request.chunks)


def _up_a_tree(request: Request) -> Order:
    order = trees.tree_order(trees.balanced_tree(request.n))
    return lambda chunk: order


def _up_a_tree_to_root(request: Request) -> Order:
    order = trees.tree_order(trees.balanced_tree(request.n, request.root))
    return lambda chunk: order


def _up_two_trees(request: Request) -> Order:
    orders = [trees.tree_order(tree) for tree in trees.two_trees(request.n)]
    return lambda chunk: orders[chunk % 2]


def _round_the_hosts(request: Request) -> Order:
    return partial(hierarchical.hierarchical_order, request.n, request.chunks, request.hosts)


def _up_a_tree_of_hosts(request: Request) -> Order:
    order = hierarchical.hierarchical_tree_order(request.n, request.hosts)
    return lambda chunk: order


# -- what peers read -------------------------------------------------------------------------------------


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


# -- what a builder takes of a request -------------------------------------------------------------------


def _plain(builder: Callable[[int, int, int], Program]) -> Callable[[Request, int], Program]:
    return lambda request, rank: builder(request.n, rank, request.chunks)


def _rooted(builder: Callable[[int, int, int, int], Program]) -> Callable[[Request, int], Program]:
    return lambda request, rank: builder(request.n, rank, request.chunks, request.root)


def _hosted(
    builder: Callable[[int, int, int, Sequence[int]], Program],
) -> Callable[[Request, int], Program]:
    return lambda request, rank: builder(request.n, rank, request.chunks, request.hosts)


def _barrier(request: Request, rank: int) -> Program:
    return log_rounds.dissemination_barrier(request.n, rank)


def _shards(request: Request, rank: int) -> Program:
    return shard_tree.shard_tree_all_reduce(
        request.n, rank, request.chunks, request.shards, request.assignment
    )


_BY_OPERATION: Mapping[Operation, Mapping[str, Algorithm]] = {
    Operation.ALL_REDUCE: {
        "eager": Algorithm(_plain(direct.eager_all_reduce), _by_rank, sends=_sends_all),
        "direct": Algorithm(_plain(direct.direct_all_reduce), _by_rank, _exposes(IN, OUT)),
        "swap": Algorithm(_plain(one_host.swap_all_reduce), _by_rank),
        "shared": Algorithm(_plain(one_host.shared_all_reduce), _by_rank),
        "ring": Algorithm(_plain(ring.ring_all_reduce), _by_chunk(ring.ring_order)),
        "bidirectional_ring": Algorithm(
            _plain(ring.bidirectional_ring_all_reduce), _by_chunk(ring.bidirectional_order)
        ),
        "halving_doubling": Algorithm(
            _plain(log_rounds.halving_doubling_all_reduce),
            _by_chunk(log_rounds.halving_order),
            _exposes(IN, OUT),
        ),
        "tree": Algorithm(_plain(trees.tree_all_reduce), _up_a_tree),
        "double_tree": Algorithm(_plain(trees.double_tree_all_reduce), _up_two_trees),
        "hierarchical": Algorithm(
            _hosted(hierarchical.hierarchical_all_reduce),
            _round_the_hosts,
            _exposes(IN, OUT),
            over_hosts=True,
        ),
        "hierarchical_tree": Algorithm(
            _hosted(hierarchical.hierarchical_tree_all_reduce),
            _up_a_tree_of_hosts,
            _exposes(IN, OUT),
            over_hosts=True,
        ),
    },
    Operation.REDUCE: {
        "eager": Algorithm(_rooted(direct.eager_reduce), _by_rank, sends=_to_root(_sends_all)),
        "direct": Algorithm(_rooted(direct.direct_reduce), _by_rank, _exposes(IN)),
        "shared": Algorithm(_rooted(one_host.shared_reduce), _by_rank, _exposes(IN)),
        "tree": Algorithm(_rooted(trees.tree_reduce), _up_a_tree_to_root),
    },
    Operation.REDUCE_SCATTER: {
        "eager": Algorithm(_plain(direct.eager_reduce_scatter), _by_rank, sends=_sends_block_of_reader),
        "direct": Algorithm(_plain(direct.direct_reduce_scatter), _by_rank, _exposes(IN)),
        "swap": Algorithm(_plain(one_host.swap_reduce_scatter), _by_rank),
        "ring": Algorithm(_plain(ring.ring_reduce_scatter), _by_chunk(ring.ring_scatter_order)),
    },
    Operation.ALL_REDUCE_SHARDS: {
        "shard_tree": Algorithm(_shards, exposes=_exposes_partials),
    },
    Operation.BROADCAST: {
        "eager": Algorithm(_rooted(direct.eager_broadcast), sends=_from_root(_sends_all)),
        "direct": Algorithm(_rooted(direct.direct_broadcast), exposes=_exposes_at_root(OUT)),
        "shared": Algorithm(_rooted(one_host.shared_broadcast)),
        "tree": Algorithm(_rooted(trees.tree_broadcast), exposes=_exposes(OUT)),
    },
    Operation.ALL_GATHER: {
        "eager": Algorithm(_plain(direct.eager_all_gather), sends=_sends_own_block),
        "direct": Algorithm(_plain(direct.direct_all_gather), exposes=_exposes(IN)),
        "swap": Algorithm(_plain(one_host.swap_all_gather)),
        "ring": Algorithm(_plain(ring.ring_all_gather)),
    },
    Operation.GATHER: {
        "eager": Algorithm(_rooted(direct.eager_gather), sends=_to_root(_sends_own_block)),
        "direct": Algorithm(_rooted(direct.direct_gather), exposes=_exposes(IN)),
        "shared": Algorithm(_rooted(one_host.shared_gather)),
    },
    Operation.SCATTER: {
        "eager": Algorithm(_rooted(direct.eager_scatter), sends=_from_root(_sends_block_of_reader)),
        "direct": Algorithm(_rooted(direct.direct_scatter), exposes=_exposes_at_root(IN)),
        "shared": Algorithm(_rooted(one_host.shared_scatter)),
    },
    Operation.ALL_TO_ALL: {
        "eager": Algorithm(_plain(direct.eager_all_to_all), sends=_sends_block_of_pair),
        "direct": Algorithm(_plain(direct.direct_all_to_all), exposes=_exposes(IN)),
        "swap": Algorithm(_plain(one_host.swap_all_to_all)),
        "bruck": Algorithm(_plain(log_rounds.bruck_all_to_all)),
    },
    Operation.BARRIER: {"dissemination": Algorithm(_barrier)},
}
ALGORITHMS: Mapping[tuple[Operation, str], Algorithm] = MappingProxyType(
    {
        (operation, name): entry
        for operation, entries in _BY_OPERATION.items()
        for name, entry in entries.items()
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
    if not 1 <= request.chunks <= MAX_CHUNKS or (
        request.operation.blocked and request.chunks % request.blocks
    ):
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
    """Return the specification that the request's programs must meet, for `verify`."""
    entry = algorithm_of(request)
    spec = _spec_of(request, entry, in_place=in_place)
    return spec if entry.sends is None else replace(spec, sent=partial(entry.sends, request))


def _spec_of(request: Request, entry: Algorithm, *, in_place: bool) -> Spec:
    n, chunks, root, eager = request.n, request.chunks, request.root, entry.eager
    order = None if entry.order is None else entry.order(request)
    match request.operation:
        case Operation.ALL_REDUCE | Operation.REDUCE:
            assert order is not None
            spec = all_reduce_spec(n, chunks, order=order, in_place=in_place, eager=eager)
            return spec if request.operation is Operation.ALL_REDUCE else at_root(spec, root)
        case Operation.REDUCE_SCATTER:
            assert order is not None
            return reduce_scatter_spec(n, chunks, order=order, in_place=in_place, eager=eager)
        case Operation.ALL_GATHER | Operation.GATHER:
            spec = all_gather_spec(n, chunks, in_place=in_place, eager=eager)
            return spec if request.operation is Operation.ALL_GATHER else at_root(spec, root)
        case Operation.BROADCAST:
            return broadcast_spec(n, chunks, root=root, eager=eager)
        case Operation.SCATTER:
            return scatter_spec(n, chunks, root=root, in_place=in_place, eager=eager)
        case Operation.ALL_TO_ALL:
            return all_to_all_spec(n, chunks, eager=eager)
        case Operation.ALL_REDUCE_SHARDS:
            return shard_tree.shard_tree_spec(
                n, chunks, request.shards, request.assignment, in_place=in_place
            )
        case Operation.BARRIER:
            return barrier_spec(n)
        case _:
            assert_never(request.operation)
