"""A change of code by any history: processes and the coordinator die, versions crash, answers take long."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.upgrade import events as ev
from zbmd.actors.upgrade.coordinator import COORDINATOR, Step, UpgradeAgent, UpgradeMachine, UpgradePhase
from zbmd.actors.upgrade.events import Fate, Order
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

ANSWER_NS = 1000
PROBATION_NS = 100
STEPS_MAX = 5000

Message = ev.LocalEvent | ev.Event
Local = ev.LocalChecked | ev.LocalChanged | ev.LocalSettled


@dataclass
class Process:
    """One agent, and what goes on in its process."""

    agent: UpgradeAgent
    work: deque[Local] = field(default_factory=deque[Local])
    """The work that its actors will have done, in order."""
    runs_new: bool = False
    on_probation: bool = False
    ended: bool = False
    broke: bool = False


class World:
    """A coordinator, processes, a queue of messages between each two. `bad`: how often things go wrong."""

    def __init__(self, rng: random.Random, stages: list[list[str]], bad: float) -> None:
        self.rng, self.bad = rng, bad
        self.machine = UpgradeMachine(stages, answer_ns=ANSWER_NS, probation_ns=PROBATION_NS)
        names = [name for stage in stages for name in stage]
        self.processes = {name: Process(UpgradeAgent(name, names)) for name in names}
        self.queues: dict[tuple[str, str], deque[Message]] = {}
        self.timer_ns: int | None = None
        self.now_ns = 0
        self.finished: ev.Finished | None = None
        self.coordinator_lives = True
        self.kept_by_machine = False
        self.broke_before_decision = False
        self.coordinate(ev.Begin())

    def send(self, source: str, to: str, message: Message) -> None:
        if to in self.processes or (to == COORDINATOR and self.coordinator_lives):
            self.queues.setdefault((source, to), deque()).append(message)

    def coordinate(self, event: ev.Event) -> None:
        actions = self.machine.handle(event, now_ns=self.now_ns)
        self.machine.check_invariants()
        for action in actions:
            match action:
                case ev.SendOrder(process=process, order=order):
                    self.kept_by_machine |= order is Order.KEEP
                    self.send(COORDINATOR, process, ev.Ordered(leader=COORDINATOR, order=order))
                case SetTimer(at_ns=at_ns):
                    self.timer_ns = at_ns
                case ev.CancelTimer():
                    self.timer_ns = None
                case ev.Finished():
                    assert self.finished is None
                    self.finished = action
                    self.gone(COORDINATOR)

    def local(self, name: str, event: ev.LocalEvent) -> None:
        process = self.processes[name]
        actions = process.agent.handle(event, now_ns=self.now_ns)
        process.agent.check_invariants()
        for action in actions:
            match action:
                case ev.Check():
                    process.work.append(ev.LocalChecked(why="no such class" if self.chance() else ""))
                case ev.ChangeActors():
                    process.on_probation = True
                    process.work.append(ev.LocalChanged(actors=1, why="it raised" if self.chance() else ""))
                case ev.KeepNew():
                    process.runs_new, process.on_probation = True, False
                    process.work.append(ev.LocalSettled())
                case ev.TakeBack():
                    process.runs_new = process.on_probation = False
                    process.work.append(ev.LocalSettled())
                case ev.Voted() | ev.Changed() | ev.Broke() | ev.Settled():
                    self.send(name, COORDINATOR, action)
                case ev.SaySettled(leader=leader):
                    self.send(name, leader, ev.FollowerSettled(process=name))
                case ev.AskFate(process=other):
                    self.send(name, other, ev.FateAsked(leader=name))
                case ev.TellFate(leader=leader, fate=fate):
                    self.send(name, leader, ev.FateReported(process=name, fate=fate))
                case ev.TellOther(process=other, order=order):
                    self.send(name, other, ev.Ordered(leader=name, order=order))
                case ev.End():
                    process.ended = True
                    for other in self.processes.keys() - {name}:
                        self.send(name, other, ev.LeaderLost(process=name))  # as an agent it is gone

    def chance(self) -> bool:
        return self.rng.random() < self.bad

    def gone(self, name: str) -> None:
        """It is dead. Some of what it had said still comes, and after that the news of its end."""
        if name == COORDINATOR:
            self.coordinator_lives = False
        else:
            del self.processes[name]
        self.queues = {pair: queue for pair, queue in self.queues.items() if pair[1] != name}
        for other in [*self.processes, *([COORDINATOR] if self.coordinator_lives else [])]:
            queue = self.queues.setdefault((name, other), deque())
            if self.finished is None:
                while queue and self.rng.random() < 0.5:
                    queue.pop()
            lost = ev.ProcessLost(process=name, why="killed")
            queue.append(lost if other == COORDINATOR else ev.LeaderLost(process=name))

    def step(self) -> bool:
        """Something happens; False if nothing can."""
        full = [pair for pair, queue in self.queues.items() if queue]
        busy = [name for name, process in self.processes.items() if process.work]
        choices: list[object] = [*full, *busy]
        timed = self.coordinator_lives and self.timer_ns is not None
        if timed and (not choices or self.rng.random() < 0.02):
            assert self.timer_ns is not None
            self.now_ns, self.timer_ns = max(self.now_ns, self.timer_ns), None
            self.coordinate(TimerFired())
            return True
        if not choices:
            return False
        if self.chance():
            self.misfortune()
            return True
        chosen = self.rng.choice(choices)
        self.now_ns += 1
        if isinstance(chosen, str):
            self.local(chosen, self.processes[chosen].work.popleft())
        else:
            source, to = next(pair for pair in full if pair == chosen)
            message = self.queues[source, to].popleft()
            if to == COORDINATOR:
                assert isinstance(message, ev.Event)
                self.broke_before_decision |= isinstance(message, ev.Broke) and self.machine.fate is Fate.OPEN
                self.coordinate(message)
            else:
                assert isinstance(message, ev.LocalEvent)
                self.local(to, message)
        return True

    def misfortune(self) -> None:
        names = list(self.processes)
        what = self.rng.randrange(6)
        if what == 0 and self.coordinator_lives:
            self.gone(COORDINATOR)
        elif what == 1 and names:
            self.gone(self.rng.choice(names))
        else:
            trying = [name for name in names if self.processes[name].on_probation]
            if trying:
                name = self.rng.choice(trying)
                self.processes[name].broke = True
                self.local(name, ev.LocalBroke(why="boom"))

    def run(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise AssertionError("it does not come to an end")


@given(
    seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    bad=st.sampled_from([0.0, 0.01, 0.03, 0.1, 0.3]),
)
def test_all_that_live_end_with_the_same_version(seed: int, sizes: list[int], bad: float) -> None:
    numbers = iter(range(sum(sizes)))
    world = World(random.Random(seed), [[f"p{next(numbers)}" for _ in range(size)] for size in sizes], bad)
    world.run()
    fates = {process.agent.fate for process in world.processes.values()}
    assert len(fates) <= 1, "some keep what others take back"
    for name, process in world.processes.items():
        assert process.ended and process.agent.step is Step.OVER, name
        assert process.runs_new is (process.agent.fate is Fate.KEPT) and not process.on_probation
    if world.finished is not None:
        assert fates <= {world.finished.fate}
        assert (world.finished.reason == "") is (world.finished.fate is Fate.KEPT)
    if fates == {Fate.KEPT}:
        assert world.kept_by_machine, "nobody but the coordinator finds that the probation is over"
    if world.broke_before_decision:
        assert fates <= {Fate.TAKEN_BACK}
    if bad == 0 and world.finished is not None and not world.finished.reason.count("in time"):
        assert world.finished.fate is Fate.KEPT and world.finished.actors == sum(sizes)


def machine(*stages: list[str]) -> UpgradeMachine:
    made = UpgradeMachine(stages, answer_ns=ANSWER_NS, probation_ns=PROBATION_NS)
    made.handle(ev.Begin(), now_ns=0)
    return made


def orders(actions: list[ev.Action]) -> list[tuple[str, Order]]:
    return [(a.process, a.order) for a in actions if isinstance(a, ev.SendOrder)]


def test_the_rest_changes_only_after_the_canary_has_stood_its_probation() -> None:
    upgrade = machine(["a"], ["b", "c"])
    upgrade.handle(ev.Voted(process="a", why=""), now_ns=1)
    upgrade.handle(ev.Voted(process="b", why=""), now_ns=1)
    assert orders(upgrade.handle(ev.Voted(process="c", why=""), now_ns=1)) == [("a", Order.CHANGE)]
    changed = upgrade.handle(ev.Changed(process="a", actors=3, why=""), now_ns=2)
    assert changed == [SetTimer(at_ns=2 + PROBATION_NS)] and upgrade.phase is UpgradePhase.ON_PROBATION
    after = upgrade.handle(TimerFired(), now_ns=102)
    assert orders(after) == [("b", Order.CHANGE), ("c", Order.CHANGE)]


def test_a_canary_that_dies_takes_the_change_back_and_one_that_never_changed_does_not() -> None:
    upgrade = machine(["a"], ["b"])
    for process in ("a", "b"):
        upgrade.handle(ev.Voted(process=process, why=""), now_ns=1)
    upgrade.handle(ev.ProcessLost(process="b", why="killed"), now_ns=1)
    assert upgrade.fate is Fate.OPEN
    upgrade.handle(ev.Changed(process="a", actors=1, why=""), now_ns=2)
    upgrade.handle(ev.ProcessLost(process="a", why="killed"), now_ns=2)
    assert upgrade.fate is Fate.TAKEN_BACK


def test_a_process_that_does_not_answer_is_named() -> None:
    upgrade = machine(["a"], ["b"])
    upgrade.handle(ev.Voted(process="a", why=""), now_ns=1)
    upgrade.handle(TimerFired(), now_ns=ANSWER_NS)
    upgrade.handle(ev.Settled(process="a"), now_ns=ANSWER_NS + 1)
    (finished,) = [
        a for a in upgrade.handle(TimerFired(), now_ns=2 * ANSWER_NS) if isinstance(a, ev.Finished)
    ]
    assert finished.fate is Fate.TAKEN_BACK and "b did not answer" in finished.reason
    assert finished.silent == ("b",)


def test_a_process_that_is_lost_before_it_has_settled_is_named() -> None:
    upgrade = machine(["a", "b"])
    for process in ("a", "b"):
        upgrade.handle(ev.Voted(process=process, why=""), now_ns=1)
    for process in ("a", "b"):
        upgrade.handle(ev.Changed(process=process, actors=1, why=""), now_ns=2)
    upgrade.handle(TimerFired(), now_ns=3)
    assert upgrade.fate is Fate.KEPT
    upgrade.handle(ev.Settled(process="a"), now_ns=4)
    actions = upgrade.handle(ev.ProcessLost(process="b", why="cut off"), now_ns=5)
    (finished,) = [a for a in actions if isinstance(a, ev.Finished)]
    assert finished.fate is Fate.KEPT and finished.silent == ("b",)
    assert orders(actions) == [("a", Order.DISMISS)]


def test_nobody_obeys_two_leaders_who_differ() -> None:
    agent = UpgradeAgent("a", ["a", "b"])
    agent.handle(ev.Ordered(leader=COORDINATOR, order=Order.PREPARE), now_ns=0)
    agent.handle(ev.LocalChecked(why=""), now_ns=0)
    agent.handle(ev.Ordered(leader=COORDINATOR, order=Order.TAKE_BACK), now_ns=0)
    with pytest.raises(RemoteProtocolError):
        agent.handle(ev.Ordered(leader="b", order=Order.KEEP), now_ns=0)


@pytest.mark.parametrize("stages", [[], [[]], [["a"], []], [["a"], ["a"]]])
def test_stages_name_each_process_once(stages: list[list[str]]) -> None:
    with pytest.raises(LocalProtocolError):
        UpgradeMachine(stages, answer_ns=1, probation_ns=0)
