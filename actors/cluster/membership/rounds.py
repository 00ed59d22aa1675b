"""A round: a question that travels down a tree of nodes, and the answers that come up merged.

Every node passes the question on to its children, and answers for all nodes below it once they have
answered or its time is up: those that have not answered by then are missing. So a round costs a node at
most `FAN_OUT` messages, whatever the size of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbmd.actors.cluster.membership.overlay import Tree
from zbmd.actors.cluster.messages import Accepted, Ballot, RoundReply, RoundRequest
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import Change


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
