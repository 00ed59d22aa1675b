"""The address at which the ranks of all hosts find rank 0."""

from __future__ import annotations

from zbmd.actors.cluster.state.job_table import Command, JobSpec, RankDown, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange, host_of_first_rank


def test_it_is_the_host_of_rank_0_also_once_that_has_ended_and_of_the_next_if_its_host_is_gone() -> None:
    one, two = NodeKey(1, 1), NodeKey(2, 1)
    view = ClusterView(epoch=1, nodes=(Node(one, "[fe80::1]:5"), Node(two, "10.0.0.2:5")))
    assert host_of_first_rank(view, 7) == "127.0.0.1"
    spec = JobSpec(job=7, target="t", nodes_min=1, nodes_max=2)
    view = view.after(ViewChange(epoch=2, commands=(Command(origin=two, number=1, order=Submit(spec=spec)),)))
    assert host_of_first_rank(view, 7) == "fe80::1"
    down = RankDown(job=7, rank=0, incarnation=1, code=0, reason="ended")
    view = view.after(ViewChange(epoch=3, commands=(Command(origin=one, number=1, order=down),)))
    assert host_of_first_rank(view, 7) == "fe80::1"
    view = view.after(ViewChange(epoch=4, removed=(one,)))
    assert host_of_first_rank(view, 7) == "10.0.0.2"
