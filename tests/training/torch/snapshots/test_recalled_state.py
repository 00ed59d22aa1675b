"""The machine of a loop, and states that memory has held beyond their ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.torch import transaction as tx
from zbmd.training.torch.fsdp.division import (
    Division,
    Held,
    Move,
    Report,
    What,
    absent_in_words,
    buddy_of,
    keeps_ward,
    newest_held,
)
from zbmd.training.torch.transaction import Phase, Transactions
from zbmd.transport.errors import LocalProtocolError

MEETINGS_MAX = 64


def holding(*held: Held, place: int = 0, size: int = 1, sharded: bool = False) -> Transactions:
    made = Transactions(fresh=True, sharded=sharded, place=place, size=size, held=held)
    made.handle(tx.Cut(), now_ns=0)
    return made


def part(version: int, place: int, size: int, *, keeps: bool = False, launch: int = 0) -> Held:
    return Held(version=version, place=place, size=size, keeps=keeps, launch=launch)


def fresh_with(*held: Held) -> Report:
    return Report(version=0, voted=False, fresh=True, held=held)


def meet(machines: list[Transactions]) -> list[list[tx.Action]]:
    """Have all meet; return what each is to do then."""
    reports = tuple(each.report for each in machines)
    return [each.handle(tx.Met(place=at, reports=reports), now_ns=0) for at, each in enumerate(machines)]


def test_the_newest_step_that_any_rank_holds_is_recalled_and_given_to_the_others() -> None:
    machines = [holding(), holding(Held(version=7), Held(version=6)), holding(Held(version=6))]
    assert meet(machines) == [[tx.Meet()], [tx.Recall(held=Held(version=7))], [tx.Meet()]]
    assert machines[1].handle(tx.Recalled(), now_ns=0) == [tx.Meet()]
    assert machines[1].report.held == () and not machines[1].fresh
    gives = [tx.Repeat(version=7), tx.Give(version=7, to=(0, 2))]
    take = [tx.Take(version=7, source=1)]
    assert meet(machines) == [take, gives, take]


def test_a_sharded_step_of_which_a_part_is_missing_is_passed_over() -> None:
    held = [(part(7, 0, 2), part(6, 0, 2)), (part(6, 1, 2), part(5, 1, 2))]
    machines = [holding(*each, place=at, size=2, sharded=True) for at, each in enumerate(held)]
    assert meet(machines) == [[tx.Recall(held=part(6, 0, 2))], [tx.Recall(held=part(6, 1, 2))]]
    for each in machines:
        each.handle(tx.Recalled(), now_ns=0)
    (first, *copies), _ = meet(machines)
    assert first == tx.Repeat(version=6)
    assert all(isinstance(each, Move) and each.what is What.COPY for each in copies) and len(copies) == 2


@pytest.mark.parametrize(
    "held", [((), ()), ((part(7, 0, 2),), (part(6, 1, 2),)), ((part(7, 0, 2),), (part(7, 1, 3),))]
)
def test_parts_that_are_no_whole_step_are_lost(held: tuple[tuple[Held, ...], ...]) -> None:
    for (action,) in meet([holding(*each, place=at, size=2, sharded=True) for at, each in enumerate(held)]):
        assert isinstance(action, tx.Fail) and action.lost and "all ranks that had the state" in action.reason


def test_parts_for_another_number_of_ranks_are_divided() -> None:
    held = [(part(6, 0, 2),), (part(6, 1, 2),), ()]
    machines = [holding(*each, place=at, size=3, sharded=True) for at, each in enumerate(held)]
    meet(machines)
    for each in machines[:2]:
        each.handle(tx.Recalled(), now_ns=0)
    for at, actions in enumerate(meet(machines)):
        (divide,) = [each for each in actions if isinstance(each, tx.Divide)]
        assert divide.division == Division(number=1, size=3, place=at) and len(divide.holders) == 2


def test_a_rank_and_its_buddy_that_are_lost_together_come_back_from_memory() -> None:
    """If it holds the version of the others; an older one is not theirs."""
    for version, recalled in ((6, True), (5, False)):
        living = Transactions(version=6, sharded=True, place=2, size=3)
        living.keeps = True
        living.handle(tx.Cut(), now_ns=0)
        fresh = [holding(part(version, at, 3), place=at, size=3, sharded=True) for at in range(2)]
        actions = meet([*fresh, living])
        if recalled:
            # The copy that rank 2 keeps is of rank 1, so part 0 alone is missing.
            assert actions == [[tx.Recall(held=part(6, 0, 3))], [tx.Meet()], [tx.Meet()]]
        else:
            assert all(isinstance(each[0], tx.Fail) for each in actions)


def test_a_lost_nodes_shard_comes_from_the_copy_that_its_buddys_memory_has() -> None:
    first, last = (part(6, place, 3, keeps=True) for place in (0, 2))
    machines = [
        holding(*each, place=at, size=3, sharded=True) for at, each in enumerate(([first], [], [last]))
    ]
    assert meet(machines) == [[tx.Recall(held=first)], [tx.Meet()], [tx.Recall(held=last)]]
    for each in (machines[0], machines[2]):
        each.handle(tx.Recalled(), now_ns=0)
    _, taken, _ = meet(machines)
    assert [(one.what, one.source) for one in taken if isinstance(one, Move)] == [
        (What.REST, 0),
        (What.SHARD, 2),
        (What.COPY, 0),
    ]


def test_parts_of_two_launches_are_no_state_and_the_later_launch_is_newer() -> None:
    mixed = [fresh_with(part(9, 0, 2, launch=1)), fresh_with(part(9, 1, 2, launch=2))]
    assert newest_held(mixed) is None
    assert absent_in_words(mixed).endswith("of the last one, the shard of rank 0 of 2 is missing")
    later = Held(version=4, launch=2)
    assert newest_held([fresh_with(Held(version=9, launch=1)), fresh_with(later)]) == later
    assert absent_in_words([fresh_with()]) == ""


@given(nodes=st.lists(st.integers(0, 4), min_size=1, max_size=8).map(sorted), lost=st.integers(0, 4))
def test_memory_has_all_parts_without_a_node_whose_buddies_were_to_keep_them(
    nodes: list[int], lost: int
) -> None:
    size = len(nodes)
    held = [(part(3, at, size, keeps=keeps_ward(nodes, at)),) for at in range(size)]
    reports = [fresh_with(*(() if nodes[at] == lost else held[at])) for at in range(size)]
    gone = [at for at in range(size) if nodes[at] == lost]
    kept = all(held[buddy_of(at, size)][0].keeps for at in gone) and len(gone) < size
    assert (newest_held(reports) is not None) == kept
    assert not any(one.keeps for (one,) in held) or len(set(nodes)) > 1, "one node has no copy of its own"
    if len(gone) == 1 and size > 1:
        assert kept, "a node with one rank alone is protected"


def test_a_state_is_recalled_when_that_is_asked_for_alone() -> None:
    with pytest.raises(LocalProtocolError, match="phase fresh"):
        holding(Held(version=7)).handle(tx.Recalled(), now_ns=0)


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), sharded=st.booleans())
@settings(max_examples=150, deadline=None)
def test_whoever_dies_as_a_step_is_recalled_all_end_at_it(seed: int, ranks: int, sharded: bool) -> None:
    """All ranks were killed within one step, and some are again, before or after they have their state."""
    rng, base = random.Random(seed), 9
    memory: list[tuple[Held, ...]] = []
    for place in range(ranks):
        versions = rng.choice([(base,), (base - 1, base), (base, base + 1)])
        at, of = (place, ranks) if sharded else (0, 1)
        memory.append(tuple(part(version, at, of) for version in versions))
    ahead = [any(held.version > base for held in each) for each in memory]
    if not sharded:
        memory = [each if at == 0 or rng.random() < 0.5 else () for at, each in enumerate(memory)]
        ahead = [any(held.version > base for held in each) for each in memory]
    elif ranks > 1 and rng.random() < 0.5:  # each rank on a node of its own, of which one has lost its memory
        memory = [
            tuple(part(one.version, at, ranks, keeps=True) for one in each) for at, each in enumerate(memory)
        ]
        lost = rng.randrange(ranks)
        memory[lost], ahead[lost] = (), False
        ahead = [each or ahead[buddy_of(at, ranks)] for at, each in enumerate(ahead)]
    target = base + (all(ahead) if sharded else any(ahead))

    def fresh(place: int) -> Transactions:
        return holding(*memory[place], place=place, size=ranks, sharded=sharded)

    machines, deaths, again = [fresh(place) for place in range(ranks)], 0, True
    for _ in range(MEETINGS_MAX):
        again, all_actions = False, meet(machines)
        for place, actions in enumerate(all_actions):
            assert not any(isinstance(each, tx.Fail) for each in actions), actions
            if deaths < 6 and rng.random() < 0.2:
                machines[place], deaths, again = fresh(place), deaths + 1, True
                continue
            one = machines[place]
            if isinstance(actions[0], tx.Recall):
                assert actions[0].held.version == target
                actions = one.handle(tx.Recalled(), now_ns=0)
            again = again or actions == [tx.Meet()]
            one.check_invariants()
        if not again:
            break
        for one in machines:
            one.handle(tx.Cut(), now_ns=0)
    assert not again
    for one in machines:
        if one.phase is Phase.TAKING:
            one.handle(tx.Taken(version=target), now_ns=0)
    assert {(one.version, one.phase, one.fresh) for one in machines} == {(target, Phase.OPEN, False)}
    if sharded:
        assert [one.report.division and one.report.division.place for one in machines] == [*range(ranks)]
