"""A rank's neighbours in an algorithm, in an order that ranks with equal programs share.

At thousands of ranks most programs differ in the names of the neighbours alone. `roles_of` gives for every
rank its neighbours, and a key: ranks of equal keys have equal programs once neighbours are numbered by their
place among the roles. That this is so is tested for all ranks of small groups, and for some ranks of each
schedule that is made.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from zbmd.collectives.algorithms import Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.reduction_trees import BinaryTree, balanced_tree, two_trees
from zbmd.collectives.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Roles:
    """`neighbours`: each once. `key`: equal for ranks with equal programs."""

    neighbours: tuple[int, ...]
    key: Hashable


def roles_of(request: Request) -> list[Roles]:
    """Of all ranks. Raises `ProgramError` for an algorithm that is not simulated at scale."""
    n, name = request.n, request.algorithm
    if request.operation is Operation.BARRIER:
        return [_distinct(_distances(rank, n), ()) for rank in range(n)]
    if request.operation is Operation.ALL_REDUCE:
        match name:
            case "ring":
                return [_distinct([(rank + 1) % n, (rank - 1) % n], ()) for rank in range(n)]
            case "tree":
                return _of_trees((balanced_tree(n),))
            case "double_tree":
                return _of_trees(two_trees(n))
            case "hierarchical" | "hierarchical_tree":
                return _over_hosts(request)
            case _:
                pass
    raise ProgramError(
        f"{request.operation.name.lower()} by {name!r} is not simulated at scale; "
        f"choose from {', '.join(AT_SCALE)}"
    )


AT_SCALE = ("ring", "tree", "double_tree", "hierarchical", "hierarchical_tree")
"""Algorithms of all-reduce."""


def _distinct(neighbours: list[int], key: tuple[Hashable, ...]) -> Roles:
    """Who is a neighbour twice counts once, and makes another key."""
    places = {peer: i for i, peer in enumerate(dict.fromkeys(neighbours))}
    return Roles(tuple(places), (*key, tuple(places[peer] for peer in neighbours)))


def _distances(rank: int, n: int) -> list[int]:
    ways = [(rank + way * (1 << k)) % n for k in range((n - 1).bit_length()) for way in (1, -1)]
    return [peer for peer in ways if peer != rank]


def _of_trees(trees: tuple[BinaryTree, ...]) -> list[Roles]:
    roles: list[Roles] = []
    for rank in range(len(trees[0].parents)):
        places = [_in_tree(tree, rank) for tree in trees]
        neighbours = [peer for peers, _ in places for peer in peers]
        roles.append(_distinct(neighbours, tuple(key for _, key in places)))
    return roles


def _in_tree(tree: BinaryTree, node: int) -> tuple[list[int], tuple[int, int]]:
    """The nodes above and below, and the key: which child it is (-1: the root), and how many it has."""
    parent, children = tree.parents[node], tree.children[node]
    if parent < 0:
        return [*children], (-1, len(children))
    return [parent, *children], (tree.children[parent].index(node), len(children))


def _over_hosts(request: Request) -> list[Roles]:
    hosts = hosts_of(request.n, request.hosts)
    slices, count = min(map(len, hosts)), len(hosts)
    tree = balanced_tree(count)
    roles: list[Roles | None] = [None] * request.n
    for h, host in enumerate(hosts):
        for i, rank in enumerate(host):
            between: list[int] = []
            key: tuple[Hashable, ...] = (len(host), i)
            if i < slices and count > 1 and request.algorithm == "hierarchical":
                between = [hosts[(h + way) % count][i] for way in (1, -1)]
            elif i < slices and count > 1:
                nodes, place = _in_tree(tree, h)
                between, key = [hosts[node][i] for node in nodes], (*key, place)
            roles[rank] = _distinct([*between, *(peer for peer in host if peer != rank)], key)
    return [role for role in roles if role is not None]
