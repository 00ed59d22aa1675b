"""A rank's neighbours in an algorithm, in an order that ranks with equal programs share.

At thousands of ranks most programs differ in the names of the neighbours alone. `roles_of` gives for every
rank its neighbours, and a key: ranks of equal keys have equal programs once neighbours are numbered by their
place among the roles. That this is so is tested for all ranks of small groups, and for some ranks of each
schedule that is made.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, ROOTED, Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.trees import BinaryTree, balanced_tree, two_trees
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    COPY_CODE,
    ENCODING_WIDTH,
    FINISH_CODE,
    NOTIFY_CODE,
    PUB,
    PUT_CODE,
    REDUCE_CODE,
    WAIT_CODE,
    encode,
    peers_after,
)

# ---- schedules: the programs of all ranks of a large group, in the form of the compiled timeline
#
# An eager program reads inputs that came with the descriptors. So before it each rank puts to every other
# rank what that one reads of its input, in the order in which a real group sends descriptors
# (`RemoteExecutor._enter`), and waits only for the ranks whose input it reads.

Code = NDArray[np.int32]
CHECKED_RANKS = 3
"""So many ranks of a schedule are compared with their own programs."""
PEER, COUNT, FIRST, SECOND = 2, 3, 6, 9
"""Columns of an encoding."""
OWN = -1


@dataclass(frozen=True, slots=True)
class ScaleSchedule:
    """The programs of all ranks; see `_timeline.Timeline` for the tables."""

    codes: list[Code]
    which: NDArray[np.int32]
    first: NDArray[np.int64]
    peers: NDArray[np.int32]
    back: NDArray[np.int32]

    @property
    def instructions(self) -> int:
        """Return the number of instructions of all ranks."""
        return int(np.array([len(code) for code in self.codes])[self.which].sum())


def schedule_of(request: Request) -> ScaleSchedule:
    """Return all ranks' programs; each kind of program is built once. Raises `ProgramError`."""
    roles = roles_of(request)
    numbers: dict[Hashable, int] = {}
    codes: list[Code] = []
    which = np.empty(request.n, np.int32)
    built: set[int] = set()
    for rank, role in enumerate(roles):
        if role.key not in numbers:
            numbers[role.key] = len(codes)
            codes.append(code_of(request, rank, role))
            built.add(rank)
        which[rank] = numbers[role.key]
    for rank in random.Random(request.n).sample(range(request.n), min(CHECKED_RANKS, request.n)):
        if rank not in built and not np.array_equal(code_of(request, rank, roles[rank]), codes[which[rank]]):
            raise ProgramError(f"{request}: rank {rank} has another program than the ranks of its kind")
    return ScaleSchedule(codes, which, *_neighbours(roles))


def code_of(request: Request, rank: int, role: Roles) -> Code:
    """The part of a rank's program that decides its time: neighbours for ranks, and neither chunks nor slots.

    Raises `ProgramError` if the program has a peer that is no neighbour.
    """
    # Not `build`: a group of memory has few ranks, and a simulated one many.
    algorithm = ALGORITHMS[request.operation, request.algorithm]
    encoding = encode(algorithm.build(request, rank))
    if algorithm.sends is not None:
        encoding = np.concatenate([_meeting(request, rank, encoding), encoding])
        for column in (FIRST, SECOND):  # it is here by now
            encoding[encoding[:, column + 1] == PUB, column] = rank
    numbers = np.full(request.n, request.n, np.int32)
    numbers[role.neighbours] = np.arange(len(role.neighbours), dtype=np.int32)
    numbers[rank] = OWN
    kind = encoding[:, 0]
    code = np.zeros_like(encoding)
    code[:, 0], code[:, COUNT] = kind, encoding[:, COUNT]
    for column, kinds in (
        (PEER, (PUT_CODE, NOTIFY_CODE, WAIT_CODE)),
        (FIRST, (PUT_CODE, REDUCE_CODE, COPY_CODE, FINISH_CODE)),
        (SECOND, (REDUCE_CODE,)),
    ):
        code[:, column] = np.where(np.isin(kind, kinds), numbers[encoding[:, column]], OWN)
        if (code[:, column] == request.n).any():
            raise ProgramError(f"{request}: rank {rank} has a peer that is none of its neighbours")
    return code


def _meeting(request: Request, rank: int, encoding: Code) -> Code:
    """Return an eager operation's messages: a put for each chunk sent, a wait for each rank that is read."""
    sends = ALGORITHMS[request.operation, request.algorithm].sends
    assert sends is not None, "it is eager"
    rows: list[tuple[int, int, int]] = []
    for peer in peers_after(rank, request.n):
        rows += [(PUT_CODE, peer, 0)] * len(sends(request, rank, peer))
    read = {
        int(owner) for column in (FIRST, SECOND) for owner in encoding[encoding[:, column + 1] == PUB, column]
    }
    rows += [
        (WAIT_CODE, peer, len(sends(request, peer, rank)))
        for peer in peers_after(rank, request.n)
        if peer in read
    ]
    meeting = np.zeros((len(rows), ENCODING_WIDTH), np.int32)
    if rows:
        meeting[:, 0], meeting[:, PEER], meeting[:, COUNT] = np.array(rows, np.int32).T
    meeting[:, FIRST] = rank
    return meeting


def _neighbours(roles: list[Roles]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Return (first, peers, back), see `Timeline`."""
    n = len(roles)
    counts = np.array([len(role.neighbours) for role in roles], np.int64)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    peers = np.concatenate([role.neighbours for role in roles]).astype(np.int32)
    ranks = np.repeat(np.arange(n, dtype=np.int64), counts)
    order = np.argsort(ranks * n + peers)
    # Sorted by (neighbour, rank), pairs come in the order of the same pairs the other way round.
    mirrored = np.argsort(peers.astype(np.int64) * n + ranks)
    if not np.array_equal(peers[order], ranks[mirrored]) or not np.array_equal(ranks[order], peers[mirrored]):
        raise ProgramError("a rank is not the neighbour of one of its neighbours")
    back = np.empty(len(peers), np.int32)
    back[mirrored] = order - first[ranks[order]]
    return first, peers, back


AT_SCALE: Final[Mapping[Operation, tuple[str, ...]]] = MappingProxyType(
    {
        Operation.ALL_REDUCE: (
            "ring",
            "tree",
            "double_tree",
            "hierarchical",
            "hierarchical_tree",
            "direct",
            "eager",
        ),
        Operation.ALL_GATHER: ("ring", "direct", "eager"),
        Operation.REDUCE_SCATTER: ("ring", "direct", "eager"),
        Operation.BROADCAST: ("tree", "direct", "eager"),
        Operation.REDUCE: ("tree", "direct", "eager"),
        Operation.GATHER: ("direct", "eager"),
        Operation.SCATTER: ("direct", "eager"),
        Operation.ALL_TO_ALL: ("bruck", "direct", "eager"),
        Operation.BARRIER: ("dissemination",),
    }
)
"""The algorithms that are simulated of each operation."""


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """`neighbours`: each once, int32. `key`: equal for ranks with equal programs."""

    neighbours: NDArray[np.int32]
    key: Hashable


def check_at_scale(operation: Operation, algorithm: str) -> None:
    """Raise `ProgramError` if the algorithm is not simulated."""
    known = AT_SCALE.get(operation, ())
    if algorithm not in known:
        raise ProgramError(
            f"{operation.name.lower()} by {algorithm!r} is not simulated at scale; "
            f"choose from {', '.join(known) or 'another operation'}"
        )


def is_eager(request: Request) -> bool:
    """Return whether inputs travel with the descriptors."""
    return ALGORITHMS[request.operation, request.algorithm].eager


def is_pairwise(request: Request) -> bool:
    """Return whether every rank exchanges something with every other."""
    return request.algorithm in ("direct", "eager") and request.operation not in ROOTED


def folds_in_rank_order(request: Request) -> bool:
    """Return whether all read the others' memory in rank order: no two programs are equal then."""
    reduces = request.operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    return reduces and request.algorithm == "direct"


def roles_of(request: Request) -> list[Roles]:
    """Return the roles of all ranks. Raises `ProgramError` for what is not simulated at scale."""
    check_at_scale(request.operation, request.algorithm)
    n = request.n
    if is_pairwise(request):
        own_kind = folds_in_rank_order(request)
        ahead = np.arange(1, n, dtype=np.int32)
        return [Roles((rank + ahead) % n, rank if own_kind else ()) for rank in range(n)]
    match request.algorithm:
        case "direct" | "eager":
            return _around_root(request)
        case "ring":
            return [_distinct([(rank + 1) % n, (rank - 1) % n], ()) for rank in range(n)]
        case "bruck" | "dissemination":
            return [_distinct(_distances(rank, n), ()) for rank in range(n)]
        case "tree" if request.operation is Operation.REDUCE:
            return _to_root(request)
        case "tree":
            return _of_trees((balanced_tree(n, request.root),))
        case "double_tree":
            return _of_trees(two_trees(n))
        case _:
            return _over_hosts(request)


def _distinct(neighbours: Iterable[int], key: tuple[Hashable, ...]) -> Roles:
    """A rank that is a neighbour twice counts once, and makes another key."""
    named = list(neighbours)
    places = {peer: i for i, peer in enumerate(dict.fromkeys(named))}
    return Roles(np.array(list(places), np.int32), (*key, tuple(places[peer] for peer in named)))


def _distances(rank: int, n: int) -> list[int]:
    ways = [(rank + way * (1 << k)) % n for k in range((n - 1).bit_length()) for way in (1, -1)]
    return [peer for peer in ways if peer != rank]


def _around_root(request: Request) -> list[Roles]:
    n, root = request.n, request.root
    others = (root + np.arange(1, n, dtype=np.int32)) % n
    to_root = np.array([root], np.int32)
    return [Roles(others, "root") if rank == root else Roles(to_root, "other") for rank in range(n)]


def _to_root(request: Request) -> list[Roles]:
    """Up a tree; and the root tells all when it is done."""
    tree, root = balanced_tree(request.n, request.root), request.root
    roles: list[Roles] = []
    for rank in range(request.n):
        near, place = _in_tree(tree, rank)
        also = [peer for peer in range(request.n) if peer != rank] if rank == root else [root]
        roles.append(_distinct([*near, *also], (place,)))
    return roles


def _of_trees(trees: tuple[BinaryTree, ...]) -> list[Roles]:
    depths = [_depths(tree) for tree in trees]
    roles: list[Roles] = []
    for rank in range(len(trees[0].parents)):
        places = [_in_tree(tree, rank) for tree in trees]
        neighbours = [peer for peers, _ in places for peer in peers]
        key = (tuple(key for _, key in places), tuple(depth[rank] for depth in depths))
        roles.append(_distinct(neighbours, key))
    return roles


def _in_tree(tree: BinaryTree, node: int) -> tuple[list[int], tuple[int, int]]:
    """The nodes above and below, and the key: which child it is (-1: the root), and how many it has."""
    parent, children = tree.parents[node], tree.children[node]
    if parent < 0:
        return [*children], (-1, len(children))
    return [parent, *children], (tree.children[parent].index(node), len(children))


def _depths(tree: BinaryTree) -> list[int]:
    depths, level, depth = [0] * len(tree.parents), [tree.root], 0
    while level:
        for node in level:
            depths[node] = depth
        level, depth = [child for node in level for child in tree.children[node]], depth + 1
    return depths


def _over_hosts(request: Request) -> list[Roles]:
    hosts = hosts_of(request.n, request.hosts)
    slices, count = min(map(len, hosts)), len(hosts)
    tree = balanced_tree(count)
    depths = _depths(tree)
    roles: dict[int, Roles] = {}
    for h, host in enumerate(hosts):
        for i, rank in enumerate(host):
            between: list[int] = []
            key: tuple[Hashable, ...] = (len(host), i)
            if i < slices and count > 1 and request.algorithm == "hierarchical":
                between = [hosts[(h + way) % count][i] for way in (1, -1)]
            elif i < slices and count > 1:
                nodes, place = _in_tree(tree, h)
                between, key = [hosts[node][i] for node in nodes], (*key, place, depths[h])
            roles[rank] = _distinct([*between, *(peer for peer in host if peer != rank)], key)
    return [roles[rank] for rank in range(request.n)]
