"""The simulator: one seed, one history; the network's promises; kills between any two effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.hash_seeds import printed_under_hash_seeds

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim import (
    SIM_START_NS,
    Arrived,
    CancelTimer,
    Commanded,
    Conditions,
    Effect,
    Exit,
    HistoryKind,
    Kill,
    KillPoint,
    MachineProcess,
    Note,
    PeerEnded,
    Process,
    RunEnd,
    Send,
    SetTimer,
    Simulation,
    SimulationFailure,
    Start,
    Started,
    Stimulus,
    TimerFired,
    machines,
)

STORM = Conditions(
    jitter_ns=200_000, loss=0.1, duplicate=0.1, reorder=0.2, timer_lag_ns=50_000, start_max_ns=3_000_000
)


class Scripted:
    """A process that answers each stimulus with what `react` says; it keeps its stimuli."""

    def __init__(self, react: Callable[[Stimulus[int]], Sequence[Effect[int]]] | None = None) -> None:
        self.react = react
        self.told: list[Stimulus[int]] = []

    def deliver(self, stimulus: Stimulus[int], *, now_ns: int) -> Sequence[Effect[int]]:
        self.told.append(stimulus)
        return self.react(stimulus) if self.react is not None else ()

    def check_invariants(self) -> None:
        assert self.told, "a process is checked only after a stimulus"

    @property
    def messages(self) -> list[int]:
        return [told.message for told in self.told if isinstance(told, Arrived)]

    @property
    def ended(self) -> list[PeerEnded]:
        return [told for told in self.told if isinstance(told, PeerEnded)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """A command: send the numbers `first` … `first + count - 1` to `to`."""

    to: str
    count: int
    first: int = 0


def burst(stimulus: Stimulus[int]) -> Sequence[Effect[int]]:
    match stimulus:
        case Commanded(command=Burst() as command):
            numbers = range(command.first, command.first + command.count)
            return [Send(to=command.to, message=number) for number in numbers]
        case Commanded(command=Exit() | Kill() | Start() as effect):
            return [effect]
        case _:
            return []


class World:
    """A simulation of `Scripted` processes with `burst`'s manners; keeps every incarnation made."""

    def __init__(
        self, seed: int, names: str, conditions: Conditions | None = None, *, start: bool = True
    ) -> None:
        self.sim = Simulation[int](seed, conditions=conditions or Conditions())
        self.made: dict[tuple[str, int], Scripted] = {}
        for name in names:
            self.sim.add(name, self.factory(name), start=start)
        self.sim.run()

    def factory(self, name: str) -> Callable[[int], Process[int]]:
        def make(incarnation: int) -> Process[int]:
            process = self.made[(name, incarnation)] = Scripted(burst)
            return process

        return make

    def __getitem__(self, name: str) -> Scripted:
        return self.made[(name, self.sim.incarnation(name))]


class Gossip:
    """Forwards numbers at random, from a stream of the seed; restarts whom it sees die."""

    def __init__(self, name: str, names: str, rng: random.Random) -> None:
        self.name, self.names, self.rng, self.seen = name, names, rng, 0

    def deliver(self, stimulus: Stimulus[int], *, now_ns: int) -> Sequence[Effect[int]]:
        match stimulus:
            case Arrived(message=hops) if hops > 0:
                self.seen += 1
                to = self.rng.choice(self.names)
                timer = SetTimer(name="idle", at_ns=now_ns + 1_000_000)
                return [Send(to=to, message=hops - 1, nbytes=1000 * hops), timer, Note(value=(self.seen, to))]
            case Started():
                return [Send(to=self.names[0], message=20)]
            case TimerFired(name=timer):
                return [Note(value=timer), CancelTimer(name="none")]
            case _:
                return []

    def check_invariants(self) -> None:
        assert self.seen >= 0


def gossip_digest(seed: int, *, kill: KillPoint | None = None) -> str:
    return run_gossip(seed, kill=kill).digest()


def run_gossip(seed: int, *, kill: KillPoint | None = None) -> Simulation[int]:
    names = "abcd"
    sim = Simulation[int](seed, conditions=STORM)

    def factory(name: str) -> Callable[[int], Process[int]]:
        return lambda incarnation: Gossip(name, names, sim.rng(f"{name}#{incarnation}"))

    for name in names:
        sim.add(name, factory(name))
    if kill is not None:
        sim.crash_during(kill)
    sim.crash_at("b", SIM_START_NS + 400_000)
    sim.call_at(SIM_START_NS + 900_000, lambda: None if sim.lives("b") else sim.start("b"))
    assert sim.run() is RunEnd.QUIET
    return sim


def test_one_seed_one_history() -> None:
    digests = [gossip_digest(seed) for seed in range(20)]
    assert digests == [gossip_digest(seed) for seed in range(20)]
    assert len(set(digests)) == 20


def test_a_history_does_not_depend_on_the_hash_seed() -> None:
    digests = printed_under_hash_seeds(__file__, "gossip_digest(7)")
    assert digests == {gossip_digest(7) + "\n"}


def test_a_kill_leaves_the_history_before_it_as_it_was() -> None:
    calm = run_gossip(3)
    points = calm.kill_points()
    assert len(points) == len(set(points)) > 50
    for point in points[:: max(1, len(points) // 40)]:
        killed = run_gossip(3, kill=point)
        death = next(
            i
            for i, record in enumerate(killed.history)
            if record.kind is HistoryKind.CRASH
            and (record.process, record.incarnation) == (point.process, point.incarnation)
        )
        assert killed.history[:death] == calm.history[:death]


@given(seed=st.integers(0, 2**32), sent=st.integers(0, 30), effects=st.integers(0, 30))
def test_a_kill_cuts_between_effects(seed: int, sent: int, effects: int) -> None:
    world = World(seed, "ab")
    world.sim.crash_during(KillPoint("a", 1, 2, effects))
    world.sim.command("a", Burst(to="b", count=sent))
    world.sim.run()
    performed = min(sent, effects)
    assert not world.sim.lives("a")
    assert sum(record.kind is HistoryKind.SEND for record in world.sim.history) == performed
    assert world["b"].messages == list(range(len(world["b"].messages)))
    assert len(world["b"].messages) <= performed
    assert world["b"].ended == [PeerEnded(peer="a", incarnation=1, clean=False)]


def test_some_kills_lose_what_was_under_way_and_some_do_not() -> None:
    arrived: set[int] = set()
    for seed in range(60):
        world = World(seed, "ab")
        world.sim.crash_during(KillPoint("a", 1, 2, 3))
        world.sim.command("a", Burst(to="b", count=5))
        world.sim.run()
        arrived.add(len(world["b"].messages))
    assert arrived == {0, 1, 2, 3}


@given(seed=st.integers(0, 2**32), jitter_ns=st.integers(0, 10**7))
def test_a_pair_keeps_its_order(seed: int, jitter_ns: int) -> None:
    world = World(seed, "abc", Conditions(jitter_ns=jitter_ns))
    world.sim.command("a", Burst(to="c", count=20))
    world.sim.command("b", Burst(to="c", count=20, first=100))
    world.sim.call_at(world.sim.now_ns + 50_000, lambda: world.sim.pause("c", 10**6))
    world.sim.run()
    messages = world["c"].messages
    assert [message for message in messages if message < 100] == list(range(20))
    assert [message for message in messages if message >= 100] == list(range(100, 120))


def test_pairs_interleave() -> None:
    orders: set[tuple[int, ...]] = set()
    for seed in range(20):
        world = World(seed, "abc")
        world.sim.command("a", Burst(to="c", count=2))
        world.sim.command("b", Burst(to="c", count=2, first=100))
        world.sim.run()
        orders.add(tuple(world["c"].messages))
    assert len(orders) > 3


def test_loss_duplicates_and_reordering_happen_as_often_as_asked() -> None:
    def messages(conditions: Conditions) -> list[int]:
        world = World(1, "ab", conditions)
        world.sim.command("a", Burst(to="b", count=1000))
        world.sim.run()
        return world["b"].messages

    lossy, doubled = messages(Conditions(loss=0.2)), messages(Conditions(duplicate=0.2))
    shuffled = messages(Conditions(reorder=0.2))
    assert 700 < len(lossy) < 900
    assert lossy == sorted(set(lossy))
    assert 1100 < len(doubled) < 1300
    assert set(doubled) == set(range(1000))
    assert sorted(shuffled) == list(range(1000)) != shuffled
    assert messages(Conditions(loss=1.0)) == []


def test_bytes_take_their_time_on_the_link() -> None:
    slow = Conditions(latency_ns=0, jitter_ns=0, bandwidth_bytes_per_s=1_000_000)
    sim = Simulation[int](0, conditions=slow)
    sim.add("a", lambda _: Scripted(lambda told: [Send(to="b", message=i, nbytes=1000) for i in (1, 2)]))
    sim.add("b", lambda _: Scripted())
    sim.run()
    arrivals = [record.at_ns for record in sim.history if isinstance(record.detail, Arrived)]
    assert [at_ns - SIM_START_NS for at_ns in arrivals] == [1_000_000, 2_000_000]


def test_a_death_is_told_once_to_each_and_at_different_moments() -> None:
    world = World(5, "abcde")
    world.sim.crash("a")
    world.sim.command("b", Burst(to="a", count=3))
    world.sim.run()
    for name in "bcde":
        assert world[name].ended == [PeerEnded(peer="a", incarnation=1, clean=False)]
    told_ns = {record.at_ns for record in world.sim.history if isinstance(record.detail, PeerEnded)}
    assert len(told_ns) == 4


def test_a_notice_may_overtake_messages_unless_it_is_a_fence() -> None:
    def late(*, fence: bool) -> int:
        count = 0
        for seed in range(40):
            quick = Conditions(
                jitter_ns=500_000, notice_min_ns=0, notice_max_ns=200_000, notice_is_fence=fence
            )
            world = World(seed, "ab", quick)
            world.sim.command("a", Burst(to="b", count=10))
            world.sim.crash_at("a", world.sim.now_ns + 1)
            world.sim.run()
            told = world["b"].told
            (notice,) = world["b"].ended
            count += sum(isinstance(stimulus, Arrived) for stimulus in told[told.index(notice) :])
        return count

    assert late(fence=False) > 0
    assert late(fence=True) == 0


def test_a_clean_exit_loses_nothing_and_says_so() -> None:
    for seed in range(20):
        world = World(seed, "ab", Conditions(jitter_ns=10**7, notice_min_ns=0, notice_max_ns=10))
        world.sim.command("a", Burst(to="b", count=5))
        world.sim.command("a", Exit())
        world.sim.run()
        assert world["b"].messages == list(range(5))
        assert world["b"].told[-1] == PeerEnded(peer="a", incarnation=1, clean=True)


def test_a_replacement_is_new_and_gets_nothing_sent_to_the_dead() -> None:
    world = World(2, "abn", Conditions(latency_ns=10**6))
    world.sim.command("a", Burst(to="b", count=4))
    world.sim.call_at(world.sim.now_ns + 10, lambda: world.sim.crash("b"))
    world.sim.call_at(world.sim.now_ns + 20, lambda: world.sim.start("b", delay_ns=0))
    world.sim.run()
    assert world.sim.incarnation("b") == 2
    assert world["b"].told == [Started(incarnation=2)]
    world.sim.command("a", Burst(to="b", count=1))
    world.sim.run()
    assert world["b"].messages == [0]


def test_a_sender_learns_of_a_death_older_than_itself() -> None:
    world = World(2, "ab")
    world.sim.crash("a")
    world.sim.crash("b")
    world.sim.start("a")
    world.sim.run()
    assert world["a"].ended == []
    world.sim.command("a", Burst(to="b", count=2))
    world.sim.run()
    assert world["a"].ended == [PeerEnded(peer="b", incarnation=1, clean=False)]


def test_processes_start_and_kill_one_another() -> None:
    world = World(0, "ab")
    world.sim.command("a", Kill(process="b"))
    world.sim.run()
    assert not world.sim.lives("b")
    world.sim.command("a", Start(process="b"))
    world.sim.run()
    assert (world.sim.lives("b"), world.sim.incarnation("b")) == (True, 2)
    world.sim.command("a", Start(process="b"))
    with pytest.raises(SimulationFailure, match="b#2 lives"):
        world.sim.run()


def test_a_timer_replaces_its_name_and_can_be_cancelled() -> None:
    def react(stimulus: Stimulus[int]) -> Sequence[Effect[int]]:
        match stimulus:
            case Started():
                again = [SetTimer(name="again", at_ns=SIM_START_NS + at_ns) for at_ns in (500, 900)]
                other = SetTimer(name="never", at_ns=SIM_START_NS + 700)
                return [*again, other, CancelTimer(name="never"), CancelTimer(name="unknown")]
            case TimerFired():
                return [Note(value="fired")]
            case _:
                return []

    sim = Simulation[int](0)
    process = Scripted(react)
    sim.add("a", lambda _: process)
    assert sim.run() is RunEnd.QUIET
    assert process.told == [Started(incarnation=1), TimerFired(name="again")]
    assert (sim.now_ns, list(sim.notes())) == (SIM_START_NS + 900, [("a", "fired")])


def test_time_is_up_without_running_ahead() -> None:
    sim = Simulation[int](0)
    process = Scripted(
        lambda told: [SetTimer(name="t", at_ns=SIM_START_NS + 5000)] if isinstance(told, Started) else []
    )
    sim.add("a", lambda _: process)
    assert sim.run(for_ns=4000) is RunEnd.TIME_UP
    assert sim.now_ns == SIM_START_NS + 4000
    assert sim.run(until=lambda: TimerFired(name="t") in process.told) is RunEnd.REACHED
    assert sim.run() is RunEnd.QUIET


def test_a_failed_checker_tells_the_seed_and_the_story() -> None:
    world = World(11, "ab")

    def at_most_two() -> None:
        assert len(world["b"].messages) <= 2, f"b has {len(world['b'].messages)}"

    world.sim.add_checker("at most two", at_most_two)
    world.sim.command("a", Burst(to="b", count=5))
    with pytest.raises(
        SimulationFailure, match=r"seed 11, event \d+: checker at most two: b has 3"
    ) as caught:
        world.sim.run()
    assert caught.value.seed == 11
    last = caught.value.story[-1].detail
    assert isinstance(last, Arrived)
    assert last.message == 2


def test_an_error_in_a_process_tells_the_seed_and_the_stimulus() -> None:
    def react(stimulus: Stimulus[int]) -> Sequence[Effect[int]]:
        raise KeyError("no such group")

    sim = Simulation[int]("fresh-1")
    sim.add("a", lambda _: Scripted(react))
    with pytest.raises(SimulationFailure, match=r"seed 'fresh-1'.*a#1 on Started.*KeyError") as caught:
        sim.run()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_livelock_is_a_failure() -> None:
    sim = Simulation[int](0)
    sim.add("a", lambda _: Scripted(lambda _: [Send(to="b", message=0)]))
    sim.add("b", lambda _: Scripted(lambda _: [Send(to="a", message=0)]))
    with pytest.raises(SimulationFailure, match="no end after 500 events"):
        sim.run(max_events=500)


def test_a_flood_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MAX_PENDING", 50)
    world = World(0, "ab")
    world.sim.command("a", Burst(to="b", count=51))
    world.sim.run()  # two hosts may have so much
    monkeypatch.setattr(machines, "PENDING_A_HOST_MAX", 25)
    world.sim.command("a", Burst(to="b", count=51))
    with pytest.raises(SimulationFailure, match="50 events are under way"):
        world.sim.run()


def test_misuse_is_refused() -> None:
    world = World(0, "a")
    with pytest.raises(LocalProtocolError, match="a exists"):
        world.sim.add("a", world.factory("a"))
    with pytest.raises(LocalProtocolError, match="no simulated process z"):
        world.sim.crash("z")
    with pytest.raises(LocalProtocolError, match="quiet"):
        world.sim.step()
    with pytest.raises(UserError, match="loss is a probability"):
        Conditions(loss=1.5)
    with pytest.raises(UserError, match="bandwidth"):
        Conditions(bandwidth_bytes_per_s=0)
    with pytest.raises(UserError):
        Conditions(notice_min_ns=2, notice_max_ns=1)


# --- a machine through the adapter ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    number: int


class CountingMachine:
    """Answers each number below ten with the next one."""

    def __init__(self) -> None:
        self.highest = -1

    def handle(self, event: Heard, *, now_ns: int) -> list[Say]:
        self.highest = max(self.highest, event.number)
        return [Say(number=event.number + 1)] if event.number < 10 else []

    def check_invariants(self) -> None:
        assert self.highest <= 10


def test_a_machine_runs_behind_its_adapter() -> None:
    machines: dict[str, CountingMachine] = {}

    def factory(name: str, other: str) -> Callable[[int], Process[int]]:
        def to_events(stimulus: Stimulus[int]) -> list[Heard]:
            match stimulus:
                case Started():
                    return [Heard(number=0)] if name == "a" else []
                case Arrived(message=number):
                    return [Heard(number=number)]
                case _:
                    return []

        def make(_: int) -> Process[int]:
            machine = machines[name] = CountingMachine()
            return MachineProcess(
                machine,
                to_events=to_events,
                to_effects=lambda say: [Send(to=other, message=say.number)],
            )

        return make

    sim = Simulation[int](0)
    sim.add("a", factory("a", "b"))
    sim.add("b", factory("b", "a"))
    assert sim.run() is RunEnd.QUIET
    assert {name: machine.highest for name, machine in machines.items()} == {"a": 10, "b": 9}
