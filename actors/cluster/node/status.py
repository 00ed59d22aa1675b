"""How one node sees the members of the view that it knows, and the jobs in it."""

from __future__ import annotations

from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.node.contracts import JobInfo, MemberInfo, RankInfo
from zbmd.actors.cluster.node.incarnation import Incarnation
from zbmd.actors.cluster.state.job_table import RankEntry
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView


def member_infos(incarnation: Incarnation) -> tuple[MemberInfo, ...]:
    """The members, by id."""
    return tuple(_info(incarnation, node) for node in incarnation.machine.view.nodes)


def job_infos(view: ClusterView, only: int) -> tuple[JobInfo, ...]:
    """The jobs of a view, or the one job of that id."""
    found = [job for job in view.jobs.jobs if only in (0, job.id)]
    return tuple(
        JobInfo(
            job=job.id,
            target=job.spec.target[:TEXT_CHARS_MAX],
            phase=job.phase.value,
            reason=job.reason,
            outcome="" if job.outcome is None else job.outcome.value,
            submitter=_called(view, job.submitter),
            epoch=job.epoch,
            restarts=job.restarts_total,
            nodes_min=job.spec.nodes_min,
            nodes_max=job.spec.nodes_max,
            ranks=tuple(_rank(view, entry) for entry in job.ranks),
        )
        for job in found
    )


def _rank(view: ClusterView, entry: RankEntry) -> RankInfo:
    node = None if entry.node is None else view.by_id.get(entry.node.id)
    return RankInfo(
        rank=entry.rank,
        state=entry.state.value,
        incarnation=entry.incarnation,
        node="" if entry.node is None else _called(view, entry.node),
        address="" if node is None or node.key != entry.node else node.address,
    )


def _called(view: ClusterView, key: NodeKey) -> str:
    node = view.by_id.get(key.id)
    return (node.name if node is not None and node.key == key else "") or str(key)


def _info(incarnation: Incarnation, node: Node) -> MemberInfo:
    key, own = node.key, node.key == incarnation.me.key
    heard_ns, limit_ns = incarnation.beats.silence(key)
    dialed, accepted, why = incarnation.links.links(key)
    hail, skew_ns = incarnation.hails.get(key, (None, 0))
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
        proven_by_kernel=incarnation.deaths.watches(key),
        why="" if own or dialed or accepted else why[:1000],
    )
