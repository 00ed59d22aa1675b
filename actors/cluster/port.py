"""The interface between a node's membership and what runs on the node: jobs and actors."""

from __future__ import annotations

from typing import Protocol

from zbmd.actors.cluster.state.job_table import Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract


class ClusterListener(Protocol):
    """Receives events of the cluster, in order. Called on the loop; must not block."""

    def began(self, me: Node) -> None:
        """An incarnation of this node begins; later calls are about this one."""
        ...

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """This node acts on a view that every member knows."""
        ...

    def received(self, sender: NodeKey, message: Contract) -> None:
        """A message of another node that is not about membership."""
        ...

    def stopped(self, reason: str) -> None:
        """This incarnation is over: nothing that it ran may continue. Another may begin."""
        ...


class ClusterPort(Protocol):
    """A node of a cluster as its jobs and actors see it. Use on the loop's thread."""

    @property
    def me(self) -> Node:
        """This node's incarnation."""
        ...

    @property
    def view(self) -> ClusterView:
        """The view that the node acts on; of epoch 0 while there is none."""
        ...

    def command(self, order: Order) -> int:
        """Have the members agree on an order; it is repeated until they have.

        Returns its number: once `view.jobs.applied(me.key)` reaches it, the order was applied or refused
        (`view.jobs.refusal`). Raises `CommandRefused` if it is invalid.
        """
        ...

    def send(self, to: NodeKey, message: Contract) -> None:
        """Send to another member, in order; dropped if that incarnation is gone."""
        ...

    def leave(self) -> None:
        """Leave the cluster in order."""
        ...

    def listen(self, listener: ClusterListener) -> None:
        """Call `listener` from now on, starting with the current incarnation and view."""
        ...
