"""The step-commit machine: its rules one by one, and its typed errors."""

from __future__ import annotations

import dataclasses

import pytest

from zbmd.actors.view import MemberId
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.machine import CommitState, StepCommit
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError


def oracle(version: int) -> bytes:
    """The content of a version."""
    return b"version %d" % version


def machine(rank: int = 0, *, version: int = 0, known_version: int = 0) -> StepCommit:
    return StepCommit(
        rank=rank,
        version=version,
        digest=oracle(version),
        handle=b"",
        last_version=3,
        known_version=known_version,
    )


def epoch(number: int, *ranks: int) -> cm.EpochInstalled:
    return cm.EpochInstalled(
        epoch=number, members=tuple(MemberId(rank=rank, incarnation=number) for rank in ranks)
    )


def report(sender: int, number: int, version: int) -> cm.ReportReceived:
    held = cm.Held(
        version=version, digest=oracle(version), slot=0, handle=b"there", known=version, fresh=False
    )
    return cm.ReportReceived(sender=sender, epoch=number, held=held)


def test_losing_every_holder_is_said_not_papered_over() -> None:
    alone = machine(known_version=2)
    (recall,) = alone.handle(epoch(2, 0), now_ns=0)
    assert recall == cm.Recall(epoch=2, version=3, slot=1), "all may have finished and gone"
    (failed,) = alone.handle(cm.RecallEnded(epoch=2, version=3, digest=None), now_ns=0)
    assert isinstance(failed, cm.Failed) and failed.kind is cm.FailureKind.STATE_LOST
    assert alone.state is CommitState.FAILED


def test_diverging_votes_name_the_ranks() -> None:
    rank = machine()
    rank.handle(epoch(1, 0, 1), now_ns=0)
    rank.handle(report(1, 1, 0), now_ns=0)
    rank.handle(cm.StepEnded(epoch=1, version=1, digest=b"mine"), now_ns=0)
    vote = cm.VoteReceived(sender=1, epoch=1, version=1, digest=b"other", part=b"")
    (failed,) = rank.handle(vote, now_ns=0)
    assert isinstance(failed, cm.Failed) and failed.kind is cm.FailureKind.DIVERGED
    assert "rank 1" in failed.reason and b"other".hex() in failed.reason


def test_a_step_that_only_a_dead_rank_had_committed_is_run_again() -> None:
    survivor = machine(version=1, known_version=2)
    survivor.handle(epoch(1, 0), now_ns=0)
    (again,) = survivor.handle(cm.RecallEnded(epoch=1, version=3, digest=None), now_ns=0)
    assert isinstance(again, cm.RunStep) and again.version == 2


def test_who_comes_up_when_all_have_finished_and_gone_recalls_the_last_version() -> None:
    late = machine(known_version=2)
    late.handle(epoch(4, 0), now_ns=0)
    ended = late.handle(cm.RecallEnded(epoch=4, version=3, digest=oracle(3)), now_ns=0)
    assert [type(action) for action in ended] == [cm.Adopted, cm.Preserve, cm.Finished]
    assert late.version == 3


def test_nothing_is_recalled_while_a_member_has_been_along() -> None:
    late = machine(known_version=2)
    assert late.handle(epoch(4, 0, 1), now_ns=0)
    (fetch,) = late.handle(report(1, 4, 2), now_ns=0)
    assert isinstance(fetch, cm.Fetch) and fetch.version == 2


def test_a_vote_lets_a_lagging_rank_promote_instead_of_pulling() -> None:
    rank = machine(1)
    rank.handle(epoch(1, 0, 1), now_ns=0)
    rank.handle(report(0, 1, 0), now_ns=0)
    rank.handle(cm.StepEnded(epoch=1, version=1, digest=oracle(1)), now_ns=0)
    rank.handle(epoch(2, 0, 1), now_ns=0)
    actions = rank.handle(report(0, 2, 1), now_ns=0)
    assert [type(action) for action in actions] == [cm.Commit, cm.RunStep]


def test_work_is_drained_before_a_new_epoch_hears_from_us() -> None:
    rank = machine()
    rank.handle(epoch(1, 0), now_ns=0)
    assert [type(a) for a in rank.handle(epoch(2, 0, 1), now_ns=0)] == [cm.AbortWork]
    ended = cm.StepEnded(epoch=1, version=1, digest=None, reason="aborted")
    assert [type(a) for a in rank.handle(ended, now_ns=0)] == [cm.SendReport]


@pytest.mark.parametrize(
    ("events", "error", "words"),
    [
        ([epoch(1, 1)], LocalProtocolError, "cannot follow"),
        ([epoch(2, 0), epoch(2, 0)], LocalProtocolError, "cannot follow"),
        ([epoch(1, 0, 1), report(2, 1, 0)], RemoteProtocolError, "rank 2 is no member"),
        ([report(1, 1, 0), report(1, 1, 1)], RemoteProtocolError, "two different"),
        (
            [cm.StepEnded(epoch=1, version=1, digest=b"")],
            LocalProtocolError,
            "None is in flight",
        ),
    ],
)
def test_misuse_and_breach_are_typed(
    events: list[cm.CommitEvent], error: type[Exception], words: str
) -> None:
    rank = machine()
    with pytest.raises(error, match=words):
        for event in events:
            rank.handle(event, now_ns=0)


@pytest.mark.parametrize(
    "change", [{"version": 4}, {"version": -1}, {"known": 4}, {"slot": 2}, {"slot": -1}], ids=str
)
def test_a_report_of_what_nobody_can_hold_is_a_breach(change: dict[str, int]) -> None:
    ours = machine()
    ours.handle(epoch(1, 0, 1), now_ns=0)
    good = report(1, 1, 0)
    forged = dataclasses.replace(good, held=dataclasses.replace(good.held, **change))
    with pytest.raises(RemoteProtocolError, match="rank 1 says that it holds"):
        ours.handle(forged, now_ns=0)
    ours.check_invariants()
    assert ours.handle(good, now_ns=0), "the state is as it was"


def ready(number: int, *ranks: int) -> cm.EpochReady:
    return cm.EpochReady(epoch=number, members=tuple(MemberId(rank=r, incarnation=2) for r in ranks))


def in_its_first_step() -> StepCommit:
    """Rank 0, in epoch 2 with rank 1."""
    one = machine()
    one.handle(epoch(2, 0, 1), now_ns=0)
    one.handle(report(1, 2, 0), now_ns=0)
    assert one.state is CommitState.RUNNING
    return one


def vote(sender: int, version: int, ready: int) -> cm.VoteReceived:
    return cm.VoteReceived(
        sender=sender, epoch=2, version=version, digest=oracle(version), part=b"", ready=ready
    )


def ended(version: int) -> cm.StepEnded:
    return cm.StepEnded(epoch=2, version=version, digest=oracle(version))


def kinds(actions: list[cm.CommitAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_joiner_is_let_in_behind_the_step_that_all_say() -> None:
    one = in_its_first_step()
    assert one.handle(ready(3, 0, 1, 2), now_ns=0) == []
    (said,) = one.handle(ended(1), now_ns=0)
    assert isinstance(said, cm.SendVote) and said.ready == 3
    assert kinds(one.handle(vote(1, 1, 0), now_ns=0)) == ["Commit", "RunStep"], "rank 1 is not ready yet"
    one.handle(ended(2), now_ns=0)
    assert kinds(one.handle(vote(1, 2, 3), now_ns=0)) == ["Commit", "EnterEpoch"]
    assert one.state is CommitState.WAITING and one.version == 2


def test_a_new_epoch_is_entered_at_once_if_the_step_cannot_be_committed() -> None:
    without = in_its_first_step()
    assert kinds(without.handle(ready(3, 0, 2), now_ns=0)) == ["AbortWork", "EnterEpoch"]
    parted = in_its_first_step()
    parted.handle(ready(3, 0, 1, 2), now_ns=0)
    parted.handle(ended(1), now_ns=0)
    lost = cm.PeerEnded(member=MemberId(rank=1, incarnation=2), reason="its link ended")
    assert kinds(parted.handle(lost, now_ns=0)) == ["SendGaveUp", "EnterEpoch"]
    told = in_its_first_step()
    told.handle(ended(1), now_ns=0)
    assert told.handle(cm.GaveUpReceived(sender=1, epoch=2), now_ns=0) == []
    assert kinds(told.handle(ready(3, 0, 1), now_ns=0)) == ["SendGaveUp", "EnterEpoch"]
