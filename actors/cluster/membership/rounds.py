"""Rounds and the overlay that they travel on: a question goes down a tree of nodes, merged answers come up.

Every node passes the question on to its children, and answers for all nodes below it once they have
answered or its time is up: those that have not answered by then are missing. So a round costs a node at
most `FAN_OUT` messages, whatever the size of the cluster.

Every node is observed by at most `OBSERVERS_MAX` others, its successors in that many random circles over
the members, and observes as many: failures are found at a cost that does not grow with the cluster, and no
set of nodes is observed by only a few. After Suresh et al., "Stable and Consistent Membership at Scale with
Rapid" (USENIX ATC 2018). In small views everybody observes everybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from zbmd.actors.cluster.heartbeats.detector import beat_ns
from zbmd.actors.cluster.messages import Accepted, Ballot, RoundReply, RoundRequest
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import OBSERVERS_MAX, ClusterView, ViewChange, _Shared
from zbmd.transport.clock.deadlines import Deadlines

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

    def accept(self, ballot: Ballot, change: ViewChange) -> Ballot | None:
        """Accept the change; return the newer ballot that stands in the way, if any."""
        refused = self.prepare(ballot)
        if refused is None:
            self.accepted = Accepted(ballot=ballot, change=change)
        return refused


class Round:
    """One node's part in one round. `parent` is None at the root."""

    def __init__(
        self, cast: RoundRequest, tree: Tree, own_id: int, parent: Node | None, deadline_ns: int
    ) -> None:
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

    def echo_of(self, child: int, echo: RoundReply) -> bool:
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
    def result(self) -> RoundReply:
        """The merged answers."""
        return RoundReply(
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


# --- timeouts of the machine, from the deadlines of the cluster, and its agenda of named timers ---------


class Agenda:
    """Deadlines of a machine by name, in ns, behind one timer. Each is due once."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self.next_ns: int | None = None
        """When the next entry is due."""

    def put(self, what: str, at_ns: int) -> None:
        """Set an entry's time."""
        self._due[what] = at_ns
        self._look()

    def put_by(self, what: str, at_ns: int) -> None:
        """Set an entry's time, unless an earlier one is set."""
        self.put(what, min(at_ns, self._due.get(what, at_ns)))

    def drop(self, *names: str) -> None:
        """Remove entries."""
        for what in names:
            self._due.pop(what, None)
        self._look()

    def clear(self) -> None:
        """Remove all entries."""
        self._due.clear()
        self._look()

    def take(self, now_ns: int) -> list[str]:
        """Remove and return what is due, the oldest first."""
        due = sorted((at_ns, what) for what, at_ns in self._due.items() if at_ns <= now_ns)
        for _, what in due:
            del self._due[what]
        self._look()
        return [what for _, what in due]

    def _look(self) -> None:
        self.next_ns = min(self._due.values(), default=None)


QUICK_SHARE = 20
"""Commands and leaves, which nobody else reports, wait only for this share of an agreement's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """All in ns; those of deaths are indexed by whether the view has a job, as the beat interval is."""

    round_ns: int
    """For the answers to one round."""
    retry_ns: int
    batch_ns: int
    """For further reports other than deaths."""
    quick_ns: int
    deaths_ns: tuple[int, int]
    """All observers of a death notice it within a beat, and of deaths that come together. So do those who
    have missed one who lives hear it again, and say so: for that long a suspicion has to stand."""
    settle_ns: tuple[int, int]
    """At most, until the observers of a suspect agree."""
    lonely_ns: int
    """Without reaching a quorum."""
    join_ns: int


def waits_of(deadlines: Deadlines) -> Waits:
    """Derive the timeouts."""
    latency_ns = deadlines.heartbeat_ns // 2
    calm_ns, busy_ns = beat_ns(deadlines, busy=False), beat_ns(deadlines, busy=True)
    return Waits(
        round_ns=deadlines.agreement_ns,
        retry_ns=deadlines.agreement_ns,
        batch_ns=deadlines.heartbeat_ns,
        quick_ns=max(1, deadlines.agreement_ns // QUICK_SHARE),
        deaths_ns=(calm_ns + latency_ns, busy_ns + latency_ns),
        settle_ns=(2 * calm_ns + latency_ns, 2 * busy_ns + latency_ns),
        lonely_ns=deadlines.recovery_budget_ns,
        join_ns=deadlines.view_ns,
    )
