"""Views, changes, quorums, who observes whom, and the trees of rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.cluster.membership.reports import Reports
from zbmd.actors.cluster.membership.rounds import FAN_OUT, Acceptor, Round, overlay_of, tree_of
from zbmd.actors.cluster.messages import Accepted, Ballot, MemberReport, RoundPhase, RoundReply, RoundRequest
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import OBSERVERS_MAX, ClusterView, ViewChange, quorum
from zbmd.transport.errors import LocalProtocolError


def view_of(size: int, epoch: int = 1) -> ClusterView:
    return ClusterView(epoch=epoch, nodes=tuple(Node(NodeKey(i, 1)) for i in range(size)))


@given(st.integers(1, 9), st.data())
def test_two_parts_that_may_decide_share_a_member(size: int, data: st.DataObject) -> None:
    view = view_of(size)
    part = data.draw(st.sets(st.sampled_from(view.ids)))
    other = data.draw(st.sets(st.sampled_from(view.ids)))
    if quorum(view, part).holds and quorum(view, other).holds:
        assert part & other


@given(st.integers(1, 9), st.data())
def test_one_of_two_parts_may_always_decide(size: int, data: st.DataObject) -> None:
    view = view_of(size)
    part = data.draw(st.sets(st.sampled_from(view.ids)))
    assert quorum(view, part).holds != quorum(view, set(view.ids) - part).holds


def test_all_who_are_not_proven_dead_may_decide() -> None:
    view = view_of(3)
    assert not quorum(view, {2}).holds
    assert not quorum(view, {2}, proven={0}).holds
    assert quorum(view, {2}, proven={0, 1}).holds
    assert "1 of the 3 members of view 1 are here, 2 are needed" in quorum(view, {2}).reason


def test_a_change_must_follow_from_the_view() -> None:
    view = view_of(3)
    back = Node(NodeKey(1, 2))
    after = view.after(ViewChange(epoch=2, removed=(NodeKey(1, 1),), added=(back,)))
    assert after.holds(back.key) and not after.holds(NodeKey(1, 1)) and after.ids == (0, 1, 2)
    for wrong in (
        ViewChange(epoch=3),
        ViewChange(epoch=2, removed=(NodeKey(1, 2),)),
        ViewChange(epoch=2, added=(back,)),
    ):
        with pytest.raises(LocalProtocolError):
            view.after(wrong)


@pytest.mark.parametrize("size", [1, 2, 5, OBSERVERS_MAX + 1, OBSERVERS_MAX + 2, 500])
def test_everybody_is_observed_by_a_few_others(size: int) -> None:
    view = view_of(size)
    overlay = overlay_of(view)
    for node_id in view.ids:
        observers = overlay.observers[node_id]
        assert node_id not in observers
        assert min(size - 1, 1) <= len(observers) <= OBSERVERS_MAX
        assert all(node_id in overlay.subjects[observer] for observer in observers)
        assert len(overlay.subjects[node_id]) <= OBSERVERS_MAX
    if size <= OBSERVERS_MAX + 1:
        assert all(len(observers) == size - 1 for observers in overlay.observers.values())


@given(st.integers(1, 700), st.data())
def test_a_tree_reaches_each_once(size: int, data: st.DataObject) -> None:
    view = view_of(size)
    root = data.draw(st.sampled_from(view.ids))
    excluded = tuple(sorted(data.draw(st.sets(st.sampled_from(view.ids), max_size=5)) - {root}))
    tree = tree_of(view, root, excluded)
    asked = [root, *(child for node_id in tree.ids for child in tree.children(node_id))]
    assert sorted(asked) == sorted(set(view.ids) - set(excluded))
    for node_id in tree.ids:
        below = {node_id}.union(*(tree.below(child) for child in tree.children(node_id)))
        assert below == set(tree.below(node_id))
        assert len(tree.children(node_id)) <= FAN_OUT


def ask(size: int) -> tuple[Round, RoundRequest]:
    view = view_of(size)
    cast = RoundRequest(
        phase=RoundPhase.PREPARE, epoch=1, ballot=Ballot(1, 0), root=NodeKey(0, 1), excluded=()
    )
    return Round(cast, tree_of(view, 0, ()), 0, None, 0), cast


def echo(cast: RoundRequest, **fields: object) -> RoundReply:
    return RoundReply(phase=cast.phase, epoch=cast.epoch, ballot=cast.ballot, **fields)  # type: ignore[arg-type]


def test_a_round_merges_what_comes_up() -> None:
    asked, cast = ask(40)
    old = Accepted(ballot=Ballot(0, 0), change=ViewChange(epoch=2))
    new = Accepted(ballot=Ballot(3, 2), change=ViewChange(epoch=2, removed=(NodeKey(5, 1),)))
    asked.answer(accepted=old)
    assert asked.echo_of(1, echo(cast, accepted=new, missing=(20,)))
    assert not asked.echo_of(1, echo(cast)), "an answer counts once"
    assert not asked.echo_of(2, RoundReply(phase=cast.phase, epoch=9, ballot=cast.ballot)), "of another round"
    asked.give_up()
    assert asked.result.accepted == new
    assert asked.present() == {0, 1} | (set(asked.tree.below(1)) - {20})


def test_an_acceptor_keeps_its_word() -> None:
    acceptor, change = Acceptor(), ViewChange(epoch=2)
    assert acceptor.accept(Ballot(0, 4), change) is None
    assert acceptor.prepare(Ballot(2, 1)) is None
    assert acceptor.accept(Ballot(1, 7), ViewChange(epoch=2, removed=(NodeKey(1, 1),))) == Ballot(2, 1)
    assert acceptor.accepted == Accepted(ballot=Ballot(0, 4), change=change)
    assert acceptor.accept(Ballot(2, 1), change) is None


def test_a_member_is_removed_once_most_have_suspected_it_for_long_enough() -> None:
    view = view_of(4)
    key = view.nodes[3].key
    accuse, acquit = MemberReport(epoch=1, down=(key,)), MemberReport(epoch=1)
    reports = Reports(view, stand_ns=100)
    for reporter, at_ns in ((0, 1_000), (1, 1_050)):
        assert reports.take(view.nodes[reporter].key, accuse, now_ns=at_ns)
    assert reports.take(view.nodes[0].key, accuse, now_ns=1_090)  # told again: since when it stands, stays
    assert reports.down() == {3}
    assert reports.ripe_ns(1_090) == 1_100 and reports.ripe_ns(1_100) == 1_150
    assert reports.change(now_ns=1_149) is None and not reports.settled(now_ns=1_149)
    change = reports.change(now_ns=1_150)
    assert change is not None and change.removed == (key,) and reports.settled(now_ns=1_150)
    reports.doubt(1_200)  # we were cut off ourselves
    assert reports.change(now_ns=1_299) is None and reports.change(now_ns=1_300) is not None
    assert not reports.take(view.nodes[1].key, acquit, now_ns=1_300)
    assert reports.change(now_ns=1_300) is None and not reports.settled(now_ns=1_400)
    reports.take(view.nodes[1].key, accuse, now_ns=1_350)  # once taken back it begins again
    assert reports.change(now_ns=1_449) is None and reports.change(now_ns=1_450) is not None
