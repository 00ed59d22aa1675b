"""How one node sees each member of the view that it knows."""

from __future__ import annotations

from zbmd.actors.cluster.node_contracts import MemberInfo
from zbmd.actors.cluster.node_life import NodeLife
from zbmd.actors.cluster.nodes import Node
from zbmd.transport._native import now_ns


def member_infos(life: NodeLife) -> tuple[MemberInfo, ...]:
    """The members, by id."""
    return tuple(_info(life, node) for node in life.machine.view.nodes)


def _info(life: NodeLife, node: Node) -> MemberInfo:
    key, own = node.key, node.key == life.me.key
    heard_ns, limit_ns = life.detector.silence(key, now_ns())
    dialed, accepted, why = life.links.links(key)
    hail, skew_ns = life.hails.get(key, (None, 0))
    if own:
        state = "this node"
    elif heard_ns is None:
        state = "not observed"
    else:
        state = "silent" if heard_ns >= limit_ns else "heard"
    return MemberInfo(
        node=node,
        state=state,
        heard_ms=-1 if heard_ns is None else heard_ns // 1_000_000,
        limit_ms=-1 if heard_ns is None else limit_ns // 1_000_000,
        links_dialed=dialed,
        links_accepted=accepted,
        skew_ms=round(skew_ns / 1e6),
        release=hail.release if hail is not None else "",
        proven_by_kernel=life.deaths.watches(key),
        why="" if own or dialed or accepted else why[:1000],
    )
