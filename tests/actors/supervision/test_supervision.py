"""The supervision machine: OTP's semantics as a table, and random trees of events with invariants."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines.supervision_world import ALL, ONE, REST, SECOND_NS, E, World, world

from zbmd.actors.supervision.events import (
    Action,
    AddRequested,
    AutoShutdown,
    BackOff,
    CancelChildTimer,
    ChildExited,
    ChildPolicy,
    ChildStarted,
    ChildStartFailed,
    ChildTimerFired,
    DeleteRequested,
    Escalate,
    Event,
    KillChild,
    LeaveDown,
    Refuse,
    Restart,
    RestartRequested,
    SetChildTimer,
    StartChild,
    StartRequested,
    StopChild,
    Stopped,
    StopRequested,
    Strategy,
    TerminateRequested,
)
from zbmd.actors.supervision.machine import ChildState, SupervisionMachine, SupervisorPhase
from zbmd.transport.errors import LocalProtocolError

# (restart types of a, b, c …; strategy; who dies; how; what follows)
OTP = [
    # one_for_one: the child alone.
    ("ppp", ONE, "b", False, "+b2"),
    ("ppp", ONE, "b", True, "+b2"),
    ("ptp", ONE, "b", False, "+b2"),
    ("ptp", ONE, "b", True, "_b"),
    # A temporary child is forgotten at its end.
    ("pep", ONE, "b", False, "_b ~b"),
    ("pep", ONE, "b", True, "_b ~b"),
    # one_for_all: all others stop, last first, then all start, first first.
    ("ppp", ALL, "a", False, "-c -b +a2 +b2 +c2"),
    ("ppp", ALL, "b", True, "-c -a +a2 +b2 +c2"),
    ("ppp", ALL, "c", False, "-b -a +a2 +b2 +c2"),
    ("ptp", ALL, "b", True, "_b"),
    ("pep", ALL, "b", False, "_b ~b"),
    # A temporary sibling is stopped and not restarted.
    ("pep", ALL, "a", False, "-c -b _b ~b +a2 +c2"),
    # A transient sibling is restarted though its stop was normal.
    ("ptp", ALL, "a", False, "-c -b +a2 +b2 +c2"),
    # rest_for_one: those that started after it.
    ("ppp", REST, "a", False, "-c -b +a2 +b2 +c2"),
    ("ppp", REST, "b", False, "-c +b2 +c2"),
    ("ppp", REST, "c", False, "+c2"),
    ("ppe", REST, "b", False, "-c _c ~c +b2"),
    ("ptp", REST, "b", True, "_b"),
    ("epp", REST, "a", False, "_a ~a"),
]


@pytest.mark.parametrize(("restarts", "strategy", "who", "normal", "follows"), OTP)
def test_otp_table(restarts: str, strategy: Strategy, who: str, normal: bool, follows: str) -> None:
    assert world(restarts, strategy).dies(who, normal=normal) == follows


def test_children_start_in_order_and_stop_in_reverse() -> None:
    w = world("ppp")
    assert w.journal == ["+a1", "+b1", "+c1"]
    w.journal.clear()
    w.event(StopRequested(reason="test"))
    assert w.journal == ["-c", "-b", "-a", "stopped"]
    assert w.machine.phase is SupervisorPhase.STOPPED
    w.event(StopRequested(reason="again"))
    assert w.journal[-1] == "stopped"


# (shutdown of a, b, c; what happens, one after the other; what follows from the last)
# "stop" and "kill" are asked of the supervisor; "<b" makes b slow to stop, ">b" lets it end; "@" is late.
SHUTDOWN = [
    # brutal_kill, a time, infinity: in reverse order, each when the one after it has ended.
    ("555", "stop", "-c -b -a stopped"),
    ("k5i", "stop", "-c -b !a stopped"),
    ("iik", "stop", "!c -b -a stopped"),
    ("555", "<b stop", "-c -b"),
    ("555", "<b stop >b", "-a stopped"),
    ("555", "<b stop @", "!b -a stopped"),
    ("5i5", "<b stop @", ""),
    ("5i5", "<b stop @ >b", "-a stopped"),
    ("5i5", "<b stop kill", "!b !a stopped"),
    ("555", "<b stop kill", "!b !a stopped"),
    ("5k5", "<b stop", "-c !b -a stopped"),
]


@pytest.mark.parametrize(("shutdown", "steps", "follows"), SHUTDOWN)
def test_otp_table_of_shutdown(shutdown: str, steps: str, follows: str) -> None:
    made = world("ppp", shutdown=shutdown)
    for step in steps.split():
        made.journal.clear()
        match step[0]:
            case "<":
                made.slow.add(step[1])
            case ">":
                made.event(ChildExited(child=step[1], normal=True, reason="asked"))
            case "@":
                made.fire_timers()
            case _:
                made.event(StopRequested(reason="test", kill=step == "kill"))
    assert " ".join(made.journal) == follows


ANY_ENDS, ALL_END = AutoShutdown.ANY_SIGNIFICANT, AutoShutdown.ALL_SIGNIFICANT

# (restart types, capitals for significant ones; strategy; what happens; what follows from the last)
# "!b" fails, ".b" ends normally, "-b" is terminated, "+b" restarted, "<b" is slow to stop, ">b" has stopped.
AUTO_SHUTDOWN = [
    # A transient child that ends normally, a temporary one that ends, takes all along; that is no failure.
    ("pTp", ONE, ANY_ENDS, ".b", "_b -c -a stopped"),
    ("pTp", ONE, ANY_ENDS, "!b", "+b2"),
    ("pEp", ONE, ANY_ENDS, ".b", "_b ~b -c -a stopped"),
    ("pEp", ONE, ANY_ENDS, "!b", "_b ~b -c -a stopped"),
    ("tTe", ONE, ANY_ENDS, ".a", "_a"),
    ("tTe", ONE, ANY_ENDS, ".c", "_c ~c"),
    ("pTp", ALL, ANY_ENDS, ".b", "_b -c -a stopped"),
    ("pTp", REST, ANY_ENDS, ".b", "_b -c -a stopped"),
    # The last of them.
    ("TTp", ONE, ALL_END, ".a", "_a"),
    ("TTp", ONE, ALL_END, ".a .b", "_b -c stopped"),
    ("TEp", ONE, ALL_END, ".a !b", "_b ~b -c stopped"),
    ("TTp", ONE, ALL_END, ".a !b .b", "_b -c stopped"),
    ("Ttp", ONE, ALL_END, ".b", "_b"),
    # One that ends because the supervisor stops it does not count: with its siblings, or by request.
    ("TpT", ALL, ANY_ENDS, "!b", "-c -a +a2 +b2 +c2"),
    ("EpE", ALL, ANY_ENDS, "!b", "-c _c ~c -a _a ~a +b2"),
    ("ppE", REST, ANY_ENDS, "!b", "-c _c ~c +b2"),
    ("pTp", ONE, ANY_ENDS, "-b", "-b _b"),
    ("pEp", ONE, ALL_END, "-b", "-b _b ~b"),
    ("TTp", ONE, ALL_END, "-a .b", "_b -c stopped"),
    ("TTp", ONE, ALL_END, "<a -a .b >a", "-c stopped"),
    # One that was restarted counts again.
    ("TTp", ONE, ALL_END, ".a +a .b", "_b"),
    ("TTp", ONE, ALL_END, ".a +a .b .a", "_a -c stopped"),
]


@pytest.mark.parametrize(("restarts", "strategy", "auto", "steps", "follows"), AUTO_SHUTDOWN)
def test_otp_table_of_significant_children(
    restarts: str, strategy: Strategy, auto: AutoShutdown, steps: str, follows: str
) -> None:
    made = world(restarts, strategy, auto_shutdown=auto)
    for step in steps.split():
        made.journal.clear()
        match step[0]:
            case "-":
                made.event(TerminateRequested(child=step[1]))
            case "+":
                made.event(RestartRequested(child=step[1]))
            case "<":
                made.slow.add(step[1])
            case _:
                made.event(ChildExited(child=step[1], normal=step[0] != "!", reason="test"))
    assert " ".join(made.journal) == follows


# (restart types; who fails to start the first time; what follows)
FIRST_START = [
    ("ppp", "a", "+a1 escalate"),
    ("ppp", "b", "+a1 +b1 -a escalate"),
    ("ppp", "c", "+a1 +b1 +c1 -b -a escalate"),
    ("ttt", "b", "+a1 +b1 -a escalate"),
    ("eee", "b", "+a1 +b1 -a escalate"),
]


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize(("restarts", "who", "follows"), FIRST_START)
def test_otp_table_of_first_starts(strategy: Strategy, restarts: str, who: str, follows: str) -> None:
    made = world(restarts, strategy, start=False)
    made.fails = {who: 1}
    made.event(StartRequested())
    assert " ".join(made.journal) == follows


# (strategy; who dies; how often whose next start fails; intensity; what follows)
RESTART_FAILS = [
    (ONE, "b", "b", 1, 3, "+b2 +b3"),
    (ONE, "b", "b", 2, 3, "+b2 +b3 +b4"),
    (ONE, "b", "b", 3, 3, "+b2 +b3 +b4 -c -a escalate"),
    (REST, "b", "c", 1, 3, "-c +b2 +c2 +c3"),
    (REST, "b", "b", 1, 3, "-c +b2 +b3 +c2"),
    (REST, "a", "b", 2, 2, "-c -b +a2 +b2 +b3 -a escalate"),
    (ALL, "b", "c", 1, 3, "-c -a +a2 +b2 +c2 -b -a +a3 +b3 +c3"),
    (ALL, "b", "a", 1, 3, "-c -a +a2 +a3 +b2 +c2"),
    (ALL, "b", "c", 1, 1, "-c -a +a2 +b2 +c2 -b -a escalate"),
]


@pytest.mark.parametrize(("strategy", "dies", "fails", "times", "intensity", "follows"), RESTART_FAILS)
def test_otp_table_of_restarts_that_fail(
    strategy: Strategy, dies: str, fails: str, times: int, intensity: int, follows: str
) -> None:
    """Each attempt counts, and is one more restart under the strategy."""
    made = world("ppp", strategy, intensity=intensity)
    made.fails = {fails: times}
    assert made.dies(dies) == follows


# (strategy; intensity in 5 s; when a child dies, s; whether the supervisor gives up at the last)
INTENSITY = [
    (ONE, 0, "0", True),
    (ONE, 1, "0", False),
    (ONE, 1, "0 5", True),
    (ONE, 1, "0 5.1", False),
    (ONE, 3, "0 0 0", False),
    (ONE, 3, "0 0 0 0", True),
    (ALL, 2, "0 1 2", True),
    (ALL, 2, "0 1 6.1 7", False),
    (REST, 2, "0 4 5.5 9.5 11", False),
    (REST, 2, "0 4 5.5 9.5 10", True),
]


@pytest.mark.parametrize(("strategy", "intensity", "at", "gives_up"), INTENSITY)
def test_otp_table_of_intensity(strategy: Strategy, intensity: int, at: str, gives_up: bool) -> None:
    """A restart of a whole group counts once; the window slides, and its edge belongs to it."""
    made = world("ppp", strategy, intensity=intensity)
    *before, last = [int(float(second) * SECOND_NS) for second in at.split()]
    for made.now_ns in before:
        assert "escalate" not in made.dies("b")
    made.now_ns = last
    assert ("escalate" in made.dies("b")) is gives_up


def test_the_next_child_waits_until_the_one_before_is_up() -> None:
    w = world("pp", start=False)
    w.slow = {"a"}
    w.event(StartRequested())
    assert w.journal == ["+a1"]
    w.event(ChildStarted(child="a"))
    assert w.journal == ["+a1", "+b1"]


def test_intensity_zero_escalates_at_the_first_failure_with_the_cause() -> None:
    w = world("pp", intensity=0)
    actions = w.machine.handle(ChildExited(child="a", normal=False, reason="bit rot"), now_ns=0)
    assert [type(a) for a in actions] == [StopChild, SetChildTimer]
    assert "bit rot" in actions[0].reason  # type: ignore[union-attr]
    end = w.machine.handle(ChildExited(child="b", normal=True, reason="asked"), now_ns=0)
    assert isinstance(end[-1], Escalate) and "a failed: bit rot" in end[-1].reason


def test_one_group_restart_counts_once() -> None:
    w = world("pppp", ALL, intensity=1)
    assert w.dies("b") == "-d -c -a +a2 +b2 +c2 +d2"
    assert "escalate" in w.dies("b")


def test_restarts_of_single_children_do_not_wait_for_one_another() -> None:
    w = world("ppp", slow="ac")
    assert w.dies("a") == "+a2"
    assert w.dies("c") == "+c2"
    w.event(ChildStarted(child="c"))
    assert w.machine.states["c"] is ChildState.RUNNING


def test_a_death_during_a_group_restart_changes_the_plan_at_once() -> None:
    w = world("ppp", ALL, slow="b")
    assert w.dies("c") == "-b"  # b takes its time to stop
    w.event(ChildExited(child="b", normal=True, reason="asked"))
    assert w.journal == ["-b", "-a", "+a2", "+b2"]  # b takes its time to start
    assert w.dies("a") == "-b"
    w.event(ChildExited(child="b", normal=True, reason="asked"))
    assert w.journal == ["-b", "+a3", "+b3"]


def test_a_condemned_child_that_dies_by_itself_is_not_counted() -> None:
    w = world("ppp", ALL, intensity=1, slow="c")
    assert w.dies("a") == "-c"
    assert w.dies("b") == ""
    assert w.dies("c") == "+a2 +b2 +c2"


def test_the_shutdown_deadline_kills() -> None:
    w = world("pp", slow="b")
    actions = w.machine.handle(StopRequested(reason="test"), now_ns=7)
    assert actions == [
        StopChild(child="b", reason="test"),
        SetChildTimer(child="b", incarnation=1, at_ns=7 + 5 * SECOND_NS),
    ]
    assert w.machine.handle(ChildTimerFired(child="b", incarnation=0), now_ns=8) == []
    killed = w.machine.handle(ChildTimerFired(child="b", incarnation=1), now_ns=8)
    assert isinstance(killed[0], KillChild) and "5 s" in killed[0].reason
    w.event(ChildExited(child="b", normal=False, reason="killed"))
    assert w.machine.phase is SupervisorPhase.STOPPED


def test_a_child_without_shutdown_time_is_killed_and_a_second_stop_kills_all() -> None:
    machine = SupervisionMachine([ChildPolicy(child="a", shutdown_ns=0)], strategy=ONE)
    w = World(machine)
    w.event(StartRequested())
    w.event(StopRequested(reason="test"))
    assert w.journal == ["+a1", "!a", "stopped"]
    w = world("ppp", slow="abc")
    w.journal.clear()
    w.event(StopRequested(reason="ctrl-c"))
    assert w.journal == ["-c"]
    w.event(StopRequested(reason="ctrl-c again", kill=True))
    assert w.journal == ["-c", "!c", "!b", "!a", "stopped"]


def test_a_start_under_way_can_be_stopped() -> None:
    w = world("pp", start=False)
    w.slow = {"a"}
    w.event(StartRequested())
    w.event(StopRequested(reason="test"))
    w.event(ChildStarted(child="a"))
    assert w.machine.states["a"] is ChildState.STOPPING
    w.event(ChildExited(child="a", normal=True, reason="asked"))
    assert w.journal == ["+a1", "-a", "stopped"]
    w = world("pp", start=False)
    w.slow = {"a"}
    w.event(StartRequested())
    w.event(StopRequested(reason="test"))
    w.event(ChildStartFailed(child="a", reason="cancelled"))
    assert w.journal == ["+a1", "-a", "stopped"]


def test_stopping_before_the_start_and_no_children_at_all() -> None:
    w = world("p", start=False)
    w.event(StopRequested(reason="test"))
    assert w.journal == ["stopped"]
    w = world("")
    w.event(StopRequested(reason="test"))
    assert w.journal == ["stopped"]


MISUSES: list[Callable[[], object]] = [
    lambda: SupervisionMachine([ChildPolicy(child="a"), ChildPolicy(child="a")], strategy=ONE),
    lambda: SupervisionMachine([ChildPolicy(child="a", shutdown_ns=-1)], strategy=ONE),
    lambda: world("P", auto_shutdown=ANY_ENDS),
    lambda: world("T"),
    lambda: world("p").event(AddRequested(policy=ChildPolicy(child="b", restart=E, significant=True))),
    lambda: SupervisionMachine([], strategy=ONE, intensity=-1),
    lambda: SupervisionMachine([], strategy=ONE, period_ns=0),
    lambda: world("p").event(StartRequested()),
    lambda: world("p").event(ChildStarted(child="a")),
    lambda: world("p").event(ChildStartFailed(child="a", reason="")),
    lambda: world("p").event(ChildStarted(child="z")),
    lambda: world("p", start=False).dies("a"),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_told(misuse: Callable[[], object]) -> None:
    with pytest.raises(LocalProtocolError):
        misuse()


def test_an_error_tells_what_came_before() -> None:
    w = world("p")
    with pytest.raises(LocalProtocolError, match=r"running.*before it: StartRequested.*ChildStarted"):
        w.event(ChildStarted(child="a"))


# Random histories: real children that start, fail, stop and die whenever they like.


@dataclass
class Life:
    """A driver's knowledge of one child."""

    up: bool = False
    asked: bool = False


class RandomDriver:
    """Performs actions after random delays; checks what any observer may expect."""

    def __init__(self, rng: random.Random, machine: SupervisionMachine, order: list[str]) -> None:
        self.rng = rng
        self.machine = machine
        self.order = order
        self.lives: dict[str, Life] = {}
        self.ended: list[str] = []
        self.now_ns = 0
        self.timers: dict[str, SetChildTimer] = {}
        self.added: set[str] = set()
        self.terminated: set[str] = set()

    def step(self, event: Event) -> None:
        if isinstance(event, ChildExited | ChildStartFailed):
            del self.lives[event.child]
        actions = self.machine.handle(event, now_ns=self.now_ns)
        self.machine.check_invariants()
        self.order[:] = [child for child in self.order if child in self.machine.states]
        for action in actions:
            assert not self.ended, "an end is the last action"
            self.perform(action)
        idle = (ChildState.DOWN, ChildState.QUEUED, ChildState.WAITING)
        alive = {c for c, s in self.machine.states.items() if s not in idle}
        assert alive == set(self.lives)

    def perform(self, action: Action) -> None:
        match action:
            case StartChild():
                assert action.child not in self.lives, "never two lives of one child"
                assert action.reason
                self.lives[action.child] = Life()
            case StopChild() | KillChild():
                later = self.order[self.order.index(action.child) + 1 :]
                if isinstance(action, StopChild) and self.machine.phase is SupervisorPhase.STOPPING:
                    later = [c for c in later if c not in self.added or action.child not in self.added]
                    assert not any(c in self.lives for c in later), "stops go from the last to the first"
                self.lives[action.child].asked = True
            case SetChildTimer():
                assert action.child not in self.timers
                self.timers[action.child] = action
            case CancelChildTimer():
                assert self.timers.pop(action.child).incarnation == action.incarnation
            case LeaveDown():
                assert action.child not in self.lives
            case Refuse():
                pass
            case Escalate() | Stopped():
                assert not self.lives, "nothing lives after the end"
                self.ended.append(type(action).__name__)

    def random_request(self) -> Event:
        """Any request, sensible or not."""
        child = self.rng.choice("abcdefghijkl")
        request = self.rng.choice([AddRequested, TerminateRequested, RestartRequested, DeleteRequested])
        if request is AddRequested:
            if child not in self.order and self.machine.phase is SupervisorPhase.RUNNING:
                self.order.append(child)
                self.added.add(child)
                self.terminated.discard(child)
            restart = self.rng.choice(list(Restart))
            return AddRequested(policy=ChildPolicy(child=child, restart=restart, shutdown_ns=5))
        if request is TerminateRequested:
            self.terminated.add(child)
            return TerminateRequested(child=child)
        if request is RestartRequested:
            return RestartRequested(child=child)
        return DeleteRequested(child=child)

    def random_event(self, *, calm: bool) -> Event | None:
        """Something that may happen now; when calm, only what the machine waits for."""
        choices: list[Event] = []
        for child, life in self.lives.items():
            if not life.up and not life.asked:
                choices.append(ChildStarted(child=child))
                if not calm:
                    choices.append(ChildStartFailed(child=child, reason="random"))
            if life.asked or not calm:
                choices.append(ChildExited(child=child, normal=self.rng.random() < 0.5, reason="random"))
        choices += [ChildTimerFired(child=t.child, incarnation=t.incarnation) for t in self.timers.values()]
        if not choices:
            return None
        event = self.rng.choice(choices)
        if isinstance(event, ChildStarted):
            self.lives[event.child].up = True
        if isinstance(event, ChildTimerFired):
            self.now_ns = max(self.now_ns, self.timers.pop(event.child).at_ns)
        return event


@given(seed=st.integers(0, 2**64 - 1))
def test_random_histories_keep_the_invariants_and_come_to_an_end(seed: int) -> None:
    rng = random.Random(seed)
    order = list("abcdefgh"[: rng.randint(1, 8)])
    children = [
        ChildPolicy(child=c, restart=rng.choice(list(Restart)), shutdown_ns=rng.choice([0, 5])) for c in order
    ]
    machine = SupervisionMachine(
        children,
        strategy=rng.choice(list(Strategy)),
        intensity=rng.randint(0, 6),
        period_ns=100,
        back_off=rng.choice([None, BackOff(first_ns=30, max_ns=200, seed=seed)]),
    )
    asks = rng.choice([0.0, 0.3])
    driver = RandomDriver(rng, machine, order)
    driver.step(StartRequested())
    for _ in range(rng.randint(0, 80)):
        driver.now_ns += rng.randint(0, 20)
        event = driver.random_request() if rng.random() < asks else driver.random_event(calm=False)
        if event is None or driver.ended:
            break
        driver.step(event)
    # Liveness: left alone, every start finishes and nobody dies: the tree stands, or has ended.
    while not driver.ended and (event := driver.random_event(calm=True)) is not None:
        driver.step(event)
    if not driver.ended:
        assert set(machine.states.values()) <= {ChildState.RUNNING, ChildState.DOWN}
        for child in children:
            if child.restart is Restart.PERMANENT and child.child not in driver.terminated:
                assert machine.states[child.child] is ChildState.RUNNING
        driver.step(StopRequested(reason="the end", kill=rng.random() < 0.3))
        while not driver.ended and (event := driver.random_event(calm=True)) is not None:
            driver.step(event)
    assert driver.ended in (["Stopped"], ["Escalate"])
    assert machine.phase is SupervisorPhase.STOPPED
