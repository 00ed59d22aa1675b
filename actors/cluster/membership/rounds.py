"""A round: a question that travels down a tree of nodes, and the answers that come up merged.

Every node passes the question on to its children, and answers for all nodes below it once they have
answered or its time is up: those that have not answered by then are missing. So a round costs a node at
most `FAN_OUT` messages, whatever the size of the cluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from zbmd.actors.cluster.messages import Accepted, Ballot, Cast, Echo
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import OBSERVERS_MAX, Change, ClusterView, _Shared

# --- who observes whom in a view, and the tree along which a round travels ------------------------------
#
# Every node is observed by at most `OBSERVERS_MAX` others, its successors in that many random circles over
# the members, and observes as many: failures are found at a cost that does not grow with the cluster, and
# no set of nodes is observed by only a few. After Suresh et al., "Stable and Consistent Membership at Scale
# with Rapid" (USENIX ATC 2018). In small views everybody observes everybody.


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


class Acceptor:
    """One member's Paxos acceptor for what follows one view.

    Single-decree Paxos (Lamport, "Paxos made simple", 2001), one decree for each view, with the quorums of
    `view.quorum`. An incarnation that ends never returns under the same key, so nothing is kept on disk.
    """

    def __init__(self) -> None:
        self.promised: Ballot | None = None
        self.accepted: Accepted | None = None

    def prepare(self, ballot: Ballot) -> Ballot | None:
        """Promise to take no older ballot; return the newer ballot that stands in the way, if any."""
        if self.promised is not None and ballot < self.promised:
            return self.promised
        self.promised = ballot
        return None

    def accept(self, ballot: Ballot, change: Change) -> Ballot | None:
        """Accept the change; return the newer ballot that stands in the way, if any."""
        refused = self.prepare(ballot)
        if refused is None:
            self.accepted = Accepted(ballot=ballot, change=change)
        return refused


class Round:
    """One node's part in one round. `parent` is None at the root."""

    def __init__(self, cast: Cast, tree: Tree, own_id: int, parent: Node | None, deadline_ns: int) -> None:
        self.cast = cast
        self.tree = tree
        self.parent = parent
        self.deadline_ns = deadline_ns
        self.waiting = set(tree.children(own_id))
        self._missing: set[int] = set()
        self._accepted: Accepted | None = None
        self._refused: Ballot | None = None

    def answer(
        self,
        *,
        missing: Iterable[int] = (),
        accepted: Accepted | None = None,
        refused: Ballot | None = None,
    ) -> None:
        """Merge an answer: this node's, or a child's for all below it."""
        self._missing.update(missing)
        if accepted is not None and (self._accepted is None or self._accepted.ballot < accepted.ballot):
            self._accepted = accepted
        if refused is not None and (self._refused is None or self._refused < refused):
            self._refused = refused

    def echo_of(self, child: int, echo: Echo) -> bool:
        """Take a child's answer; return False if it belongs to another round or is a duplicate."""
        asked = self.cast
        if (echo.phase, echo.epoch, echo.ballot) != (asked.phase, asked.epoch, asked.ballot):
            return False
        if child not in self.waiting:
            return False
        self.waiting.discard(child)
        self.answer(missing=echo.missing, accepted=echo.accepted, refused=echo.refused)
        return True

    def give_up(self) -> None:
        """Give up waiting: all nodes below children that have not answered are missing."""
        for child in self.waiting:
            self._missing.update(self.tree.below(child))
        self.waiting.clear()

    @property
    def result(self) -> Echo:
        """The merged answers."""
        return Echo(
            phase=self.cast.phase,
            epoch=self.cast.epoch,
            ballot=self.cast.ballot,
            missing=tuple(sorted(self._missing)),
            accepted=self._accepted,
            refused=self._refused,
        )

    def present(self) -> frozenset[int]:
        """Return the ids of all nodes in the tree that answered."""
        return (
            frozenset(self.tree.ids) - self._missing - {n for c in self.waiting for n in self.tree.below(c)}
        )
