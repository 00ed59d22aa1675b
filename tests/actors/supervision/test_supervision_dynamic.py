"""The supervision machine: children that come and go while it runs, and back-off."""

from __future__ import annotations

import pytest
from support.machines.supervision_world import ALL, ONE, REST, SECOND_NS, E, P, T, world

from zbmd.actors.supervision.events import (
    AddRequested,
    BackOff,
    ChildExited,
    ChildPolicy,
    ChildRefusal,
    ChildTimerFired,
    DeleteRequested,
    RestartRequested,
    StartRequested,
    StopRequested,
    Strategy,
    TerminateRequested,
)
from zbmd.actors.supervision.machine import ChildState, SupervisionMachine
from zbmd.transport.errors import LocalProtocolError

# (restart types; strategy; what is asked or happens, one after the other; what follows from the last)
# "=d" adds a permanent child d ("=dt" a transient one, "=de" a temporary one), "-b" terminates, "+b" restarts
# and "~b" deletes b; "!b" kills it; "/d" lets the next start of d fail; "<b" makes b slow.
DYNAMIC = [
    ("pp", ONE, "=c", "+c1"),
    ("pp", ONE, "=c !c", "+c2"),
    ("pp", ALL, "=c !c", "-b -a +a2 +b2 +c2"),
    ("pp", REST, "=c !b", "-c +b2 +c2"),
    ("pp", REST, "=ce !b", "-c _c ~c +b2"),
    ("pp", ONE, "=ce !c", "_c ~c"),
    ("pp", ONE, "=ct -c +c !c", "+c3"),
    # start_child: a child that runs is reported; one that does not start is forgotten, and nothing else.
    ("pp", ONE, "=b", "?up"),
    ("pp", ONE, "-b =b", "?present"),
    ("pp", ALL, "/c =c", "+c1 _c ~c"),
    ("pp", ONE, "/c =c =c", "+c1"),
    # terminate_child leaves the child down and its siblings alone, whatever the strategy; twice is once.
    ("ppp", ONE, "-b", "-b _b"),
    ("ppp", ALL, "-b", "-b _b"),
    ("ppp", REST, "-b", "-b _b"),
    ("pep", ALL, "-b", "-b _b ~b"),
    ("ppp", ONE, "-b -b", "_b"),
    ("ppp", ONE, "-d", "?unknown"),
    # A child that is down stays so when its sibling ends, but for the groups, which start all again.
    ("ppp", ONE, "-b !a", "+a2"),
    ("ppp", ALL, "-b !a", "-c +a2 +b2 +c2"),
    ("ppp", REST, "-b !a", "-c +a2 +b2 +c2"),
    # restart_child, delete_child: only of a child that is down.
    ("ppp", ALL, "-b +b", "+b2"),
    ("ppp", ALL, "+b", "?up"),
    ("ppp", ONE, "+d", "?unknown"),
    ("ppp", ONE, "~b", "?up"),
    ("ppp", ONE, "-b ~b", ""),
    ("ppp", ONE, "-b ~b ~b", "?unknown"),
    ("ppp", ONE, "-b ~b +b", "?unknown"),
    ("ppp", REST, "-b ~b !a", "-c +a2 +c2"),
    # While one child is slow to end, its siblings are served.
    ("ppp", ONE, "<b -b !a", "+a2"),
    ("ppp", ONE, "<b -b +b", "?up"),
]


@pytest.mark.parametrize(("restarts", "strategy", "steps", "follows"), DYNAMIC)
def test_otp_table_of_dynamic_children(restarts: str, strategy: Strategy, steps: str, follows: str) -> None:
    made = world(restarts, strategy)
    kinds = {"": P, "t": T, "e": E}
    for step in steps.split():
        made.journal.clear()
        what, child = step[0], step[1]
        match what:
            case "=":
                policy = ChildPolicy(child=child, restart=kinds[step[2:]])
                made.event(AddRequested(policy=policy))
            case "-":
                made.event(TerminateRequested(child=child))
            case "+":
                made.event(RestartRequested(child=child))
            case "~":
                made.event(DeleteRequested(child=child))
            case "!":
                made.dies(child)
            case "/":
                made.fails[child] = 1
            case _:
                made.slow.add(child)
    assert " ".join(made.journal) == follows


def test_what_was_added_later_stops_all_at_once_and_before_the_others() -> None:
    made = world("pp")
    for child in "cde":
        made.event(AddRequested(policy=ChildPolicy(child=child)))
    made.slow = set("cde")
    made.journal.clear()
    made.event(StopRequested(reason="test"))
    assert made.journal == ["-c", "-d", "-e"]
    for child in "dce":
        made.event(ChildExited(child=child, normal=True, reason="asked"))
    assert made.journal == ["-c", "-d", "-e", "-b", "-a", "stopped"]
    made.event(AddRequested(policy=ChildPolicy(child="f")))
    assert made.journal[-1] == f"?{ChildRefusal.STOPPING.value}"


def test_the_back_off_grows_is_bounded_and_spread_by_its_seed() -> None:
    plain = BackOff(first_ns=100, factor=3, max_ns=1000, jitter=0)
    assert [plain.delay_ns("a", n) for n in range(7)] == [0, 0, 100, 300, 900, 1000, 1000]
    spread = BackOff(first_ns=1_000_000, jitter=0.5, seed=7)
    delays = {child: spread.delay_ns(child, 2) for child in "abcdefgh"}
    assert len(set(delays.values())) == 8 and all(500_000 <= d <= 1_000_000 for d in delays.values())
    again = BackOff(first_ns=1_000_000, jitter=0.5, seed=7)
    assert delays == {child: again.delay_ns(child, 2) for child in "abcdefgh"}
    assert delays != {child: BackOff(first_ns=1_000_000, seed=8).delay_ns(child, 2) for child in "abcdefgh"}
    for wrong in ({"first_ns": 0}, {"first_ns": 2, "max_ns": 1}, {"factor": 17}, {"jitter": 1.1}):
        with pytest.raises(LocalProtocolError):
            BackOff(**wrong)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("strategy", "second"), [(ONE, "+b3"), (ALL, "+a3 +b3 +c3")])
def test_a_child_that_fails_again_waits_and_one_that_stood_begins_anew(
    strategy: Strategy, second: str
) -> None:
    made = world("ppp", strategy, intensity=20)
    made.machine = SupervisionMachine(
        [ChildPolicy(child=c) for c in "abc"],
        strategy=strategy,
        intensity=20,
        period_ns=5 * SECOND_NS,
        back_off=BackOff(first_ns=SECOND_NS, jitter=0),
    )
    made.event(StartRequested())
    assert made.dies("b").split()[-1] == ("+b2" if strategy is ONE else "+c2")
    assert "+b" not in made.dies("b")
    assert made.machine.states["b"] is ChildState.WAITING
    if strategy is ONE:
        assert made.dies("a") == "+a2", "others do not wait with it"
    made.journal.clear()
    made.event(ChildTimerFired(child="b", incarnation=1))  # of another life
    assert made.journal == []
    made.now_ns += SECOND_NS
    made.event(ChildTimerFired(child="b", incarnation=2))
    assert " ".join(made.journal) == second
    made.now_ns += 5 * SECOND_NS
    assert "+b4" in made.dies("b").split()


def test_a_stop_ends_a_back_off() -> None:
    made = world("p")
    back_off = BackOff(first_ns=SECOND_NS)
    made.machine = SupervisionMachine([ChildPolicy(child="a")], strategy=ONE, back_off=back_off)
    made.event(StartRequested())
    made.dies("a")
    made.dies("a")
    made.event(StopRequested(reason="test"))
    assert made.journal[-1] == "stopped"
