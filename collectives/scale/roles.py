"""A rank's neighbours in an algorithm, in an order that ranks with equal programs share.

At thousands of ranks most programs differ in the names of the neighbours alone. `roles_of` gives for every
rank its neighbours, and a key: ranks of equal keys have equal programs once neighbours are numbered by their
place among the roles. That this is so is tested for all ranks of small groups, and for some ranks of each
schedule that is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, ROOTED, Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.reduction_trees import BinaryTree, balanced_tree, two_trees
from zbmd.collectives.errors import ProgramError

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
    """Raise `ProgramError` if that is not simulated."""
    known = AT_SCALE.get(operation, ())
    if algorithm not in known:
        raise ProgramError(
            f"{operation.name.lower()} by {algorithm!r} is not simulated at scale; "
            f"choose from {', '.join(known) or 'another operation'}"
        )


def is_eager(request: Request) -> bool:
    """Whether inputs travel with the descriptors."""
    return ALGORITHMS[request.operation, request.algorithm].eager


def is_pairwise(request: Request) -> bool:
    """Whether every rank exchanges something with every other."""
    return request.algorithm in ("direct", "eager") and request.operation not in ROOTED


def folds_in_rank_order(request: Request) -> bool:
    """Whether all read the others' memory in the order of the ranks: no two programs are equal then."""
    reduces = request.operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    return reduces and request.algorithm == "direct"


def roles_of(request: Request) -> list[Roles]:
    """Of all ranks. Raises `ProgramError` for what is not simulated at scale."""
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
    """Who is a neighbour twice counts once, and makes another key."""
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
