"""Programs as simulated processes: their life, their death, their clocks, and the datagrams between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.hash_seeds import printed_under_hash_seeds

from zbmd.transport.errors import LocalProtocolError, OutOfMemory
from zbmd.transport.sim import (
    SIM_START_NS,
    WORLD_FAULTS,
    Clog,
    Conditions,
    Crash,
    Cut,
    FailureKind,
    Fault,
    HistoryKind,
    MemoryLimit,
    NetConditions,
    Partition,
    Pause,
    Program,
    RunEnd,
    SimProcess,
    SimulationFailure,
    Skew,
    Slow,
    World,
    current_process,
    draw_plan,
)

MS = 1_000_000


async def forever(process: SimProcess) -> None:
    await asyncio.Event().wait()


def ticking(every_s: float = 0.001) -> Program:
    async def program(process: SimProcess) -> None:
        while True:
            process.note(process.world.now_ns - SIM_START_NS)
            await asyncio.sleep(every_s)

    return program


async def chatter(process: SimProcess) -> None:
    """Sends numbers to everybody, by what the seed says; notes what it hears."""

    async def hear() -> None:
        while True:
            datagram = await process.receive_datagram()
            process.note((datagram.sender, datagram.incarnation, datagram.data.hex()))

    names = ["a", "b", "c"]
    async with asyncio.TaskGroup() as group:
        hearing = group.create_task(hear())
        for number in range(60):
            await asyncio.sleep(process.rng.expovariate(1000))
            if not number % 10:
                await asyncio.to_thread(time.monotonic)
                with contextlib.suppress(OSError):
                    process.disk.append("log", bytes([number]))
            process.send_datagram(process.rng.choice(names), bytes([number]))
        await asyncio.sleep(0.05)
        hearing.cancel()


def chatter_digest(seed: int) -> str:
    with World(seed, conditions=Conditions(loss=0.1, duplicate=0.1, reorder=0.3)) as world:
        for name in "abc":
            world.add(name, chatter)
        for fault in draw_plan(world.rng("plan"), "abc", 60 * MS, WORLD_FAULTS, 12):
            if not isinstance(fault, MemoryLimit):
                world.apply(fault)
        world.add_checker("time", lambda: None, stride=7)
        world.run(for_ns=10_000 * MS)
        return world.digest()


def test_one_seed_one_history_whatever_the_hash_seed() -> None:
    digests = [chatter_digest(seed) for seed in range(6)]
    assert digests == [chatter_digest(seed) for seed in range(6)]
    assert len(set(digests)) == 6
    printed = printed_under_hash_seeds(__file__, "chatter_digest(3)")
    assert {text.strip() for text in printed} == {digests[3]}


def test_processes_interleave_by_the_seed_and_each_keeps_its_own_order() -> None:
    async def count(process: SimProcess) -> None:
        for number in range(20):
            process.note(number)
            await asyncio.sleep(0)

    orders: set[str] = set()
    for seed in range(10):
        with World(seed) as world:
            for name in "ab":
                world.add(name, count)
            assert world.run() is RunEnd.QUIET
            notes = list(world.notes())
        for name in "ab":
            assert [value for who, value in notes if who == name] == list(range(20))
        orders.add("".join(who for who, _ in notes))
    assert len(orders) > 5


def test_a_crash_runs_nothing_of_the_process_and_a_restart_is_new() -> None:
    seen: list[str] = []

    async def program(process: SimProcess) -> None:
        try:
            seen.append(f"start {process.incarnation}")
            asyncio.get_running_loop().call_later(0.02, seen.append, f"timer {process.incarnation}")
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            seen.append("cancelled")
        finally:
            seen.append(f"finally {process.incarnation}")

    world = World(1)
    world.add("a", program)
    world.apply(Crash(process="a", at_ns=10 * MS, for_ns=5 * MS))
    world.run(for_ns=12 * MS)
    assert not world.lives("a")
    assert world.run() is RunEnd.QUIET
    assert seen == ["start 1", "start 2", "timer 2", "finally 2"]
    world.close()


def test_the_dead_are_thrown_away_without_a_word(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    async def stubborn(process: SimProcess) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1)

    with World(1) as world:
        world.add("a", stubborn)
        world.add("b", stubborn)
        world.crash_at("a", SIM_START_NS + MS)
        world.run(for_ns=5 * MS)
        digest = world.digest()
    assert world.digest() == digest
    assert capsys.readouterr() == ("", "")
    assert not recwarn.list


def test_the_end_of_a_program_ends_its_tasks() -> None:
    async def program(process: SimProcess) -> None:
        async def helper() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                process.note("helper ended")

        process.world.loop.create_task(helper())
        await asyncio.sleep(0.001)
        process.note("program ended")

    with World(1) as world:
        world.add("a", program)
        assert world.run() is RunEnd.QUIET
        assert [value for _, value in world.notes()] == ["program ended", "helper ended"]
        assert [
            record.kind for record in world.history if record.kind in (HistoryKind.EXIT, HistoryKind.CRASH)
        ] == [HistoryKind.EXIT]


def gaps(world: World, name: str) -> list[int]:
    at_ns = [value for who, value in world.notes() if who == name and isinstance(value, int)]
    return [late - early for early, late in itertools.pairwise(at_ns)]


def test_a_pause_holds_everything_back_and_loses_nothing() -> None:
    with World(1) as world:
        world.add("a", ticking())
        world.add("b", ticking())
        world.apply(Pause(process="a", at_ns=10 * MS, for_ns=30 * MS))
        world.run(for_ns=60 * MS)
        assert max(gaps(world, "a")) >= 30 * MS
        assert max(gaps(world, "b")) < 2 * MS


def test_a_slow_process_is_slow_for_a_while() -> None:
    async def work(process: SimProcess) -> None:
        while True:
            await asyncio.sleep(0)
            process.note(process.world.now_ns - SIM_START_NS)

    with World(1) as world:
        world.add("a", work)
        world.apply(Slow(process="a", factor=100.0, at_ns=MS, for_ns=2 * MS))
        world.run(for_ns=4 * MS)
        found = gaps(world, "a")
        assert max(found[:500]) < 3_000
        assert max(found) > 80_000
        assert max(found[-500:]) < 3_000


def test_a_blocking_sleep_keeps_the_process_busy_and_nobody_else() -> None:
    async def block(process: SimProcess) -> None:
        before_ns = time.monotonic_ns()
        time.sleep(0.02)  # noqa: ASYNC251 (what a program must not do is what is tried)
        assert time.monotonic_ns() - before_ns == 20 * MS
        await asyncio.sleep(0)
        process.note(process.world.now_ns - SIM_START_NS)

    with World(1) as world:
        world.add("a", block)
        world.add("b", ticking())
        world.run(for_ns=50 * MS)
        (at_ns,) = [value for who, value in world.notes() if who == "a" and isinstance(value, int)]
        assert at_ns >= 20 * MS
        assert max(gaps(world, "b")) < 2 * MS


def test_skew_moves_the_wall_clock_and_makes_timers_drift() -> None:
    async def look(process: SimProcess) -> None:
        while True:
            process.note(time.time_ns() - process.world.loop.main.clock.wall_ns(process.world.now_ns))
            await asyncio.sleep(0.01)

    with World(1) as world:
        world.add("a", look)
        skew = Skew(process="a", step_ns=5_000 * MS, drift_ppm=100_000, at_ns=100 * MS, for_ns=1_000 * MS)
        world.apply(skew)
        world.run(for_ns=2_000 * MS)
        errors = [value for _, value in world.notes() if isinstance(value, int)]
    assert max(errors) > 5_000 * MS + 50 * MS
    assert errors[0] < 1 * MS
    assert 50 * MS < errors[-1] < 150 * MS  # the step is undone, what drifted stays
    # 10 ms of a clock that is a tenth fast are 9.1 ms: more timers fire in the same true time.
    assert len(errors) > 200 + 5


def test_a_pending_timer_follows_a_clock_that_changes() -> None:
    async def once(process: SimProcess) -> None:
        await asyncio.sleep(1)
        process.note(process.world.now_ns - SIM_START_NS)

    with World(1) as world:
        world.add("a", once)
        world.apply(Skew(process="a", step_ns=0, drift_ppm=1_000_000, at_ns=0, for_ns=10_000 * MS))
        world.run()
        assert [value for _, value in world.notes()] == [pytest.approx(500 * MS, rel=0.01)]


def test_who_runs_is_known() -> None:
    async def program(process: SimProcess) -> None:
        assert current_process() is process
        task = asyncio.current_task()
        assert task is not None
        assert task.get_name() == "main"

    assert current_process() is None
    with World(1) as world:
        world.add("a", program)
        world.run()


@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("x"), FailureKind.CRASH), (AssertionError("x"), FailureKind.SAFETY)]
)
def test_what_nobody_catches_ends_the_run(error: Exception, kind: FailureKind) -> None:
    async def fail(process: SimProcess) -> None:
        await asyncio.sleep(0.01)
        raise error

    async def call(process: SimProcess) -> None:
        def fail_too() -> None:
            raise error

        process.world.loop.call_later(0.01, fail_too)
        await asyncio.sleep(1)

    for program in (fail, call):
        with World(9) as world:
            world.add("a", program)
            with pytest.raises(SimulationFailure, match="seed 9") as caught:
                world.run()
            assert caught.value.kind is kind
            assert caught.value.__cause__ is error


def test_a_task_whose_error_nobody_takes_ends_the_run() -> None:
    async def careless(process: SimProcess) -> None:
        async def fail() -> None:
            raise KeyError("lost")

        task = asyncio.create_task(fail())
        await asyncio.sleep(0.001)
        del task
        await asyncio.sleep(1)
        process.note("too late")

    with World(1) as world:
        world.add("a", careless)
        with pytest.raises(SimulationFailure, match=r"never retrieved: KeyError\('lost'\)") as caught:
            world.run()
        assert caught.value.kind is FailureKind.CRASH
        assert not list(world.notes())


def test_programs_that_all_wait_are_a_failure_of_liveness() -> None:
    with World(1) as world:
        world.add("a", forever)
        with pytest.raises(SimulationFailure, match=r"a#1 main: .* in forever > .* in wait") as caught:
            world.run()
        assert caught.value.kind is FailureKind.LIVENESS


def test_a_checker_ends_the_run() -> None:
    with World(1) as world:
        world.add("a", ticking())

        def few() -> None:
            assert len(list(world.notes())) < 5

        world.add_checker("few notes", few)
        with pytest.raises(SimulationFailure, match="checker few notes") as caught:
            world.run()
        assert caught.value.kind is FailureKind.SAFETY


# --- datagrams ------------------------------------------------------------------------------------------


def heard(
    fault: Fault | None, *, count: int = 50, conditions: Conditions | None = None
) -> list[tuple[int, int]]:
    """(number, when, ns) of `count` datagrams, one each ms, from a to b under a fault."""

    async def send(process: SimProcess) -> None:
        for number in range(count):
            process.send_datagram("b", bytes([number]))
            await asyncio.sleep(0.001)

    async def hear(process: SimProcess) -> None:
        while True:
            datagram = await process.receive_datagram()
            assert datagram.sender == "a"
            process.note((datagram.data[0], process.world.now_ns - SIM_START_NS))

    with World(4) as world:
        world.add("a", send)
        world.add("b", hear)
        if fault is not None:
            world.apply(fault)
        world.run(for_ns=200 * MS)
        return [value for _, value in world.notes() if isinstance(value, tuple)]


def test_datagrams_arrive_in_a_calm_network() -> None:
    assert [number for number, _ in heard(None)] == list(range(50))


@pytest.mark.parametrize(
    "fault",
    [
        Cut(source="a", target="b", at_ns=10 * MS, for_ns=10 * MS),
        Partition(groups=(("a",), ("b",)), at_ns=10 * MS, for_ns=10 * MS),
    ],
)
def test_a_cut_loses_datagrams_until_it_heals(fault: Fault) -> None:
    numbers = [number for number, _ in heard(fault)]
    assert numbers[:10] == list(range(10))
    assert numbers[-25:] == list(range(25, 50))
    assert 38 <= len(numbers) <= 42


def test_a_cut_the_other_way_loses_nothing() -> None:
    assert len(heard(Cut(source="b", target="a", at_ns=0, for_ns=100 * MS))) == 50


def test_a_clog_holds_and_then_bursts() -> None:
    found = heard(Clog(source="a", target="b", at_ns=10 * MS, for_ns=20 * MS))
    assert sorted(number for number, _ in found) == list(range(50))
    held = [at_ns for number, at_ns in found if 12 <= number < 28]
    assert min(held) >= 30 * MS
    assert max(held) < 32 * MS


def test_a_storm_loses_doubles_and_reorders() -> None:
    storm = NetConditions(
        latency_ns=MS,
        jitter_ns=3 * MS,
        bandwidth_bytes_per_s=10**9,
        loss=0.3,
        duplicate=0.3,
        reorder=0.5,
        at_ns=0,
        for_ns=200 * MS,
    )
    numbers = [number for number, _ in heard(storm, count=200)]
    assert len(set(numbers)) < 180
    assert len(set(numbers)) < len(numbers)
    assert numbers != sorted(numbers)


def test_more_datagrams_than_are_received_are_lost() -> None:
    async def flood(process: SimProcess) -> None:
        for _ in range(3000):
            process.send_datagram("b", b"x")
        await asyncio.sleep(0.01)
        with pytest.raises(LocalProtocolError, match="65507"):
            process.send_datagram("b", bytes(70_000))

    async def late(process: SimProcess) -> None:
        await asyncio.sleep(0.1)
        count = 0
        async with asyncio.timeout(0.1):
            while True:
                await process.receive_datagram()
                count += 1
                process.note(count)

    async def shielded(process: SimProcess) -> None:
        with pytest.raises(TimeoutError):
            await late(process)

    with World(1) as world:
        world.add("a", flood)
        world.add("b", shielded)
        world.run()
        assert max(value for _, value in world.notes() if isinstance(value, int)) == 1024


# --- memory, misuse -------------------------------------------------------------------------------------


def test_memory_has_a_limit_that_a_fault_can_lower() -> None:
    async def program(process: SimProcess) -> None:
        held = process.memory.allocate(1 << 20)
        await asyncio.sleep(0.01)
        with pytest.raises(OutOfMemory) as caught:
            process.memory.allocate(1)
        assert (caught.value.asked_bytes, caught.value.available_bytes) == (1, 0)
        held.free()
        held.free()
        with process.memory.allocate(1 << 10):
            assert process.memory.used_bytes == 1 << 10
        assert (process.memory.used_bytes, process.memory.peak_bytes) == (0, 1 << 20)

    with World(1) as world:
        world.add("a", program)
        world.apply(MemoryLimit(process="a", limit_bytes=1 << 16, at_ns=5 * MS, for_ns=100 * MS))
        world.run(for_ns=50 * MS)


def test_misuse_is_refused() -> None:
    with World(1) as world:
        world.add("a", forever)
        with pytest.raises(LocalProtocolError, match="a exists"):
            world.add("a", forever)
        with pytest.raises(LocalProtocolError, match="no simulated process z"):
            world.crash("z")
        with pytest.raises(LocalProtocolError, match="no simulated process z"):
            world.apply(Crash(process="z", at_ns=0, for_ns=0))
        with pytest.raises(LocalProtocolError, match="lives"):
            world.start("a")


@given(seed=st.integers(0, 2**32))
def test_healing_ends_every_fault_among_the_core(seed: int) -> None:
    names = ("a", "b", "c", "d")
    with World(seed) as world:
        for name in names:
            world.add(name, pinging(names))
        for fault in draw_plan(world.rng("plan"), names, 50 * MS, WORLD_FAULTS, 10):
            world.apply(fault)
        world.run(for_ns=40 * MS)
        core = frozenset(world.rng("core").sample(names, 2))
        world.heal(core, revive=True)
        healed = len(world.history)
        world.run(for_ns=20 * MS)
        pings = {
            (record.process, record.detail)
            for record in world.history[healed:]
            if record.kind is HistoryKind.NOTE
        }
        assert {(a, b) for a in core for b in core if a != b} <= pings


def pinging(names: tuple[str, ...]) -> Program:
    async def program(process: SimProcess) -> None:
        async def hear() -> None:
            while True:
                process.note((await process.receive_datagram()).sender)

        async with asyncio.TaskGroup() as group:
            group.create_task(hear())
            while True:
                for name in names:
                    process.send_datagram(name, b"ping")
                await asyncio.sleep(0.001)

    return program
