"""Findings and refusals of a replay of actors: changed and impure code, hostile logs."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import sys
import time
from asyncio import sleep as real_sleep  # nobody waits for it: actors' timers are what is tried
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actors import counting_actor
from support.actors.actor_recordings import assert_identical, events_of, record, replayed, until
from support.actors.counting_actor import Add, Counter, Nap, Never, Throw, Thrown, Total

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import ReasonKind, Ref
from zbmd.actors.core.wire import ReasonData, RefData
from zbmd.actors.replay.events import RecordCodec, recorded
from zbmd.actors.replay.machine import allow_modules, find_actor_class
from zbmd.actors.replay.recording import ACTOR, captured_system
from zbmd.actors.replay.traced import NotPlain, pack_arguments, unpack_arguments
from zbmd.actors.system import ActorSystem
from zbmd.transport import capture
from zbmd.transport.capture.codec import captured_name
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import ZbmdError


class Relay(Actor):
    """Asks, then tells."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @on(Add)
    async def add(self, message: Add) -> Total:
        total = await self.to.ask(message, reply=Total)
        await self.to.tell(message)
        return total


class Impure(Actor):
    """Tells the time, which no recording does."""

    @on(Throw)
    async def throw(self, _: Throw) -> Thrown:
        return Thrown([random.random()], time.monotonic_ns(), 0)


class Outward(Actor):
    """Waits for what is none of the actor's: a future that something outside sets."""

    gates: ClassVar[list[asyncio.Future[None]]] = []

    @on(Never)
    async def never(self, _: Never) -> Total:
        gate = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        await gate
        return Total(1)


class Callbacks(Actor):
    """Acts from a callback of the loop."""

    @on(Add)
    async def add(self, message: Add) -> None:
        asyncio.get_running_loop().call_soon(self.stop, "from a callback")


async def counting(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, 10, name="counter")
    for amount in (1, 2, 3):
        await counter.ask(Add(amount), timeout=60)
    await counter.tell(Add(4))
    thrown = await counter.ask(Throw(), timeout=60, reply=Thrown)
    assert len(set(thrown.values)) == 3
    assert await counter.ask(Add(0), timeout=60) == Total(20)


# ---- not the same


def diverged(directory: Path, stream: str) -> capture.Divergence:
    verdict = replayed(directory)[stream]
    assert isinstance(verdict, capture.Divergence), verdict
    return verdict


def test_a_changed_handler_diverges_at_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, counting)

    class Changed(Counter):
        @on(Add)
        async def add(self, message: Add) -> Total:
            self.value += message.amount + (message.amount == 3)
            return Total(self.value)

    monkeypatch.setattr(counting_actor, "Counter", Changed)
    verdict = diverged(tmp_path, "counter#1")
    assert "counting.add/1" in verdict.event
    assert verdict.expected == """Replied(message='["counting.total/1",16]')"""
    assert verdict.actual == """Replied(message='["counting.total/1",17]')"""
    assert sum("Received" in line for line in verdict.story) == 3


def test_a_changed_order_of_calls_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(system: ActorSystem) -> None:
        counter = await system.spawn(Counter, name="counter")
        relay = await system.spawn(Relay, counter, name="relay")
        await relay.ask(Add(1), timeout=60)

    record(tmp_path, scenario)

    class Changed(Relay):
        @on(Add)
        async def add(self, message: Add) -> Total:
            await self.to.tell(message)
            return await self.to.ask(message, reply=Total)

    monkeypatch.setitem(globals(), "Relay", Changed)
    verdict = diverged(tmp_path, "relay#2")
    assert verdict.expected.startswith("Asked(call=1, to='rank0#1/counter#1'")
    assert verdict.actual.startswith("Told(call=1, to='rank0#1/counter#1'")


def test_a_longer_sleep_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(system: ActorSystem) -> None:
        counter = await system.spawn(Counter, name="counter")
        await counter.ask(Nap(0.001), timeout=60)

    record(tmp_path, scenario)

    class Slower(Counter):
        @on(Nap)
        async def nap(self, message: Nap) -> Total:
            await real_sleep(message.seconds + 60)
            return Total(self.value)

    monkeypatch.setattr(counting_actor, "Counter", Slower)
    verdict = diverged(tmp_path, "counter#1")
    assert verdict.event == "<- Resumed(strand=0)"
    assert verdict.actual.startswith("Stuck(at=")
    assert "in nap" in verdict.actual


def test_what_is_not_recorded_is_suspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(system: ActorSystem) -> None:
        impure = await system.spawn(Impure, name="impure")
        await impure.ask(Throw(), timeout=60)

    record(tmp_path, scenario)
    verdict = diverged(tmp_path, "impure#1")
    assert "counting.throw/1" in verdict.event
    told = capsys.readouterr().out
    assert re.search(
        r"the time module \(use self.clock\) at test_actor_replay_refusals.py:\d+ in throw", told
    )
    assert "the random module (use self.random)" in told


def test_waiting_for_the_world_outside_is_named(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        outward = await system.spawn(Outward, name="outward")
        asking = asyncio.create_task(outward.ask(Never(), timeout=60))
        await until(lambda: bool(Outward.gates))
        Outward.gates.pop().set_result(None)
        await asking

    record(tmp_path, scenario)
    verdict = diverged(tmp_path, "outward#1")
    assert verdict.event == "<- Resumed(strand=0)"
    assert "in never" in verdict.actual and "a future" in verdict.actual


# ---- what cannot be replayed says so


def incomplete(directory: Path, stream: str) -> str:
    verdict = replayed(directory)[stream]
    assert isinstance(verdict, capture.Incomplete), verdict
    return verdict.reason


def test_a_life_that_is_lost_track_of(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        callbacks = await system.spawn(Callbacks, name="callbacks")
        monitor = system.monitor(callbacks)
        await callbacks.tell(Add(1))
        assert (await monitor.down(timeout=60)).reason.text == "from a callback"

    record(tmp_path, scenario)
    before, after = capture.replay_log(tmp_path)
    assert isinstance(before, capture.Identical) and before.events == 2
    assert isinstance(after, capture.Incomplete)
    assert "stop() was called outside of its tasks" in after.reason


def test_a_life_that_can_only_be_shown(tmp_path: Path) -> None:
    class Local(Counter):
        pass

    async def scenario(system: ActorSystem) -> None:
        await system.spawn(Local, name="local")
        await system.spawn(Counter, object(), name="given")
        await system.ref("local").ask(Add(1), timeout=60)

    record(tmp_path, scenario)
    assert "is local to a function" in incomplete(tmp_path, "local#1")
    assert "argument 0 is a object" in incomplete(tmp_path, "given#2")
    assert events_of(tmp_path, "local#1") == ["Started", "Received", "Stopping"]


def test_a_log_does_not_make_us_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "replay_job").mkdir()
    (tmp_path / "replay_job" / "__init__.py").write_text("")
    (tmp_path / "replay_job" / "actors.py").write_text(
        "from zbmd.actors.core.actor import Actor\nclass Lone(Actor): pass\nnothing = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("zbmd.actors.replay.machine._allowed", set[str]())
    for name in ("replay_job.actors:Lone", "os.path:join", "asyncio:Task", "counting_actor:Add", "nowhere:X"):
        with pytest.raises(capture.CaptureMismatch):
            find_actor_class(name)
    assert "replay_job" not in sys.modules
    allow_modules("replay_job")
    try:
        assert find_actor_class("replay_job.actors:Lone").__name__ == "Lone"
        with pytest.raises(capture.CaptureMismatch, match="no actor class nothing"):
            find_actor_class("replay_job.actors:nothing")
        with pytest.raises(capture.CaptureMismatch, match=r"replay_job\.gone"):
            find_actor_class("replay_job.gone:X")
        with pytest.raises(capture.CaptureMismatch, match="may not make us"):
            find_actor_class("replay_jobs:X")
    finally:
        sys.modules.pop("replay_job.actors", None)
        sys.modules.pop("replay_job", None)


def test_a_class_or_contract_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, counting)
    with monkeypatch.context() as patched:
        patched.delattr(counting_actor, "Counter")
        assert "no actor class Counter any more" in incomplete(tmp_path, "counter#1")
    monkeypatch.setattr("zbmd.actors.replay.machine.fingerprint", lambda _: "another")
    assert "has changed since it was recorded" in incomplete(tmp_path, "counter#1")


def test_a_damaged_log_is_replayed_up_to_the_damage(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        counter = await system.spawn(Counter, name="counter")
        for amount in range(20_000):
            await counter.tell(Add(amount))
        await counter.ask(Add(0), timeout=60)

    record(tmp_path, scenario)
    (segment,) = tmp_path.glob("*/*.zlog")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    verdict = replayed(tmp_path)["counter#1"]
    assert isinstance(verdict, capture.Incomplete)
    assert "is damaged at byte" in verdict.reason
    assert 0 < verdict.events < 20_000


# ---- what is written


def test_the_ring_holds_lives_too(tmp_path: Path) -> None:
    async def main() -> None:
        origin = capture.Origin(process="rank0", incarnation=1)
        ring = capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()))
        system = captured_system("rank0", recorder=ring)
        await counting(system)
        ring.dump(tmp_path, "test")
        await system.stop()

    asyncio.run(main())
    assert_identical(tmp_path)


def test_arguments_come_back_as_they_were() -> None:
    ref = Ref.__new__(Ref)
    ref.process, ref.process_incarnation, ref.actor, ref.incarnation = "rank1", 2, "a", 3
    args: list[Any] = [1, -1.5, "x", b"y", None, True, [1, (2, [3])], {"a": (1,), 2: ref}, Add(5), ()]
    packed = pack_arguments(args, {"key": ref})

    def bind(data: Any) -> Ref:
        assert (data.process, data.process_incarnation, data.actor, data.incarnation) == ref.key()
        return ref

    back, named = unpack_arguments(packed, bind, lambda body: msgspec.msgpack.decode(body, type=Add))
    assert back == args
    assert [type(value) for value in back] == [type(value) for value in args]
    assert named == {"key": ref}


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, 1 << 64, bytearray(b"x"), [[ReasonKind.NORMAL]], {(1,): 2}, Counter]
)
def test_arguments_that_are_not_plain(value: Any) -> None:
    with pytest.raises(NotPlain):
        pack_arguments([value], {})


# Whatever they are given, events and actions are written as their unions' codecs would.
texts = st.text(max_size=9)
reasons = st.builds(ReasonData, st.sampled_from(ReasonKind), texts)
refs_data = st.builds(RefData, st.just("rank0"), st.integers(0, 9), st.just("a"), st.integers(0, 9))
st.register_type_strategy(ReasonData, reasons)
st.register_type_strategy(RefData, refs_data)


@given(data=st.data())
@pytest.mark.parametrize("kind", [*ACTOR.actions.members.values(), *ACTOR.events.members.values()])
def test_what_is_said_is_written_as_what_is_meant(kind: Any, data: st.DataObject) -> None:
    fields = [field.name for field in dataclasses.fields(kind)]
    hints = get_type_hints(kind)
    if Exception in hints.values() or ZbmdError in hints.values():
        return  # written by the same function
    values = {name: data.draw(st.from_type(hints[name]), name) for name in fields}
    codec: Any = ACTOR.actions if captured_name(kind) in ACTOR.actions.members else ACTOR.events
    try:
        expected = codec.encode_all([kind(**values)])
    except capture.CaptureMismatch:
        return  # a number beyond 64 bits
    assert RecordCodec().encode_all([recorded(kind, **values)]) == expected
    assert codec.decode(captured_name(kind), RecordCodec().encode(recorded(kind, **values))) is not None
