"""Whether a node may join as it is, as the door sees it: said before it knocks, in words (sans-I/O)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from zbmd.actors.cluster.node_id import Node
from zbmd.actors.cluster.view import ClusterView
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_VARIABLE, format_duration
from zbmd.transport.tcp.address import TcpAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a node says of itself before it joins.

    host: numeric, where it would be dialed; recovery_budget_ns: 0 to take the cluster's; witnessed: whether
    it asks a witness who may go on with half of a view.
    """

    node_id: int
    name: str
    host: str
    recovery_budget_ns: int
    witnessed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a node may not join. passes: whether that may change by itself, so that it is worth another try."""

    reason: str
    passes: bool


def is_loopback(host: str) -> bool:
    """Whether a numeric host means whatever machine one is on."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def refusal(
    wish: Wish, view: ClusterView, me: Node, own_host: str, budget_ns: int, *, witnessed: bool = False
) -> Refusal | None:
    """What stands against a node, in the view that we know.

    own_host: where others dial us; budget_ns, witnessed: the cluster's.
    """
    if wish.recovery_budget_ns not in (0, budget_ns):
        ours, theirs = format_duration(budget_ns), format_duration(wish.recovery_budget_ns)
        return Refusal(
            reason=f"the cluster's recovery budget is {ours}, this node's {theirs}, and all deadlines follow "
            f"from it: leave --recovery-budget (and {RECOVERY_BUDGET_VARIABLE}) away, or give {ours}",
            passes=False,
        )
    if wish.witnessed != witnessed:
        has = "asks a witness" if witnessed else "asks no witness"
        do = "give this node the same --store" if witnessed else "leave --store away, or give it to all nodes"
        return Refusal(
            reason=f"the cluster {has} which half of it may go on, and all nodes have to do the same: {do}",
            passes=False,
        )
    if is_loopback(wish.host) and not is_loopback(own_host):
        return Refusal(
            reason=f"it would be known at {wish.host}, which on every other host means that host itself. "
            "Give --listen HOST:PORT with an address that the others reach (`ip addr` shows them); if HOST "
            f"is a name, /etc/hosts maps it to {wish.host}",
            passes=False,
        )
    for node in view.nodes:
        if wish.name and node.name == wish.name and node.id != wish.node_id:
            return Refusal(
                reason=f"{node} at {node.address} has the name {wish.name!r} already. Give --name another; "
                "if that node is dead, it loses its place in a moment",
                passes=True,
            )
    return None


def has_namesake(node: Node, view: ClusterView) -> Node | None:
    """Another member that is called as `node` is."""
    return next((n for n in view.nodes if node.name and n.name == node.name and n.id != node.id), None)


def advertised(addresses: tuple[TcpAddress, ...], towards_cluster: str | None) -> TcpAddress:
    """Of the addresses that we listen at, that which the others are told.

    towards_cluster: our end of a connection to a member, numeric; None for who founds a cluster.
    """
    outside = [address for address in addresses if not is_loopback(address.host)]
    if towards_cluster is not None and not (is_loopback(towards_cluster) and outside):
        for address in addresses:
            if address.host.partition("%")[0] == towards_cluster.partition("%")[0]:
                return address
    return (outside or list(addresses))[0]
