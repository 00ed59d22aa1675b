"""A question that travels down a tree of nodes, and the answers that come up merged.

Every node hands the question on to its children, and answers for all below it once they have, or when its
time is up: who has not answered by then is missing. So a round costs a node `FAN_OUT` messages at most,
whatever the size of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbmd.actors.cluster.membership.overlay import Tree
from zbmd.actors.cluster.messages import Accepted, Ballot, Cast, Echo
from zbmd.actors.cluster.node_id import Node


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
        """Merge an answer: our own, or that of a child and all below it."""
        self._missing.update(missing)
        if accepted is not None and (self._accepted is None or self._accepted.ballot < accepted.ballot):
            self._accepted = accepted
        if refused is not None and (self._refused is None or self._refused < refused):
            self._refused = refused

    def echo_of(self, child: int, echo: Echo) -> bool:
        """Take a child's answer; False if it is to another round, or was given before."""
        asked = self.cast
        if (echo.phase, echo.epoch, echo.ballot) != (asked.phase, asked.epoch, asked.ballot):
            return False
        if child not in self.waiting:
            return False
        self.waiting.discard(child)
        self.answer(missing=echo.missing, accepted=echo.accepted, refused=echo.refused)
        return True

    def give_up(self) -> None:
        """Time is up: all below the children who have not answered are missing."""
        for child in self.waiting:
            self._missing.update(self.tree.below(child))
        self.waiting.clear()

    @property
    def result(self) -> Echo:
        """What has come together."""
        return Echo(
            phase=self.cast.phase,
            epoch=self.cast.epoch,
            ballot=self.cast.ballot,
            missing=tuple(sorted(self._missing)),
            accepted=self._accepted,
            refused=self._refused,
        )

    def present(self) -> frozenset[int]:
        """The ids of all in the tree who answered."""
        return (
            frozenset(self.tree.ids) - self._missing - {n for c in self.waiting for n in self.tree.below(c)}
        )
