"""The observers of each member of a view, and the tree along which a round travels.

Every node is observed by at most `OBSERVERS_MAX` others, its successors in that many random circles over
the members, and observes as many: failures are found at a cost that does not grow with the cluster, and no
set of nodes is observed by only a few. After Suresh et al., "Stable and Consistent Membership at Scale with
Rapid" (USENIX ATC 2018). In small views everybody observes everybody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from zbmd.actors.cluster.state.view import OBSERVERS_MAX, ClusterView, _Shared

FAN_OUT = 16
"""Children of a node in a round's tree: four levels reach 69,905 nodes."""
VIEWS_KEPT = 8
TREES_KEPT = 64


@dataclass(frozen=True)
class Overlay:
    """The observers of each member, and the members that each observes; ids ascending."""

    observers: dict[int, tuple[int, ...]]
    subjects: dict[int, tuple[int, ...]]


def overlay_of(view: ClusterView) -> Overlay:
    """Return the overlay of a view; the same on every member."""
    return _overlay(_Shared(view))


@lru_cache(maxsize=VIEWS_KEPT)
def _overlay(shared: _Shared) -> Overlay:
    view = shared.view
    found: dict[int, set[int]] = {node_id: set() for node_id in view.ids}
    if len(view.ids) <= OBSERVERS_MAX + 1:
        found = {node_id: set(view.ids) - {node_id} for node_id in view.ids}
    else:
        for circle in range(OBSERVERS_MAX):
            order = sorted(view.ids, key=lambda node_id: _place(circle, node_id))
            for here, behind in zip(order, order[1:] + order[:1], strict=True):
                found[here].add(behind)
    subjects: dict[int, list[int]] = {node_id: [] for node_id in view.ids}
    for subject in view.ids:
        for observer in found[subject]:
            subjects[observer].append(subject)
    return Overlay(
        observers={node_id: tuple(sorted(ids)) for node_id, ids in found.items()},
        subjects={node_id: tuple(ids) for node_id, ids in subjects.items()},
    )


def _place(circle: int, node_id: int) -> bytes:
    return hashlib.blake2b(f"{circle}/{node_id}".encode(), digest_size=8).digest()


@dataclass(frozen=True)
class Tree:
    """The nodes that a round asks, its root first, as a heap: node i has the children `FAN_OUT` i + 1, …"""

    ids: tuple[int, ...]
    place: dict[int, int]

    def children(self, node_id: int) -> tuple[int, ...]:
        """Return the nodes that a node passes a question on to."""
        first = FAN_OUT * self.place[node_id] + 1
        return self.ids[first : first + FAN_OUT]

    def below(self, node_id: int) -> tuple[int, ...]:
        """Return the node and all nodes below it."""
        found: list[int] = []
        begin = end = self.place[node_id]
        while begin < len(self.ids):
            found += self.ids[begin : end + 1]
            begin, end = FAN_OUT * begin + 1, FAN_OUT * (end + 1)
        return tuple(found)

    def height(self, node_id: int) -> int:
        """Return the number of levels below a node."""
        place, levels = self.place[node_id], 0
        while (place := FAN_OUT * place + 1) < len(self.ids):
            levels += 1
        return levels


def tree_of(view: ClusterView, root: int, excluded: tuple[int, ...]) -> Tree:
    """Return the tree over a view's members without the excluded; the root need not be a member."""
    return _tree(_Shared(view), root, excluded)


@lru_cache(maxsize=TREES_KEPT)
def _tree(shared: _Shared, root: int, excluded: tuple[int, ...]) -> Tree:
    out = {*excluded, root}
    ids = (root, *(node_id for node_id in shared.view.ids if node_id not in out))
    return Tree(ids=ids, place={node_id: place for place, node_id in enumerate(ids)})
