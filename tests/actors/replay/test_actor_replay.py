"""Actors recorded and replayed: the same code does the same again, whatever the event loop made of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import sleep as real_sleep  # nobody waits for it: actors' timers are what is tried
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.actors.actor_recordings import assert_identical, events_of, record, recorded, until
from support.actors.counting_actor import Add, Counter, Crash, Nap, Never, Throw, Thrown, Total

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import STOPPING_S, MailboxSpec
from zbmd.actors.core.ref import Down, Exited, Reason, ReasonKind, Ref, Undelivered
from zbmd.actors.errors import ActorFailed
from zbmd.actors.replay.events import ref_data
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.transport import capture
from zbmd.transport.errors import DeadlineExceeded, PeerLost


class Many(Contract, id="replay.many"):
    to: list[Ref]
    amount: int
    timeout: float


class Report(Contract, id="replay.report"):
    lines: list[str]


class Fan(Actor):
    """Asks many at once, from as many tasks, that get in each other's way."""

    def __init__(self, journal: Ref | None = None) -> None:
        self.journal = journal
        self.last = 0
        self.lines: list[str] = []

    @on(Many)
    async def many(self, message: Many) -> Report:
        await asyncio.gather(*(self.one(n, ref, message) for n, ref in enumerate(message.to)))
        return Report(list(self.lines))

    async def one(self, number: int, ref: Ref, message: Many) -> None:
        try:
            total = await ref.ask(Add(message.amount + number), timeout=message.timeout, reply=Total)
        except (DeadlineExceeded, ActorFailed) as error:
            self.lines.append(f"{number} {type(error).__name__}")
            return
        self.last = number
        for _ in range(number % 3):
            await asyncio.sleep(0)
        self.lines.append(f"{number} {total.value} after {self.last}")
        if self.journal is not None:
            await self.journal.tell(Add(self.last))


class Ticker(Actor):
    """Lives by the clock: a task that ticks, a timeout that strikes, a queue between tasks."""

    def __init__(self, journal: Ref, *, every_s: float) -> None:
        self.journal = journal
        self.every_s = every_s
        self.ticks = 0
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def started(self) -> None:
        self.tasks = [asyncio.create_task(self.tick()), asyncio.create_task(self.pass_on())]

    async def stopping(self, reason: Reason) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.journal.tell(Add(-self.ticks))

    async def tick(self) -> None:
        while True:
            await real_sleep(self.every_s)
            self.ticks += 1
            self.queue.put_nowait(self.ticks)

    async def pass_on(self) -> None:
        while True:
            await self.journal.tell(Add(await self.queue.get()))

    @on(Nap)
    async def nap(self, message: Nap) -> Total:
        try:
            async with asyncio.timeout(message.seconds):
                await real_sleep(3600)
        except TimeoutError:
            self.ticks += 100
        return Total(self.ticks)


class Watcher(Actor):
    """Monitors, links, spawns and terminates."""

    trap_exit = True

    def __init__(self, journal: Ref) -> None:
        self.journal = journal
        self.lines: list[str] = []

    @on(Many)
    async def many(self, message: Many) -> Report:
        child = await self.system.spawn(Counter, message.amount, name=f"child-{message.amount}")
        self.link(child)
        self.monitor(child)
        for ref in message.to:
            self.monitor(ref)
        monitor = self.system.monitor(child)
        down = await self.system.terminate(child, text="enough")
        assert down == await monitor.down(timeout=60)
        self.lines.append(str(down.reason))
        return Report(list(self.lines))

    async def note(self, line: str) -> None:
        self.lines.append(line)
        with contextlib.suppress(PeerLost):
            await self.journal.tell(Add(len(self.lines)))

    @on(Down)
    async def down(self, signal: Down) -> None:
        await self.note(f"down {signal.ref.actor} {signal.reason}")

    @on(Exited)
    async def exited(self, signal: Exited) -> None:
        await self.note(f"exited {signal.ref.actor} {signal.reason}")

    @on(Undelivered)
    async def undelivered(self, signal: Undelivered) -> None:
        self.lines.append(f"undelivered {signal.contract} {type(signal.error).__name__}")

    @on(Add)
    async def add(self, message: Add) -> Report:
        if message.amount < 0:
            self.stop("told to")
        return Report(list(self.lines))


async def until_told(watcher: Ref, beginning: str) -> None:
    lines = [""]
    while not any(line.startswith(beginning) for line in lines):
        lines = (await watcher.ask(Add(1), timeout=60, reply=Report)).lines


# ---- the same again


async def counting(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, 10, name="counter")
    for amount in (1, 2, 3):
        await counter.ask(Add(amount), timeout=60)
    await counter.tell(Add(4))
    thrown = await counter.ask(Throw(), timeout=60, reply=Thrown)
    assert len(set(thrown.values)) == 3
    assert await counter.ask(Add(0), timeout=60) == Total(20)


def test_a_life_is_replayed_identical(tmp_path: Path) -> None:
    record(tmp_path, counting)
    verdicts = assert_identical(tmp_path)
    assert list(verdicts) == ["counter#1"]
    assert events_of(tmp_path, "counter#1") == ["Started", *["Received"] * 6, "Stopping"]


def test_random_draws_and_clocks_differ_from_life_to_life(tmp_path: Path) -> None:
    thrown: list[Thrown] = []
    before_ns = time.time_ns()

    async def scenario(system: ActorSystem) -> None:
        for name in ("a", "b"):
            ref = await system.spawn(Counter, name=name)
            thrown.append(await ref.ask(Throw(), timeout=60, reply=Thrown))
            thrown.append(await ref.ask(Throw(), timeout=60, reply=Thrown))

    record(tmp_path, scenario)
    assert_identical(tmp_path)
    assert len({tuple(t.values) for t in thrown}) == 4
    assert [t.clock_ns for t in thrown] == sorted({t.clock_ns for t in thrown})
    assert all(before_ns <= t.wall_ns <= time.time_ns() for t in thrown)


async def test_clocks_and_random_of_an_actor_that_is_not_recorded(system: ActorSystem) -> None:
    ref = await system.spawn(Counter)
    before_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    first = await ref.ask(Throw(), timeout=60, reply=Thrown)
    second = await ref.ask(Throw(), timeout=60, reply=Thrown)
    assert len({*first.values, *second.values}) == 6
    assert before_ns <= first.clock_ns <= second.clock_ns <= time.monotonic_ns()
    assert wall_ns <= first.wall_ns <= time.time_ns()


def test_tasks_that_race_are_replayed_in_their_order(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        journal = await system.spawn(Counter, name="journal")
        fan = await system.spawn(Fan, journal, name="fan")
        counters = [await system.spawn(Counter, n) for n in range(6)]
        for amount in range(3):
            await asyncio.gather(*(fan.ask(Many(counters, amount, 5), timeout=60) for _ in range(2)))

    record(tmp_path, scenario)
    assert_identical(tmp_path)


def test_timers_timeouts_and_queues_between_tasks(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        journal = await system.spawn(Counter, name="journal")
        ticker = await system.spawn(Ticker, journal, every_s=0.002, name="ticker")
        assert (await ticker.ask(Nap(0.02), timeout=60, reply=Total)).value > 100
        await ticker.ask(Nap(0.005), timeout=60)
        await system.terminate(ticker)
        await journal.ask(Add(0), timeout=60)

    record(tmp_path, scenario)
    assert_identical(tmp_path)
    assert "Resumed" in events_of(tmp_path, "ticker#2")


def test_asks_that_time_out_and_actors_that_raise(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        fan = await system.spawn(Fan, name="fan")
        slow = await system.spawn(Counter, name="slow")
        hanging = asyncio.create_task(slow.ask(Never(), timeout=0.2))
        report = await fan.ask(Many([slow, slow], 1, 0.01), timeout=60, reply=Report)
        assert sorted(report.lines) == ["0 DeadlineExceeded", "1 DeadlineExceeded"]
        with pytest.raises(DeadlineExceeded):
            await hanging
        system.exit(slow, Reason(ReasonKind.KILLED, "it hangs"))
        failing = await system.spawn(Counter, name="failing")
        with pytest.raises(ActorFailed, match="ValueError: boom"):
            await failing.ask(Crash("boom"), timeout=60)

    record(tmp_path, scenario)
    assert_identical(tmp_path)
    assert events_of(tmp_path, "slow#2")[-1] == "Killed"
    assert events_of(tmp_path, "failing#3") == ["Started", "Received", "Stopping"]


def test_each_life_under_a_supervisor_is_a_stream(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        await system.supervise([ChildSpec(name="counter", actor=Counter, args=(7,))], name="tree")
        counter = system.ref("counter")
        for _ in range(2):
            monitor = system.monitor(counter)
            with pytest.raises(ActorFailed):
                await counter.ask(Crash("again"), timeout=60)
            await monitor.down()
            await until(lambda: "counter" in [info.name for info in system.describe()])
            assert await counter.ask(Add(1), timeout=60) == Total(8)

    record(tmp_path, scenario)
    verdicts = assert_identical(tmp_path)
    assert {"counter#2", "counter#3", "counter#4"} <= verdicts.keys()
    assert "tree#1" not in verdicts  # of a supervisor the machine is recorded


def test_monitors_links_spawns_and_signals(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        journal = await system.spawn(Counter, name="journal")
        watcher = await system.spawn(Watcher, journal, name="watcher")
        victim = await system.spawn(Counter, name="victim")
        await watcher.ask(Many([victim, system.ref("nobody")], 5, 1), timeout=60)
        with pytest.raises(ActorFailed):
            await victim.ask(Crash("x"), timeout=60)
        await until_told(watcher, "down victim")
        await watcher.ask(Add(-1), timeout=60)

    record(tmp_path, scenario)
    verdicts = assert_identical(tmp_path)
    assert "child-5#4" in verdicts
    assert events_of(tmp_path, "watcher#2")[-1] == "Stopping"
    assert {"SpawnedAs", "DownAwaited", "DownCame", "ExitCame"} <= set(events_of(tmp_path, "watcher#2"))


def test_a_mailbox_that_is_full_makes_a_teller_wait(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        small = await system.spawn(Counter, name="small", mailbox=MailboxSpec(capacity=1))
        fan = await system.spawn(Fan, small, name="fan")
        counters = [await system.spawn(Counter) for _ in range(5)]
        napping = asyncio.create_task(small.ask(Nap(0.01), timeout=60))
        await fan.ask(Many(counters, 1, 5), timeout=60)
        await napping

    record(tmp_path, scenario)
    assert_identical(tmp_path)


def test_actors_of_two_processes(tmp_path: Path, join: Callable[[ActorSystem, ActorSystem], None]) -> None:
    async def main() -> None:
        async with recorded(tmp_path) as here, recorded(tmp_path, "rank1") as there:
            join(here, there)
            journal = await there.spawn(Counter, name="journal")
            from_here = here._bind(ref_data(journal))
            watcher = await here.spawn(Watcher, from_here, name="watcher")
            fan = await here.spawn(Fan, here.ref("rank1/journal"), name="fan")
            counters = [here._bind(ref_data(await there.spawn(Counter, n))) for n in range(4)]
            await fan.ask(Many([*counters, counters[0]], 1, 5), timeout=60)
            await watcher.ask(Many(counters[:2], 3, 1), timeout=60)
            await there.terminate(journal)
            await here.terminate(counters[0])
            await until_told(watcher, "undelivered counting.add/1 DeadActor")
            here.detach("rank1")
            await until_told(watcher, f"down {counters[1].actor} lost")

    asyncio.run(main())
    assert len(assert_identical(tmp_path)) == 8
    assert "BounceCame" in events_of(tmp_path, "watcher#1")


amounts = st.integers(-5, 5)
messages = st.one_of(
    st.builds(Add, amounts),
    st.builds(Throw),
    st.builds(Nap, st.sampled_from([0.0, 0.001])),
    st.builds(Crash, st.text(max_size=5)),
)
steps = st.lists(
    st.tuples(st.sampled_from(["ask", "tell", "fan", "ticker"]), st.integers(0, 3), messages), max_size=25
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, run=st.sampled_from([asyncio.run, uvloop.run]))
def test_any_sequence_of_messages(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], run: Callable[..., Any]
) -> None:
    async def scenario(system: ActorSystem) -> None:
        specs = [ChildSpec(name=f"c{n}", actor=Counter, args=(n,)) for n in range(4)]
        await system.supervise(specs, name="tree", intensity=1000)
        refs = [system.ref(spec.name) for spec in specs]
        fan = await system.spawn(Fan, refs[0], name="fan")
        ticker = await system.spawn(Ticker, refs[1], every_s=0.001, name="ticker")
        waiting: list[Awaitable[Any]] = []
        for what, number, message in steps:
            match what:
                case "ask":
                    waiting.append(asyncio.create_task(refs[number].ask(message, timeout=60)))
                case "tell":
                    waiting.append(asyncio.create_task(refs[number].tell(message)))
                case "fan":
                    waiting.append(asyncio.create_task(fan.ask(Many(refs, number, 0.005), timeout=60)))
                case _:
                    waiting.append(asyncio.create_task(ticker.ask(Nap(0.001), timeout=60)))
        await asyncio.gather(*waiting, return_exceptions=True)

    directory = tmp_path_factory.mktemp("capture")
    record(directory, scenario, run)
    assert_identical(directory)


# ---- ends and odds


class Doomed(Actor):
    """Ends in every way there is."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "constructor":
            raise RuntimeError(how)

    async def started(self) -> None:
        if self.how == "started":
            raise RuntimeError(self.how)
        if self.how == "slow start":
            await real_sleep(3600)

    async def stopping(self, reason: Reason) -> None:
        if self.how == "stopping":
            raise RuntimeError(self.how)
        if self.how == "slow stop":
            self.stopping_s = 0.001
            await real_sleep(3600)

    @on(Add)
    async def add(self, message: Add) -> Total:
        if self.how == "stops":
            self.stop("enough")
        if self.how == "wrong reply":
            return message  # type: ignore[return-value] # pyright: ignore[reportReturnType]
        if self.how == "cancelled":
            raise asyncio.CancelledError
        return Total(message.amount)


HOWS = ("constructor", "started", "slow start", "stopping", "slow stop", "stops", "wrong reply", "cancelled")


@pytest.mark.parametrize("how", HOWS)
def test_every_end_of_a_life(tmp_path: Path, how: str) -> None:
    async def scenario(system: ActorSystem) -> None:
        spawning = asyncio.create_task(system.spawn(Doomed, how, name="doomed"))
        if how == "slow start":
            await until(lambda: bool(system.describe()))
            spawning.cancel()
        (spawned,) = await asyncio.gather(spawning, return_exceptions=True)
        if isinstance(spawned, Ref):
            Doomed.stopping_s = 0.001 if how == "slow stop" else STOPPING_S
            await asyncio.gather(spawned.ask(Add(1), timeout=60), return_exceptions=True)
            await system.terminate(spawned, timeout=60)

    record(tmp_path, scenario)
    if how == "constructor":
        assert list(capture.replay_log(tmp_path)) == []
    else:
        assert_identical(tmp_path)


class Cancelling(Actor):
    """Cancels its own tasks in every state (ready to go on, waiting, not begun), and gives up on an ask."""

    @on(Many)
    async def many(self, message: Many) -> Report:
        lines: list[str] = []

        async def one(ref: Ref) -> None:
            try:
                lines.append(str((await ref.ask(Add(1), timeout=60, reply=Total)).value))
            finally:
                lines.append("done")

        first, second, hanging = message.to
        ready = asyncio.create_task(one(first))
        await until(lambda: len(lines) >= message.amount)
        waiting = asyncio.create_task(one(second))
        await asyncio.sleep(0)
        waiting.cancel()
        ready.cancel()
        unborn = asyncio.create_task(one(first))
        unborn.cancel()
        done = await asyncio.gather(ready, waiting, unborn, return_exceptions=True)
        lines.append(" ".join(type(outcome).__name__ for outcome in done))
        try:
            async with asyncio.timeout(message.timeout):
                await hanging.ask(Never(), timeout=60)
        except TimeoutError:
            lines.append("too late")
        async with asyncio.TaskGroup() as group:
            for ref in (first, second):
                group.create_task(one(ref))
        return Report(lines)


@pytest.mark.parametrize("amount", [0, 1, 2])
def test_cancelled_tasks(tmp_path: Path, amount: int) -> None:
    async def scenario(system: ActorSystem) -> None:
        cancelling = await system.spawn(Cancelling, name="cancelling")
        counters = [await system.spawn(Counter, n) for n in range(3)]
        report = await cancelling.ask(Many(counters, amount, 0.001), timeout=60, reply=Report)
        assert "too late" in report.lines
        system.exit(counters[2], Reason(ReasonKind.KILLED, "it hangs"))

    record(tmp_path, scenario)
    assert_identical(tmp_path)
