"""Whole nodes with all that actors do: they stand faults, and what their ledgers must notice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.actors.core.ref import Down, Reason, ReasonKind, Ref
from zbmd.actors.simulated.ledgers import Groups, Incarnations, Names, Nodes, Talks, Ties
from zbmd.actors.simulated.scenario import ActorsScenario
from zbmd.transport.sim import Options, RunOutcome, SimProcess, World, run_scenario

SCENARIO = ActorsScenario()


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3), faults=st.integers(0, 2))
@settings(max_examples=3)
def test_nodes_and_their_actors_stand_faults(seed: int, ranks: int, faults: int) -> None:
    options = Options(ranks=ranks, length=1, faults=faults)
    report = run_scenario(SCENARIO, seed, options, SCENARIO.draw_plan(seed, options), tell=None)
    assert report.outcome is RunOutcome.OK, report


async def _idle(_: SimProcess) -> None:
    return


class Told:
    """Ledgers, and a process "a" and "b" that report to them."""

    def __init__(self, world: World) -> None:
        for name in "ab":
            world.add(name, _idle)
        self.nodes = Nodes(world)
        self.lives = Incarnations(self.nodes)
        self.one, self.other = self.born("a", 1), self.born("b", 1)

    def born(self, process: str, incarnation: int) -> Ref:
        ref = Ref(None, process, 1, "x", incarnation)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        self.lives.born(ref)
        return ref

    def ends(self, ref: Ref, kind: ReasonKind = ReasonKind.FAILED) -> None:
        self.lives.ended(Down(ref, Reason(kind)))


def test_two_lives_of_one_actor_are_seen() -> None:
    with World(1) as world:
        told = Told(world)
        told.ends(told.one)
        told.born("a", 2)
        told.lives.check()
        told.born("a", 3)
        with pytest.raises(AssertionError, match="has a brother, 2"):
            told.lives.check()


@pytest.mark.parametrize(
    ("handled", "words"),
    [
        ([(1, 0, 0), (2, 1, 1), (4, 2, 2)], ""),
        ([(1, 0, 0), (1, 0, 1)], "comes after 1"),
        ([(1, 0, 0), (3, 2, 1)], "comes after 1, 2 was sent"),
        ([(1, 0, 0), (2, 1, 0)], "remembers 0, had handled 1"),
    ],
)
def test_messages_lost_doubled_or_forgotten_are_seen(handled: list[tuple[int, int, int]], words: str) -> None:
    with World(1) as world:
        told = Told(world)
        talks = Talks(told.lives)
        session = talks.begin(told.one)
        for number, sure, remembered in handled:
            talks.handled(told.one, session, number, sure, remembered)
        assert words in "".join(talks.faults) and bool(words) is bool(talks.faults)


def test_what_the_dead_and_the_wrong_handle_is_seen() -> None:
    with World(1) as world:
        told = Told(world)
        talks = Talks(told.lives)
        session = talks.begin(told.one)
        talks.handled(told.other, session, 1, 0, 0)
        told.ends(told.one)
        talks.handled(told.one, session, 2, 1, 1)
        assert "sent to ('a', 1, 'x', 1)" in talks.faults[0] and "it had ended" in talks.faults[1]


@pytest.mark.parametrize(("answer", "certain"), [((2, 1), 0), ((1, 0), 0), ((1, 1), 1), ((1, 2), 0)])
def test_a_wrong_answer_is_seen(answer: tuple[int, int], certain: int) -> None:
    with World(1) as world:
        told = Told(world)
        talks = Talks(told.lives)
        session = talks.begin(told.one)
        talks.handled(told.one, session, 1, 0, 0)
        talks.answered(session, 1, (1, 1), 0)
        assert not talks.faults
        talks.answered(session, 1, answer, certain)
        assert talks.faults


def test_an_answer_to_what_nobody_handled_is_seen() -> None:
    with World(1) as world:
        told = Told(world)
        talks = Talks(told.lives)
        talks.answered(talks.begin(told.one), 1, (1, 1), 0)
        assert "was not handled" in talks.faults[0]


def test_a_name_with_two_holders_is_seen_unless_it_is_being_taken_away() -> None:
    with World(1) as world:
        told = Told(world)
        names = Names(told.nodes, told.lives)
        for ref in (told.one, told.other):
            names.granted("n", ref, names.asked("n", ref))
        with pytest.raises(AssertionError, match="is the name of"):
            names.check()
        names.takes("n", ("a", 1))
        names.granted("n", told.one, names.asked("n", told.one))
        names.check()
        assert names.holders("n") == []


def test_changes_of_groups_that_do_not_fit_are_seen() -> None:
    with World(1) as world:
        told = Told(world)
        groups = Groups(told.nodes, told.lives)
        groups.changed(("a", 1), "g", "news", (told.one,), ())
        assert not groups.faults
        groups.changed(("a", 1), "g", "news", (told.one,), (told.other,))
        assert "was not in" in groups.faults[0] and "it is in" in groups.faults[1]


@pytest.mark.parametrize(("kind", "missing"), [(ReasonKind.NORMAL, False), (ReasonKind.FAILED, True)])
def test_one_who_lives_on_alone_is_missed(kind: ReasonKind, missing: bool) -> None:
    with World(1) as world:
        told = Told(world)
        ties = Ties(told.lives)
        ties.tie(told.one, told.other)
        assert not ties.missing()
        told.ends(told.one, kind)
        assert bool(ties.missing()) is missing
