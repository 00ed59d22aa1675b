"""What the jobs of a node need of its membership, and what they are told."""

from __future__ import annotations

from typing import Protocol

from zbmd.actors.cluster.jobs.table import Order
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.cluster.view import ClusterView
from zbmd.actors.contracts import Contract


class ClusterListener(Protocol):
    """Hears of the cluster. Called on the loop, in the order in which things happen; must not block."""

    def began(self, me: Node) -> None:
        """A life of this node begins: what follows is about this one."""
        ...

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """This node acts on a view: every member of it knows it."""
        ...

    def received(self, sender: NodeKey, message: Contract) -> None:
        """A message of another node's life for the jobs (`cluster.jobs.contracts`)."""
        ...

    def stopped(self, reason: str) -> None:
        """This life is over: nothing that it ran may go on. Another one may begin."""
        ...


class ClusterPort(Protocol):
    """A node of a cluster as its jobs see it. Used from the loop's thread."""

    @property
    def me(self) -> Node:
        """This node's life."""
        ...

    @property
    def view(self) -> ClusterView:
        """The view that it acts on; of epoch 0 while there is none."""
        ...

    def command(self, order: Order) -> int:
        """Have the members agree on an order, however long that takes: it is repeated until they have.

        Returns its number: once `view.jobs.applied(me.key)` has reached it, it is done, or was refused
        (`view.jobs.refusal`). Raises `CommandRefused` if nobody would take it.
        """
        ...

    def send(self, to: NodeKey, message: Contract) -> None:
        """Tell another member, in the order of calls; dropped if that life is gone."""
        ...

    def listen(self, listener: ClusterListener) -> None:
        """Tell `listener` from now on, first of the life and the view that there are."""
        ...
