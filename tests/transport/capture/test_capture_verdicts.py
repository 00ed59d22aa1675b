"""Verdicts of replays in which a machine raises, breaks, has changed, or whose log is not whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from zbmd.transport import capture
from zbmd.transport.capture.records import Lost
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError


def recorder(directory: Path, **options: Any) -> capture.LogRecorder:
    origin = capture.Origin(process="rank0", incarnation=1)
    return capture.LogRecorder(directory, origin, capture.Clocks(hybrid=HybridClock()), **options)


def verdicts(directory: Path, wanted: capture.Filter | None = None) -> list[capture.Verdict]:
    return list(capture.replay_log(directory, wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Add this much."""

    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The sum so far."""

    value: int


class Adder:
    """Refuses negative amounts; its invariant breaks beyond `limit`; adds `extra` each time."""

    def __init__(self, limit: int, extra: int = 0) -> None:
        self.total = 0
        self.limit = limit
        self.extra = extra

    def handle(self, event: Add, *, now_ns: int) -> list[Total]:
        """Add."""
        if event.amount < 0:
            raise LocalProtocolError(f"{event.amount} is negative at {now_ns}")
        self.total += event.amount + self.extra
        return [Total(value=self.total)]

    def check_invariants(self) -> None:
        """Within the limit."""
        assert self.total <= self.limit, self.total


class Extra:
    """Set the amount that the adders built from now on add."""

    value: ClassVar[int] = 0


ADDER: capture.MachineKind[Add, Total] = capture.register(
    "test.adder", 1, lambda config: Adder(config["limit"], Extra.value), events=Add, actions=Total
)

SEALED: capture.MachineKind[Add, Total] = capture.register(
    "test.sealed-adder",
    1,
    lambda config: Adder(config["limit"]),
    events=Add,
    actions=Total,
    secrets=("limit",),
)


def adder(log: capture.Recorder, limit: int = 100) -> capture.Tap[Add, Total]:
    return capture.Tap(log, ADDER, "adder", Adder(limit), {"limit": limit})


def test_errors_are_part_of_the_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    for amount in (1, -5, 2, 200):
        try:
            tap.handle(Add(amount=amount), now_ns=amount)
        except LocalProtocolError:
            assert amount < 0
    with pytest.raises(AssertionError):
        tap.check_invariants()
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.events == 4
    monkeypatch.setattr(Extra, "value", -50)
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Divergence) and verdict.difference.startswith("action 0")


def test_an_invariant_that_breaks_only_now_is_a_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    tap.handle(Add(amount=50), now_ns=1)
    tap.handle(Add(amount=1), now_ns=2)
    log.close()
    monkeypatch.setattr(Adder, "check_invariants", _always_broken)
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Divergence) and "invariant" in verdict.difference
    assert verdict.event == "<- Add(amount=50)"


def _always_broken(_: Adder) -> None:
    raise AssertionError("broken")


def test_an_error_that_no_longer_comes_is_a_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    with pytest.raises(LocalProtocolError):
        tap.handle(Add(amount=-1), now_ns=1)
    log.close()
    monkeypatch.setattr(Adder, "handle", lambda *_, **__: [])
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Divergence)
    assert "-1 is negative" in verdict.expected and verdict.actual == "nothing"


def test_what_was_recorded_and_fits_no_more_ends_the_replay_with_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    for amount in (1, 2):
        tap.handle(Add(amount=amount), now_ns=amount)
    log.close()

    def handle(self: Adder, event: Add, *, now_ns: int) -> list[Total]:
        if now_ns == 2:
            raise capture.CaptureMismatch("its arguments are others now")
        return [Total(value=event.amount)]

    monkeypatch.setattr(Adder, "handle", handle)
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Incomplete) and verdict.events == 1
    assert "its arguments are others now" in verdict.reason
    assert [("amount=1" in line, "amount=2" in line) for line in verdict.story if "Add(" in line] == [
        (True, False),
        (False, True),
    ]


def test_a_loss_ends_the_replay_and_not_in_a_guess(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    tap.handle(Add(amount=1), now_ns=1)
    log.lost(7, "the disk was slow")
    tap.handle(Add(amount=1), now_ns=2)
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Incomplete)
    assert (verdict.events, "7 records are missing" in verdict.reason) == (1, True)


def test_what_cannot_be_recorded_does_not_fail_the_machine(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    assert tap.handle(Add(amount=1 << 70), now_ns=1) == [Total(value=1 << 70)]
    odd = adder(log, limit=1 << 80)
    assert odd.handle(Add(amount=1), now_ns=1) == [Total(value=1)]
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Incomplete) and verdict.events == 0
    notes = [e.record for e in capture.open_log(tmp_path).processes[0].entries()]
    assert [n.records for n in notes if isinstance(n, Lost)] == [1, 1, 1]


def test_a_ring_that_forgot_the_beginning_says_so(tmp_path: Path) -> None:
    origin = capture.Origin(process="rank0", incarnation=1)
    ring = capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()), ring_bytes=64 * 1024)
    old = adder(ring, limit=10_000)
    for i in range(1000):
        old.handle(Add(amount=1), now_ns=i)
    new = adder(ring)
    new.handle(Add(amount=1), now_ns=1)
    ring.dump(tmp_path, "to see")
    first, second = verdicts(tmp_path)
    assert isinstance(first, capture.Incomplete) and "beginning" in first.reason
    assert isinstance(second, capture.Identical) and second.events == 1


def test_an_answer_cut_off_with_the_log_is_no_divergence(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    tap.handle(Add(amount=1), now_ns=1)
    log.event(tap.stream, ADDER.events, Add(amount=1), 2)
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.events == 2


def test_a_damaged_log_is_replayed_up_to_the_damage(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    tap.handle(Add(amount=1), now_ns=1)
    log.flush()
    for i in range(10):
        tap.handle(Add(amount=1), now_ns=i)
    log.close()
    path = log.path / "000000.zlog"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Incomplete)
    assert verdict.events == 1 and "damaged at byte" in verdict.reason


def test_a_replay_ends_with_the_steps_asked_for(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    tap = adder(log)
    for step in range(10):
        tap.mark(step)
        tap.handle(Add(amount=1), now_ns=step)
    log.close()
    (verdict,) = verdicts(tmp_path, capture.Filter(steps=(2, 4)))
    assert isinstance(verdict, capture.Identical) and verdict.events == 5
    assert verdicts(tmp_path, capture.Filter(processes=frozenset({"rank7"}))) == []


def test_one_stream_replays_alone(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    first, second = adder(log), adder(log)
    for i in range(4):
        first.handle(Add(amount=1), now_ns=i)
        second.handle(Add(amount=2), now_ns=i)
    log.close()
    (process,) = capture.open_log(tmp_path).processes
    for tap in (first, second):
        mine: Iterator[capture.Entry] = (e for e in process.entries() if e.record.stream == tap.stream)
        verdict = capture.replay_stream(mine)
        assert isinstance(verdict, capture.Identical) and verdict.events == 4
    with pytest.raises(capture.CaptureMismatch):
        capture.replay_stream(entry for entry in process.entries() if entry.record.stream == 0)
    with pytest.raises(capture.CaptureMismatch):
        capture.replay_stream([])


def test_other_code_is_told_from_a_broken_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorder(tmp_path)
    adder(log).handle(Add(amount=1), now_ns=1)
    log.close()
    monkeypatch.setattr(ADDER.events, "fingerprint", "of other code")
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.code_changed
    monkeypatch.setattr(Extra, "value", 1)
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Divergence) and "changed since" in verdict.difference


def test_an_unknown_machine_and_a_missing_secret_are_named(tmp_path: Path) -> None:
    later = capture.MachineKind[Add, Total](
        name="test.adder", version=2, build=ADDER.build, events=ADDER.events, actions=ADDER.actions
    )
    log = recorder(tmp_path)
    capture.Tap(log, later, "later", Adder(10), {"limit": 10}).handle(Add(amount=1), now_ns=1)
    capture.Tap(log, ADDER, "odd", Adder(10), {"limits": 10}).handle(Add(amount=1), now_ns=1)
    capture.Tap(log, SEALED, "sealed", Adder(10), {"limit": 10}).handle(Add(amount=1), now_ns=1)
    log.close()
    found = verdicts(tmp_path)
    assert all(isinstance(verdict, capture.Incomplete) for verdict in found)
    reasons = [verdict.reason for verdict in found if isinstance(verdict, capture.Incomplete)]
    assert "version 2" in reasons[0] and "versions [1]" in reasons[0]
    assert "builds no test.adder" in reasons[1]
    assert "secret limit" in reasons[2]
    (verdict,) = [
        v for v in capture.replay_log(tmp_path, secrets={"limit": 10}) if isinstance(v, capture.Identical)
    ]
    assert verdict.stream == "sealed"


def test_a_machine_is_registered_once() -> None:
    with pytest.raises(LocalProtocolError):
        capture.register("test.adder", 1, ADDER.build, events=Add, actions=Total)
