"""The record of a turn: by reference where nothing can change it, and written at any time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.actors.actor_recordings import assert_identical, events_of, record

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.replay.recording import captured_system
from zbmd.actors.system import ActorSystem
from zbmd.transport import capture
from zbmd.transport.capture.records import ActionsGiven, EventTaken
from zbmd.transport.clock.hlc import HybridClock


class Add(Contract, id="turns.add"):
    amount: int
    note: str = ""
    blob: bytes = b""


class Total(Contract, id="turns.total"):
    value: int


class Items(Contract, id="turns.items"):
    items: list[int]


class Counter(Actor):
    """Adds up."""

    def __init__(self) -> None:
        self.value = 0

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value)

    @on(Items)
    async def items(self, message: Items) -> Items:
        answer = Items([*message.items, len(message.items)])
        message.items.clear()  # what was recorded is as it came
        return answer


class Asker(Actor):
    """Asks in every way there is."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @on(Add)
    async def add(self, message: Add) -> Total:
        total: Total = await self.to.ask(message, timeout=60, reply=Total)
        both = await asyncio.gather(*(self.to.ask(Add(n), timeout=60) for n in (1, 2)))
        await asyncio.create_task(self.to.tell(Add(total.value + len(both))))
        return total

    @on(Items)
    async def items(self, message: Items) -> Items:
        sent = Items(list(message.items))
        answer: Items = await self.to.ask(sent, timeout=60)
        sent.items.append(99)
        answer.items.append(98)
        return answer


class Flushing(Actor):
    """Has its turns written while they run."""

    recorders: list[capture.LogRecorder] = []  # noqa: RUF012 (what a test puts there is no part of the actor)

    @on(Add)
    async def add(self, message: Add) -> Total:
        for recorder in self.recorders:
            assert recorder.flush()
        return Total(message.amount)


async def asking(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    asker = await system.spawn(Asker, counter, name="asker")
    assert (await asker.ask(Add(1), timeout=60)).value == 1
    for message in (Add(2, "ü", b"x"), Add(3, "y" * 5000), Add(1 << 40, "", bytes(5000))):
        await asker.ask(message, timeout=60)
    assert (await asker.ask(Items([1, 2]), timeout=60)).items[-1] == 98


def test_asks_of_all_kinds_are_replayed(tmp_path: Path) -> None:
    record(tmp_path, asking)
    verdicts = assert_identical(tmp_path)
    assert {stream: verdict.events > 10 for stream, verdict in verdicts.items()} == {  # type: ignore[union-attr]
        "counter#1": True,
        "asker#2": True,
    }
    assert "Answered" in events_of(tmp_path, "asker#2") and "Sent" in events_of(tmp_path, "asker#2")


def actions_of(directory: Path) -> list[ActionsGiven]:
    (log,) = capture.open_log(directory).processes
    return [entry.record for entry in log.entries() if isinstance(entry.record, ActionsGiven)]


@pytest.mark.parametrize("detail", list(capture.Detail))
def test_turns_are_replayed_from_digests_too(tmp_path: Path, detail: capture.Detail) -> None:
    async def main() -> None:
        origin = capture.Origin(process="rank0", incarnation=1)
        recorder = capture.LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock()), actions=detail)
        system = captured_system("rank0", recorder=recorder)
        await asking(system)
        await system.stop()
        recorder.close()

    asyncio.run(main())
    assert_identical(tmp_path)
    assert {bool(actions.digest) for actions in actions_of(tmp_path)} == {detail is capture.Detail.DIGEST}


def test_a_changed_answer_diverges_from_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_turns_are_replayed_from_digests_too(tmp_path, capture.Detail.DIGEST)

    class Changed(Counter):
        @on(Add)
        async def add(self, message: Add) -> Total:
            self.value += message.amount
            return Total(self.value + 1)

    monkeypatch.setitem(globals(), "Counter", Changed)
    verdicts = {verdict.stream: verdict for verdict in capture.replay_log(tmp_path)}
    assert isinstance(verdicts["counter#1"], capture.Divergence)
    assert isinstance(verdicts["asker#2"], capture.Identical)


def test_a_turn_may_be_written_before_it_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        origin = capture.Origin(process="rank0", incarnation=1)
        recorder = capture.LogRecorder(tmp_path / "log", origin, capture.Clocks(hybrid=HybridClock()))
        Flushing.recorders.append(recorder)
        system = captured_system("rank0", recorder=recorder)
        flushing = await system.spawn(Flushing, name="flushing")
        for amount in (1, 2, 3):
            await flushing.ask(Add(amount), timeout=60)
        await system.stop()
        recorder.close()

    try:
        asyncio.run(main())
    finally:
        Flushing.recorders.clear()
    assert_identical(tmp_path / "log")
    (log,) = capture.open_log(tmp_path / "log").processes
    records: list[Any] = [
        entry.record for entry in log.entries() if isinstance(entry.record, EventTaken | ActionsGiven)
    ]
    assert len(records) % 2 == 0
    assert [isinstance(record, EventTaken) for record in records] == [True, False] * (len(records) // 2)
    stamps = [entry.record.hlc for entry in log.entries()]
    assert stamps == sorted(stamps)


def test_a_ring_is_written_in_the_middle_of_a_turn_and_again(tmp_path: Path) -> None:
    async def main() -> None:
        origin = capture.Origin(process="rank0", incarnation=1)
        ring = capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()))

        class Dumping(Counter):
            @on(Add)
            async def add(self, message: Add) -> Total:
                ring.dump(tmp_path / "first", "in a turn")
                return Total(message.amount)

        system = captured_system("rank0", recorder=ring)
        await asking(system)
        dumping = await system.spawn(Dumping, name="dumping")
        await dumping.ask(Add(1), timeout=60)
        ring.dump(tmp_path / "second", "later")
        await system.stop()

    asyncio.run(main())
    for name in ("first", "second"):
        verdicts = {verdict.stream: verdict for verdict in capture.replay_log(tmp_path / name)}
        assert isinstance(verdicts.pop("dumping#3"), capture.Incomplete)
        assert len(verdicts) == 2
        assert all(isinstance(verdict, capture.Identical) for verdict in verdicts.values()), verdicts
    number = {name: len(actions_of(tmp_path / name)) for name in ("first", "second")}
    assert number["second"] == number["first"] + 1


def test_a_call_that_is_thrown_away_is_no_part_of_a_life(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        counter = await system.spawn(Counter, name="counter")
        closing = await system.spawn(Closing, counter, name="closing")
        assert (await closing.ask(Add(1), timeout=60)).value == 1

    record(tmp_path, scenario)
    assert_identical(tmp_path)
    assert events_of(tmp_path, "closing#2").count("Answered") == 1


class Closing(Actor):
    """Makes an ask and drops it."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.to.ask(Add(100), timeout=60).close()
        with pytest.raises(KeyError):
            self.to.ask(Add(200), timeout=60).throw(KeyError())
        total: Total = await self.to.ask(message, timeout=60)
        return total
