"""The machine of a resilient loop's steps: votes, and who does what after a loss."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.torch import transaction as tx
from zbmd.training.torch.ballots import Ballot
from zbmd.training.torch.fsdp.division import Division, Holder, Move, Report, What, buddy_of, ward_of
from zbmd.training.torch.fsdp.slots import Slots
from zbmd.training.torch.transaction import Phase, Transactions
from zbmd.transport.errors import LocalProtocolError


def voted(*versions: int, digests: tuple[int, ...] = ()) -> tx.AllVoted:
    of = digests or (0,) * len(versions)
    return tx.AllVoted(
        ballots=tuple(Ballot(version=v, digests=(d,) if d else ()) for v, d in zip(versions, of, strict=True))
    )


def met(place: int, *reports: str) -> tx.Met:
    """Reports such as "3" (at version 3), "3v" (and has voted), "f" (fresh)."""
    return tx.Met(
        place=place,
        reports=tuple(
            Report(version=int(each.strip("vf") or 0), voted="v" in each, fresh="f" in each)
            for each in reports
        ),
    )


def sharded(report: str, place: int = 0, size: int = 1) -> Transactions:
    """A machine of a sharded loop that has met a loss: "3vk" has voted, and keeps its ward's copy."""
    version = int(report.strip("vfk") or 0)
    made = Transactions(version=version, fresh="f" in report, sharded=True, place=place, size=size)
    if "f" not in report:
        made.phase, made.keeps = Phase.OPEN, "k" in report
    if "v" in report:
        made.handle(tx.Prepared(), now_ns=0)
        made.handle(tx.Delivered(), now_ns=0)
    made.handle(tx.Cut(), now_ns=0)
    return made


def met_sharded(place: int, *reports: str) -> tx.Met:
    return tx.Met(place=place, reports=reports_of(*reports))


def reports_of(*reports: str) -> tuple[Report, ...]:
    return tuple(sharded(each, at, len(reports)).report for at, each in enumerate(reports))


def after_sharded(place: int, *reports: str) -> list[tx.Action]:
    return sharded(reports[place], place, len(reports)).handle(met_sharded(place, *reports), now_ns=0)


def part(place: int, size: int, number: int = 0) -> Division:
    return Division(number=number, size=size, place=place)


def move(what: What, source: int, target: int, version: int = 3) -> Move:
    return Move(version=version, what=what, source=source, target=target)


def machine(report: str) -> Transactions:
    """A machine that has met a loss, and now reports this."""
    made = Transactions(version=int(report.strip("vf") or 0), fresh="f" in report)
    if "v" in report:
        made.handle(tx.Prepared(), now_ns=0)
    made.handle(tx.Cut(), now_ns=0)
    return made


def after(place: int, *reports: str) -> list[tx.Action]:
    return machine(reports[place]).handle(met(place, *reports), now_ns=0)


def test_all_votes_commit() -> None:
    one = Transactions(version=4)
    assert one.handle(tx.Prepared(digests=(7,)), now_ns=0) == [
        tx.Vote(ballot=Ballot(version=4, digests=(7,)))
    ]
    assert one.handle(voted(4, 4, digests=(7, 7)), now_ns=0) == [tx.Commit(version=5)]
    assert (one.version, one.phase, one.voted) == (5, Phase.OPEN, False)


def test_other_steps_and_other_bits_end_the_loop() -> None:
    for ballots in (voted(4, 5), voted(4, 4, digests=(7, 8))):
        one = Transactions(version=4)
        one.handle(tx.Prepared(digests=(7,)), now_ns=0)
        (fail,) = one.handle(ballots, now_ns=0)
        assert isinstance(fail, tx.Fail) and not fail.lost
        assert one.handle(tx.Cut(), now_ns=0) == []


def test_before_any_commit_all_repeat_and_the_first_gives() -> None:
    assert after(0, "3", "3v", "f") == [tx.Repeat(version=3), tx.Give(version=3, to=(2,))]
    assert after(1, "3", "3v", "f") == [tx.Repeat(version=3)]
    assert after(2, "3", "3v", "f") == [tx.Take(version=3, source=0)]


def test_who_has_not_seen_a_commit_promotes_once_it_has_the_votes() -> None:
    reports = ("3v", "4", "f", "3v")
    share = [tx.Share(version=4, source=1)]
    for place, then in (
        (0, [tx.Promote(version=4)]),
        (1, [tx.Repeat(version=4), tx.Give(version=4, to=(2,))]),
        (2, [tx.Take(version=4, source=1)]),
    ):
        one = machine(reports[place])
        assert one.handle(met(place, *reports), now_ns=0) == share
        assert one.handle(tx.Shared(), now_ns=0) == then
    assert one.handle(tx.Taken(version=4), now_ns=0) == []
    assert (one.version, one.fresh, one.phase) == (4, False, Phase.OPEN)


def test_a_loss_before_the_votes_are_there_leaves_a_voter_where_it_was() -> None:
    one = machine("3v")
    one.handle(met(0, "3v", "4"), now_ns=0)
    assert one.handle(tx.Cut(), now_ns=0) == [tx.Meet()]
    assert one.report == Report(version=3, voted=True, fresh=False)


def test_a_replacement_that_is_cut_off_stays_fresh() -> None:
    one = machine("f")
    one.handle(met(0, "f", "2"), now_ns=0)
    assert one.handle(tx.Cut(), now_ns=0) == [tx.Meet()]
    assert one.report.fresh
    assert one.handle(met(0, "f", "2"), now_ns=0) == [tx.Take(version=2, source=1)]


def test_with_all_who_had_it_the_state_is_lost() -> None:
    (fail,) = after(0, "f", "f")
    assert isinstance(fail, tx.Fail) and fail.lost


@pytest.mark.parametrize("reports", [("3", "4"), ("2v", "4"), ("2", "4v")])
def test_a_rank_that_no_rule_brings_to_the_others_ends_the_loop(reports: tuple[str, str]) -> None:
    (fail,) = after(1, *reports)
    assert isinstance(fail, tx.Fail) and not fail.lost and "rank 0" in fail.reason


def test_a_voter_commits_when_others_have_finished_and_a_rank_is_lost() -> None:
    """Then all have voted; a further transaction, that they have not made, ends the loop."""
    one = machine("3v")
    assert one.handle(tx.Ended(lost=True, reason="they left"), now_ns=0) == [tx.Promote(version=4)]
    assert (one.version, one.phase, one.voted) == (4, Phase.ENDED, False)
    one.check_invariants()
    (fail,) = one.handle(tx.Cut(), now_ns=0)
    assert isinstance(fail, tx.Fail) and not fail.lost and "scripts differ" in fail.reason


@pytest.mark.parametrize(("report", "lost"), [("3v", False), ("3", True), ("f", True)])
def test_others_that_finish_early_end_the_loop(report: str, lost: bool) -> None:
    fail = tx.Fail(lost=False, reason="they left")
    assert machine(report).handle(tx.Ended(lost=lost, reason="they left"), now_ns=0) == [fail]


def test_events_out_of_place_are_errors() -> None:
    one = Transactions()
    for event in (voted(0), tx.Shared(), tx.Taken(version=1), met(0, "0")):
        with pytest.raises(LocalProtocolError, match="phase open"):
            one.handle(event, now_ns=0)
    with pytest.raises(LocalProtocolError, match="own report"):
        machine("3").handle(met(0, "4", "3"), now_ns=0)


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_after_any_losses_all_end_at_one_version(seed: int, ranks: int) -> None:
    """Ranks of one loop, each stopped at any place of a step, and some replaced: one exchange unites them."""
    rng, version = random.Random(seed), 5
    committed = rng.random() < 0.5
    reports = [rng.choice(["5v", "6"]) if committed else rng.choice(["5", "5v"]) for _ in range(ranks)]
    for place in range(ranks):
        if rng.random() < 0.3:
            reports[place] = "f"
    if all(each == "f" for each in reports):
        reports[0] = "5v"
    target = version + any(each == "6" for each in reports)
    machines = [machine(each) for each in reports]
    gives, takes = list[int](), list[int]()
    for place, one in enumerate(machines):
        actions = one.handle(met(place, *reports), now_ns=0)
        if isinstance(actions[0], tx.Share):
            actions = one.handle(tx.Shared(), now_ns=0)
        gives += [to for action in actions if isinstance(action, tx.Give) for to in action.to]
        if isinstance(actions[0], tx.Take):
            takes.append(place)
            one.handle(tx.Taken(version=target), now_ns=0)
        one.check_invariants()
    assert gives == takes == [place for place, each in enumerate(reports) if each == "f"]
    assert {(one.version, one.phase, one.voted) for one in machines} == {(target, Phase.OPEN, False)}


# Sharded states.


def test_a_rank_votes_once_it_holds_its_wards_gradients() -> None:
    one = sharded("4k", 0, 2)
    one.handle(met_sharded(0, "4k", "4k"), now_ns=0)
    assert one.handle(tx.Prepared(digests=(7,)), now_ns=0) == [tx.Deliver(version=5)]
    assert not one.report.voted
    vote = tx.Vote(ballot=Ballot(version=4, digests=(7,), holds=True))
    assert one.handle(tx.Delivered(), now_ns=0) == [vote]
    assert one.handle(tx.AllVoted(ballots=(vote.ballot, vote.ballot)), now_ns=0) == [tx.Commit(version=5)]
    assert one.report == Report(version=5, voted=False, fresh=False, keeps=True, division=part(0, 2))


def test_a_vote_without_the_wards_gradients_ends_the_loop() -> None:
    one = sharded("4k", 0, 2)
    one.handle(met_sharded(0, "4k", "4k"), now_ns=0)
    (vote,) = one.handle(tx.Prepared(digests=(7,), updates=False), now_ns=0)  # there is nothing to deliver
    assert isinstance(vote, tx.Vote) and vote.ballot.holds
    (fail,) = one.handle(tx.AllVoted(ballots=(vote.ballot, Ballot(version=4, digests=(7,)))), now_ns=0)
    assert isinstance(fail, tx.Fail) and "rank 1" in fail.reason


def test_a_loss_in_the_delivery_leaves_a_rank_that_has_not_voted() -> None:
    one = sharded("4k", 0, 2)
    one.handle(met_sharded(0, "4k", "4k"), now_ns=0)
    one.handle(tx.Prepared(digests=(7,)), now_ns=0)
    assert one.handle(tx.Cut(), now_ns=0) == [tx.Meet()]
    assert not one.report.voted


def test_the_first_ranks_exchange_copies() -> None:
    one = Transactions(sharded=True, place=2, size=3)
    copies = [move(What.COPY, 2, 0, 0), move(What.COPY, 1, 2, 0)]
    assert one.handle(met_sharded(2, "0", "0", "0"), now_ns=0) == [tx.Repeat(version=0), *copies]
    assert one.handle(tx.Kept(), now_ns=0) == [] and one.keeps
    assert Transactions(sharded=True).handle(met_sharded(0, "0"), now_ns=0) == [tx.Repeat(version=0)]


def test_a_replacement_takes_its_shard_from_its_buddy_and_its_copy_from_its_ward() -> None:
    reports = ("3k", "3vk", "f", "3k")
    rest, shard = move(What.REST, 0, 2), move(What.SHARD, 3, 2)
    copy = move(What.COPY, 1, 2)
    assert after_sharded(0, *reports) == [tx.Repeat(version=3), rest]
    assert after_sharded(1, *reports) == [tx.Repeat(version=3), copy]
    assert after_sharded(3, *reports) == [tx.Repeat(version=3), shard]
    fresh = sharded("f", 2, 4)
    assert fresh.handle(met_sharded(2, *reports), now_ns=0) == [rest, shard, copy]
    assert fresh.handle(tx.Taken(version=3), now_ns=0) == []
    assert fresh.report == Report(version=3, voted=False, fresh=False, keeps=True, division=part(2, 4))


@pytest.mark.parametrize(("place", "then"), [(0, tx.Promote(version=4)), (1, tx.Meet()), (2, tx.Meet())])
def test_who_is_behind_promotes_before_a_shard_moves(place: int, then: tx.Action) -> None:
    reports = ("3vk", "4k", "f")
    one = sharded(reports[place], place, 3)
    assert one.handle(met_sharded(place, *reports), now_ns=0) == [tx.Share(version=4, source=1)]
    assert one.handle(tx.Shared(), now_ns=0) == [then]
    one.handle(tx.Cut(), now_ns=0)
    actions = one.handle(met_sharded(place, "4k", "4k", "f"), now_ns=0)
    moves = [each for each in actions if isinstance(each, Move)]
    assert moves and {each.version for each in moves} == {4}


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        (("f", "f", "3k"), "ranks 0 and 1 are lost together"),
        (("f", "3k", "f"), "ranks 2 and 0 are lost together"),
        (("3k", "f", "3"), "rank 1 is lost before rank 2 had a copy"),
        (("f", "f"), "all ranks"),
        (("f",), "all ranks"),
    ],
)
def test_a_shard_that_nobody_has_is_lost(reports: tuple[str, ...], says: str) -> None:
    for place in range(len(reports)):
        (fail,) = after_sharded(place, *reports)
        assert isinstance(fail, tx.Fail) and fail.lost and says in fail.reason


def test_a_rank_lost_with_its_buddy_is_there_again_from_its_replica() -> None:
    """In a mesh of two times two, ranks 0 and 2 have one shard, 1 and 3 the other."""
    reports = ("f", "f", "3k", "3k")
    rest = [move(What.REST, 2, place) for place in (0, 1)]
    shards = [move(What.REPLICA, 2, 0), move(What.SHARD, 2, 1)]
    copies = [move(What.COPY, 0, 1), move(What.COPY, 3, 0)]
    for place, own in (
        (0, [rest[0], shards[0], *copies]),
        (1, [rest[1], shards[1], copies[0]]),
        (2, [tx.Repeat(version=3), rest[0], shards[0], rest[1], shards[1]]),
        (3, [tx.Repeat(version=3), copies[1]]),
    ):
        one = sharded(reports[place], place, 4)
        one.distinct = 2
        assert one.handle(met_sharded(place, *reports), now_ns=0) == own


@pytest.mark.parametrize(
    ("lost", "gives"),
    [((0, 1), (3, What.REPLICA)), ((0, 1, 3), (4, What.SHARD)), ((0, 1, 3, 4), None)],
)
def test_a_shard_is_lost_with_all_replicas_and_buddies(
    lost: tuple[int, ...], gives: tuple[int, What] | None
) -> None:
    """In a mesh of two times three, ranks 0 and 3 have one shard, and 1 and 4 copies of it."""
    reports = ["f" if place in lost else "3k" for place in range(6)]
    one = sharded("f", 0, 6)
    one.distinct = 3
    actions = one.handle(met_sharded(0, *reports), now_ns=0)
    if gives is None:
        assert isinstance(actions[0], tx.Fail) and actions[0].lost
    else:
        assert move(gives[1], gives[0], 0) in actions


@given(seed=st.integers(0, 2**32), distinct=st.integers(1, 3), columns=st.integers(2, 3))
@settings(max_examples=100, deadline=None)
def test_a_shard_of_a_hybrid_mesh_comes_from_a_rank_that_has_it(
    seed: int, distinct: int, columns: int
) -> None:
    """Any ranks are lost: each gets its own shard, or all say that a shard is lost with all who had it."""
    rng, size = random.Random(seed), distinct * columns
    reports = [rng.choice(["f", "3", "3k"]) for _ in range(size)]
    machines = [sharded(each, place, size) for place, each in enumerate(reports)]
    for one in machines:
        one.distinct = distinct
    found = [one.handle(met_sharded(place, *reports), now_ns=0) for place, one in enumerate(machines)]
    own = {place % distinct for place, each in enumerate(reports) if each != "f"}
    kept = {ward_of(place, size) % distinct for place, each in enumerate(reports) if each == "3k"}
    is_lost = len(own | kept) < distinct or all(each == "f" for each in reports)
    assert is_lost == any(isinstance(actions[0], tx.Fail) for actions in found)
    for place, each in enumerate(reports):
        came = [one for one in found[place] if isinstance(one, Move) and one.target == place]
        shards = [one for one in came if one.what in (What.SHARD, What.REPLICA)]
        assert len(shards) == (each == "f" and not is_lost)
        for one in shards:
            has = one.source if one.what is What.REPLICA else ward_of(one.source, size)
            assert (has - place) % distinct == 0
            assert reports[one.source] == "3k" or (reports[one.source], one.what) == ("3", What.REPLICA)


def test_a_rank_that_completes_no_replica_gives_what_it_has_and_waits() -> None:
    """In a mesh of two times two, rank 1 is lost: of the others the first two make a replica."""
    machines = [sharded("3k", place, 4) for place in (0, 2, 3)]
    for one in machines:
        one.distinct = 2
    reports = tuple(one.report for one in machines)
    for place, one in enumerate(machines):
        actions = one.handle(tx.Met(place=place, reports=reports), now_ns=0)
        divide = actions[-1]
        assert isinstance(divide, tx.Divide) and divide.division.is_left_over == (place == 2)
        assert divide.holders == (Holder(0, False), Holder(1, True))  # rank 2 has kept rank 1's part
        assert one.handle(tx.Divided(), now_ns=0) == [tx.Agree()]
    waits = machines[2]
    assert waits.handle(tx.Agreed(), now_ns=0) == [tx.Wait()] and waits.phase is Phase.WAITING
    waits.check_invariants()
    assert waits.report.fresh and waits.report.division is None
    assert machines[0].handle(tx.Agreed(), now_ns=0) == [tx.Adopt()]
    # Rank 0 is lost before the other has seen that all agree; that counts, and the one that waits has a part.
    reports = (machines[1].report, waits.report)
    for one in machines[1:]:
        one.handle(tx.Cut(), now_ns=0)
    (moved, *_) = waits.handle(tx.Met(place=1, reports=reports), now_ns=0)
    assert moved == move(What.REST, 0, 1)


def test_ranks_that_come_complete_replicas_with_one_that_waits() -> None:
    """Of two that train, one that waits and four that come six make three replicas; one is left over."""
    reports = [*(sharded("3k", place, 2).report for place in (0, 1)), *([sharded("f").report] * 5)]
    for place in range(7):
        one = sharded("3k", place, 2) if place < 2 else sharded("f")
        one.distinct = 2
        *moves, divide = one.handle(tx.Met(place=place, reports=tuple(reports)), now_ns=0)
        rest = [each.target for each in moves if isinstance(each, Move) and each.what is What.REST]
        assert rest == ([2, 3, 4, 5] if place == 0 else [place] if 2 <= place < 6 else [])
        assert isinstance(divide, tx.Divide) and divide.division.size == 6
        assert divide.division.is_left_over == (place == 6) and len(divide.holders) == 2


def test_too_few_ranks_for_a_replica_end_the_loop() -> None:
    one = sharded("3k", 0, 4)
    one.distinct = 2
    (fail,) = one.handle(tx.Met(place=0, reports=(one.report,)), now_ns=0)
    assert isinstance(fail, tx.Fail) and fail.lost and "a replica of the hybrid mesh takes 2" in fail.reason


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_moves_end_in_any_order_of_ranks(seed: int, ranks: int) -> None:
    """Each rank performs its moves one after the other, and a move needs both of its ranks: all end."""
    rng = random.Random(seed)
    reports = [rng.choice(["3k", "3k", "3"]) for _ in range(ranks)]
    for place in range(ranks):
        buddy, ward = reports[buddy_of(place, ranks)], reports[ward_of(place, ranks)]
        if ranks > 1 and rng.random() < 0.3 and "k" in buddy and "f" not in ward:
            reports[place] = "f"
    queues = [
        [each for each in after_sharded(place, *reports) if isinstance(each, Move)] for place in range(ranks)
    ]
    while any(queues):
        heads = [(queue[0], place) for place, queue in enumerate(queues) if queue]
        ready = [each for each, place in heads if place == each.source and (each, each.target) in heads]
        assert ready, f"{heads} wait in a circle"
        chosen = rng.choice(ready)
        queues[chosen.source].pop(0)
        queues[chosen.target].pop(0)


@pytest.mark.parametrize(
    ("copies", "told"),
    [
        ([(31, 32), (11, 12), (21, 22)], None),
        ([(31, 32), (11, 13), (21, 22)], ("shard of rank 0 and its copy on rank 1", 1)),
        ([(30, 32), (11, 12), (21, 22)], ("shard of rank 2 and its copy on rank 0", 0)),
        ([(), (), ()], None),
    ],
)
def test_a_copy_that_is_not_its_wards_shard_ends_the_loop(
    copies: list[tuple[int, ...]], told: tuple[str, int] | None
) -> None:
    """Each rank's ballot has digests of its shard, and of the copy of the rank before."""
    shards = [(11, 12), (21, 22), (31, 32)]
    one = sharded("64k", 0, 3)
    one.phase = Phase.OPEN
    one.handle(tx.Prepared(digests=shards[0], copy=copies[0]), now_ns=0)
    (vote,) = one.handle(tx.Delivered(), now_ns=0)
    assert vote == tx.Vote(ballot=Ballot(version=64, holds=True, digests=shards[0], copy=copies[0]))
    ballots = tuple(
        Ballot(version=64, holds=True, digests=shard, copy=copy)
        for shard, copy in zip(shards, copies, strict=True)
    )
    (action,) = one.handle(tx.AllVoted(ballots=ballots), now_ns=0)
    if told is None:
        assert action == tx.Commit(version=65)
    else:
        assert isinstance(action, tx.Fail) and not action.lost
        assert told[0] in action.reason and action.parameter == told[1]
        assert one.phase is Phase.FAILED


# States that are updated before the vote: `Slots`.


class Mirrored:
    """One rank of a loop whose update needs all ranks: its machine, its slots, and its part, a number."""

    def __init__(self, place: int, size: int, *, fresh: bool) -> None:
        self.machine = Transactions(sharded=True, fresh=fresh, place=place, size=size)
        self.slots, self.part = Slots[int](), place
        if fresh:
            self.part = -1
        self.todo: list[tx.Action] = []

    def handle(self, event: tx.Event) -> list[tx.Action]:
        """Give the machine an event, and do to slots what a rank does."""
        actions = self.machine.handle(event, now_ns=0)
        self.machine.check_invariants()
        for action in actions:
            match action:
                case tx.Commit() | tx.Promote():
                    self.slots.commit()
                case tx.Repeat():
                    kept = self.slots.go_back()
                    self.part = self.part if kept is None else kept
                case _:
                    pass
        self.slots.check_invariants()
        return actions


def updated(parts: list[int]) -> list[int]:
    """The state after a step: each part depends on all."""
    return [hash((place, *parts)) for place in range(len(parts))]


def moved(ranks: list[Mirrored]) -> None:
    """Make the moves of a meeting, which ranks have in their `todo`."""
    version = next(one.machine.version for one in ranks if not one.machine.fresh)
    for one in ranks:
        for move in one.todo:
            if not isinstance(move, Move) or ranks[move.target] is not one:
                continue
            source = ranks[move.source]
            if move.what is What.SHARD:
                assert source.slots.ward is not None
                one.part = source.slots.ward
                one.slots.replace()
    for one in ranks:
        for move in one.todo:
            if isinstance(move, Move) and move.what is What.COPY and ranks[move.target] is one:
                one.slots.keep(ranks[move.source].part)
                if not one.machine.fresh:
                    one.handle(tx.Kept())
        if one.machine.phase is Phase.TAKING:
            one.handle(tx.Taken(version=version))


def unite(ranks: list[Mirrored]) -> None:
    """Have all meet, until they go on."""
    for _ in range(3):
        reports = tuple(one.machine.report for one in ranks)
        for place, one in enumerate(ranks):
            one.todo = one.handle(tx.Met(place=place, reports=reports))
        for one in ranks:
            if one.machine.phase is Phase.SHARING:
                one.todo = one.handle(tx.Shared())
        moved(ranks)
        if all(one.machine.phase is Phase.OPEN for one in ranks):
            return
        for one in ranks:
            one.handle(tx.Cut())
    raise AssertionError([one.machine.phase for one in ranks])


def step_until(ranks: list[Mirrored], rng: random.Random, *, whole: bool) -> None:
    """Make a step, which ends at any place unless it is whole: whoever is left has heard that much of it."""
    stops = rng.choice(["updating", "delivering", "voting"])
    parts = updated([one.part for one in ranks])
    for one in ranks:
        if whole or stops != "updating" or rng.random() < 0.5:
            one.slots.begin(one.part)
            one.part = -2  # half an update
    if not whole and stops == "updating":
        return
    for one, part in zip(ranks, parts, strict=True):
        one.part = part
        assert one.handle(tx.Prepared()) == [tx.Deliver(version=one.machine.version + 1)]
    ballots = list[Ballot]()
    for place, one in enumerate(ranks):
        if whole or stops != "delivering" or rng.random() < 0.5:
            one.slots.hold(one.part, parts[ward_of(place, len(ranks))])
            (vote,) = one.handle(tx.Delivered())
            assert isinstance(vote, tx.Vote)
            ballots.append(vote.ballot)
    if whole or (stops == "voting" and len(ballots) == len(ranks)):
        for one in ranks:
            if whole or rng.random() < 0.5:
                one.handle(tx.AllVoted(ballots=tuple(ballots)))


@given(seed=st.integers(0, 2**32), size=st.integers(2, 6))
@settings(max_examples=200, deadline=None)
def test_an_update_before_the_vote_counts_on_all_or_on_none(seed: int, size: int) -> None:
    """Steps that end anywhere for any loss: all parts are those of one version, and so are all copies."""
    rng = random.Random(seed)
    ranks = [Mirrored(place, size, fresh=False) for place in range(size)]
    unite(ranks)
    states = [[one.part for one in ranks]]
    for _ in range(4):
        whole = rng.random() < 0.5
        step_until(ranks, rng, whole=whole)
        states.append(updated(states[-1]))
        if not whole:
            killed = rng.randrange(size)
            also = (killed + 2) % size if size > 3 and rng.random() < 0.3 else killed
            for place in {killed, also}:
                ranks[place] = Mirrored(place, size, fresh=True)
            for one in ranks:
                one.handle(tx.Cut())
            unite(ranks)
        (version,) = {one.machine.version for one in ranks}
        assert version in (len(states) - 1, len(states) - 2) and (not whole or version == len(states) - 1)
        del states[version + 1 :]
        assert [one.part for one in ranks] == states[version]
        for place, one in enumerate(ranks):
            assert one.slots.ward == states[version][ward_of(place, size)]
