"""The scenario of supervision trees: its judge, and the seeds that once showed a bug."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.actors.simulated.supervision_scenario import Judge, SupervisionScenario, Worker
from zbmd.actors.supervision.events import (
    Action,
    ChildExited,
    ChildStarted,
    ChildStartFailed,
    Escalate,
    Event,
    LeaveDown,
    Restart,
    StartChild,
    StopChild,
    StopRequested,
    Strategy,
)
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.transport.sim import Options, RunOutcome, run_scenario

PERIOD_NS = 1_000


@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 3), length=st.integers(1, 8), faults=st.integers(0, 4)
)
@settings(max_examples=20)
def test_trees_stand_crashes(seed: int, ranks: int, length: int, faults: int) -> None:
    report = run_scenario(
        SupervisionScenario(), seed, Options(ranks=ranks, length=length, faults=faults), tell=None
    )
    assert report.outcome is RunOutcome.OK, report


def started(child: str, incarnation: int = 1) -> list[Event | Action]:
    return [StartChild(child=child, incarnation=incarnation, reason=""), ChildStarted(child=child)]


def failed(child: str) -> ChildExited:
    return ChildExited(child=child, normal=False, reason="")


def stopped(child: str) -> list[Event | Action]:
    return [StopChild(child=child, reason=""), ChildExited(child=child, normal=True, reason="")]


UP: list[Event | Action] = [*started("a"), *started("b"), *started("c")]
ONE, ALL, REST = Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE


def judge(
    strategy: Strategy, told: list[Event | Action], *, intensity: int = 1, temporary: str = ""
) -> list[str]:
    violations: list[str] = []
    children = [
        ChildSpec(
            name=name,
            actor=Worker,
            restart=Restart.TEMPORARY if name in temporary else Restart.PERMANENT,
        )
        for name in "abc"
    ]
    found = Judge("it", children, strategy, intensity, PERIOD_NS, violations)
    for what in told:
        if isinstance(what, ChildExited | ChildStarted | ChildStartFailed | StopRequested):
            found.learn(what, 0)
        else:
            found.see(what, 0)  # type: ignore[arg-type]
    return violations


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (ONE, [*UP, failed("b"), *started("b", 2)]),
        (REST, [*UP, failed("b"), *stopped("c"), *started("b", 2), *started("c", 2)]),
        (
            ALL,
            [*UP, failed("b"), *stopped("c"), *stopped("a"), *started("a"), *started("b"), *started("c")],
        ),
        (ONE, [*UP, StopRequested(reason=""), *stopped("c"), *stopped("b"), *stopped("a")]),
        (
            ONE,
            [
                *UP,
                failed("b"),
                *started("b"),
                failed("b"),
                *stopped("c"),
                *stopped("a"),
                Escalate(reason=""),
            ],
        ),
        (
            ONE,
            [
                *started("a"),
                StartChild(child="b", incarnation=1, reason=""),
                ChildStartFailed(child="b", reason=""),
                *stopped("a"),
                Escalate(reason=""),
            ],
        ),
    ],
)
def test_the_judge_lets_pass_what_is_right(strategy: Strategy, told: list[Event | Action]) -> None:
    assert judge(strategy, told) == []


@pytest.mark.parametrize(
    ("strategy", "told", "words"),
    [
        (ONE, [*started("b"), StartChild(child="a", incarnation=1, reason="")], "which come later"),
        (ONE, [*UP, failed("b"), StopChild(child="c", reason="")], "nothing asks for that"),
        (ONE, [*UP, StartChild(child="b", incarnation=2, reason="")], "has not ended"),
        (REST, [*UP, failed("b"), *started("b", 2)], "before ['c'] have ended"),
        (REST, [*UP, failed("b"), *stopped("c"), StopChild(child="a", reason="")], "nothing asks for that"),
        (ALL, [*UP, failed("b"), *stopped("c"), *started("b", 2)], "before ['a'] have ended"),
        (ALL, [*UP, failed("b"), StopChild(child="a", reason="")], "stopped before ['c']"),
        (ONE, [*UP, failed("b"), *started("b"), failed("c"), *started("c", 2)], "while all are stopped"),
        (ONE, [*UP, failed("b"), Escalate(reason="")], "gives up although 1 are allowed"),
        (ONE, [*UP, failed("b"), LeaveDown(child="b", reason="")], "permanent and left down"),
        (ONE, [*UP, StopRequested(reason=""), StopChild(child="a", reason="")], "stopped before ['b', 'c']"),
    ],
)
def test_the_judge_sees_what_is_wrong(strategy: Strategy, told: list[Event | Action], words: str) -> None:
    assert words in judge(strategy, told)[0]


def test_the_judge_knows_what_is_temporary() -> None:
    told = [*UP, failed("c"), StartChild(child="c", incarnation=2, reason="")]
    assert "temporary and is started again" in judge(ONE, told, temporary="c")[0]


@pytest.mark.parametrize(
    ("seed", "ranks", "length"),
    [(244677297579254, 1, 3)],  # an answer to a spawn that came when its spawner was being killed
)
def test_seeds_that_failed_once(seed: int, ranks: int, length: int) -> None:
    options = Options(ranks=ranks, length=length, faults=0)
    report = run_scenario(SupervisionScenario(), seed, options, (), tell=None)
    assert report.outcome is RunOutcome.OK, report
