"""Replay: give a fresh machine the recorded events, and compare what it answers, byte for byte.

A machine is a pure function of its configuration and events, so the same code answers the same. Where it does
not, the code has changed or was never pure, and the first difference says where.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, assert_never

import msgspec
import xxhash

from zbmd.transport.capture import records as rec
from zbmd.transport.capture.errors import CaptureDamaged, CaptureMismatch
from zbmd.transport.capture.reader import Entry, Filter, ProcessLog, open_log
from zbmd.transport.capture.recorder import TEXT_CHARS_MAX
from zbmd.transport.capture.registry import LINK, MachineKind, find
from zbmd.transport.errors import RemoteProtocolError, ZbmdError
from zbmd.transport.frames import HEADER_BYTES, unpack_header
from zbmd.transport.machine import Machine

# Records in words, one line each.

VALUE_CHARS_MAX = 80
BYTES_SHOWN_MAX = 8


def describe(record: rec.Record) -> str:
    """A record in one line, without its time and stream."""
    match record:
        case rec.StreamDeclared(name=name, machine=machine, version=version, continued=continued):
            again = " (it began before this file)" if continued else ""
            return f"begins: {machine or 'stream'} {name}, version {version}{again}"
        case rec.EventTaken(tag=tag, fields=fields):
            return f"<- {_instance(tag, _plain(fields))}"
        case rec.ActionsGiven(count=count, digest=digest, actions=actions):
            return f"-> {count} actions, digest {digest.hex()}" if digest else f"-> {actions_text(actions)}"
        case rec.Raised(where=where, error=error, message=message):
            return f"!! {where} raised {error}: {message}"
        case rec.FrameIn(frame=frame):
            return f"<- {_frame(frame, len(frame) - HEADER_BYTES)}"
        case rec.FrameOut(header=header, payload=payload):
            return f"-> {_frame(header, len(payload))}"
        case rec.TimerRecord(name=name, due_ns=due_ns):
            return f"<- timer {name}, {(record.at_ns - due_ns) / 1e3:.1f} us late"
        case rec.DeathSeen(process=process, incarnation=incarnation, clean=clean, reason=reason):
            return f"<- {process}#{incarnation} {'left' if clean else 'died'}: {reason}"
        case rec.SeedDrawn(name=name, value=value):
            return f"<- seed {name} {_text(value)}"
        case rec.ClockRead(wall_ns=wall_ns):
            return f"<- wall clock {wall_ns} ns"
        case rec.NoteRecord(text=text):
            return f"-- {text}"
        case rec.Bulk(name=name, payload_bytes=payload_bytes, digest=digest):
            return f"<- bulk {name}, {payload_bytes} bytes, digest {digest.hex()}"
        case rec.StateTaken(state=state):
            return f"-- its state, {len(bytes(state))} bytes"
        case rec.Mark(step=step):
            return f"== step {step}"
        case rec.Lost(records=records, reason=reason):
            return f"?? {records} records are missing: {reason}"
        case rec.EndRecord(reason=reason):
            return f"ends: {reason}"
        case _:
            assert_never(record)


def actions_text(encoded: msgspec.Raw | bytes) -> str:
    """Encoded actions as `Name(field=value, …), …`."""
    plain = _plain(encoded)
    if not isinstance(plain, list):
        return "nothing that can be read"
    return ", ".join(action_texts(plain)) or "nothing"


def action_texts(plain: list[Any]) -> list[str]:
    """Each of the decoded `[[name, fields], …]` in words."""
    texts: list[str] = []
    for pair in plain:
        match pair:
            case [str(tag), fields]:
                texts.append(_instance(tag, fields))
            case _:
                texts.append(_text(pair))
    return texts


def _instance(tag: str, fields: object) -> str:
    if not isinstance(fields, Mapping):
        return f"{tag}({_text(fields)})"
    return f"{tag}({', '.join(f'{key}={_text(value)}' for key, value in fields.items())})"


def _plain(encoded: msgspec.Raw | bytes) -> object:
    try:
        return msgspec.msgpack.decode(encoded)
    except (ValueError, RecursionError):
        return "nothing that can be read"


def _text(value: object) -> str:
    if isinstance(value, bytes):
        shown = value[:BYTES_SHOWN_MAX].hex()
        return f"{shown}…[{len(value)}]" if len(value) > BYTES_SHOWN_MAX else f"0x{shown}"
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _frame(data: bytes, payload_bytes: int) -> str:
    try:
        header = unpack_header(data)
    except RemoteProtocolError as error:
        return f"a frame that cannot be read ({error})"
    return f"frame of {payload_bytes} bytes, epoch {header.epoch}, trace {header.trace_id:#x}"


NO_BEGINNING = (
    "its beginning is not in the log: it was deleted at the bound on the disk, or has left the ring; "
    "its records can be shown, but no state to play it from was recorded since"
)
STORY_RECORDS = 12
"""Records before a divergence that are reported with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identical:
    """The machine answered all as recorded.

    code_changed: its events or actions look otherwise now. begun_at: 0 if it was played from its beginning,
    else the number of the record of its state from which it was, for what was before is not in the log.
    """

    process: str
    stream: str
    events: int
    code_changed: bool = False
    begun_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first event that is answered otherwise than recorded.

    number: of the event's record in its process; step: the last one marked before it, if any; expected: what
    was recorded; actual: what the code says now; difference: the first action that differs; story: the
    stream's records up to the event, oldest first.
    """

    process: str
    stream: str
    number: int
    step: int | None
    event: str
    expected: str
    actual: str
    difference: str
    story: tuple[str, ...]
    code_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """Identical as far as the log goes, which is not to the stream's end.

    reason: why it cannot go on; story: the stream's records before that, oldest first, if an event of it is
    why.
    """

    process: str
    stream: str
    events: int
    reason: str
    story: tuple[str, ...] = ()
    code_changed: bool = False


Verdict: TypeAlias = Identical | Divergence | Incomplete


class _Stop(Exception):
    """Leaves the replay of one stream with its verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


class StreamReplay:
    """Replays one machine's stream as its records come in.

    secrets: what the recorded configuration lacks, by name (see `MachineKind.secrets`).
    """

    def __init__(self, declared: Entry, *, secrets: Mapping[str, Any] | None = None) -> None:
        record = declared.record
        if not isinstance(record, rec.StreamDeclared):
            raise CaptureMismatch(f"a stream begins with its declaration, not with: {describe(record)}")
        self.process = declared.log.name
        self.stream = record.name
        self.number = record.stream
        self.events = 0
        self.verdict: Verdict | None = None
        self._step: int | None = None
        # Kept as they are, and told only if they are asked for: words would take most of a replay's time.
        self._story: deque[tuple[int, rec.Record]] = deque(maxlen=STORY_RECORDS)
        self._asked: tuple[int, rec.Record] = (declared.number, record)
        """The last event."""
        self._owed = False
        """Whether its recorded answer has yet to come."""
        self._answer = b""
        self._error: Exception | None = None
        """What `handle` raises now instead of answering."""
        self._broken: Exception | None = None
        """What `check_invariants` raises now, and did not yet when it was recorded."""
        self._code_changed = False
        self._awaits_state = record.continued
        """Its beginning is not in the log: it is played from the first state of it that is."""
        self._begun_at = 0
        try:
            self._kind, self._machine = self._build(record, secrets or {})
        except _Stop as stop:
            self.verdict = stop.verdict

    def feed(self, entry: Entry) -> Verdict | None:
        """Take the process's next record; returns a verdict once there is one, which then stands.

        Records of other streams may be fed too: their marks and losses count.
        """
        if self.verdict is None:
            try:
                self._feed(entry)
            except _Stop as stop:
                self.verdict = stop.verdict
        return self.verdict

    def finish(self) -> Verdict:
        """The log is at its end: an answer that is still owed was cut off with it."""
        if self.verdict is None and self._awaits_state:
            self.verdict = self._incomplete(NO_BEGINNING)
        if self.verdict is None and self._broken is not None and not self._owed:
            self.verdict = self._invariant_broken(self._broken)
        if self.verdict is None:
            self.verdict = Identical(
                process=self.process,
                stream=self.stream,
                events=self.events,
                code_changed=self._code_changed,
                begun_at=self._begun_at,
            )
        return self.verdict

    def cut(self, reason: str) -> Verdict:
        """The log cannot be read any further."""
        if self.verdict is None:
            self.verdict = self._incomplete(reason)
        return self.verdict

    def _build(
        self, record: rec.StreamDeclared, secrets: Mapping[str, Any]
    ) -> tuple[MachineKind[Any, Any], Machine[Any, Any]]:
        try:
            kind = find(record.machine, record.version)
        except CaptureMismatch as error:
            raise _Stop(self._incomplete(str(error))) from None
        if record.continued and kind.states is None:
            raise _Stop(self._incomplete(NO_BEGINNING))
        self._code_changed = kind.fingerprint != record.fingerprint
        missing = [name for name in kind.secrets if name not in secrets]
        if missing:
            raise _Stop(self._incomplete(f"it cannot be built without the secret {', '.join(missing)}"))
        try:
            config = _config.decode(record.config)
            machine = kind.build({**config, **{name: secrets[name] for name in kind.secrets}})
        except (ZbmdError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise _Stop(self._incomplete(f"its configuration builds no {kind.name}: {error!r}")) from None
        return kind, machine

    def _feed(self, entry: Entry) -> None:
        record = entry.record
        match record:
            case rec.Mark(step=step):
                self._step = step
            case rec.Lost(records=records, reason=reason) if not self._awaits_state:
                raise _Stop(self._incomplete(f"{records} records are missing at {entry.number}: {reason}"))
            case _:
                pass
        if record.stream != self.number:
            return
        if self._awaits_state and not isinstance(record, rec.EndRecord):
            if isinstance(record, rec.StateTaken):
                self._restore(entry.number, record)
            return
        match record:
            case rec.EventTaken():
                self._take(entry.number, record)
            case rec.ActionsGiven():
                self._compare(record)
            case rec.Raised():
                self._compare_error(record)
            case rec.EndRecord():
                raise _Stop(self.finish())
            case _:
                pass
        self._story.append((entry.number, record))

    def _restore(self, number: int, record: rec.StateTaken) -> None:
        states = self._kind.states
        if states is None or record.fingerprint != states.fingerprint:
            raise _Stop(self._incomplete(f"{NO_BEGINNING}; its state was recorded by other code"))
        try:
            states.restore(self._machine, record.state)
        except CaptureMismatch as error:
            raise _Stop(self._incomplete(f"record {number}: {error}")) from None
        self._awaits_state, self._begun_at = False, number

    def _take(self, number: int, record: rec.EventTaken) -> None:
        """Give the machine an event; its answer is compared when the recorded one comes."""
        if self._broken is not None:
            raise _Stop(self._invariant_broken(self._broken))
        if self._owed:
            raise _Stop(self._incomplete(f"the answer to record {self._asked[0]} is missing"))
        try:
            event = self._kind.events.decode(record.tag, record.fields)
        except CaptureMismatch as error:
            raise _Stop(self._unplayable(number, error)) from None
        self._asked = (number, record)
        self._owed = True
        self._answer, self._error = b"", None
        self.events += 1
        try:
            self._answer = self._kind.actions.encode_all(self._machine.handle(event, now_ns=record.at_ns))
        except CaptureMismatch as error:
            # It is not the machine that speaks: what was recorded does not fit the code any more.
            self.events -= 1
            self._story.append((number, record))
            raise _Stop(self._unplayable(number, error)) from None
        except Exception as error:  # noqa: BLE001 (whatever it is: it must have been recorded too)
            self._error = error
            return
        try:
            self._machine.check_invariants()
        except Exception as error:  # noqa: BLE001 (of a state that was damaged, anything)
            self._broken = error

    def _compare(self, record: rec.ActionsGiven) -> None:
        if not self._owed:
            raise _Stop(self._incomplete("the log has an answer to no event"))
        self._owed = False
        if self._error is not None:
            raise _Stop(self._divergence(describe(record), _raised(self._error), "it raised"))
        if record.digest:
            if xxhash.xxh3_128_digest(self._answer) != record.digest:
                found = actions_text(self._answer)
                raise _Stop(self._divergence(describe(record), found, "the digest differs"))
        elif self._answer != bytes(record.actions):
            raise _Stop(self._different(record))

    def _compare_error(self, record: rec.Raised) -> None:
        if record.where == "handle":
            if not self._owed:
                raise _Stop(self._incomplete("the log has an error to no event"))
            found, self._owed = self._error, False
        else:
            found, self._broken = self._broken, None
        if found is None or not _same_error(found, record):
            actual = actions_text(self._answer) if found is None else _raised(found)
            raise _Stop(self._divergence(describe(record), actual, "the error differs"))

    def _invariant_broken(self, error: Exception) -> Divergence:
        return self._divergence("no broken invariant", _raised(error), "an invariant is broken")

    def _different(self, record: rec.ActionsGiven) -> Divergence:
        actual = msgspec.msgpack.decode(self._answer)
        try:
            expected = msgspec.msgpack.decode(record.actions)
        except (ValueError, RecursionError):
            expected = []
        wanted = action_texts(expected if isinstance(expected, list) else [])
        found = action_texts(actual)
        width = max(len(wanted), len(found))
        wanted += ["nothing"] * (width - len(wanted))
        found += ["nothing"] * (width - len(found))
        differing = [i for i in range(width) if wanted[i] != found[i]]
        at = differing[0] if differing else 0
        difference = f"action {at}: expected {wanted[at]}, actual {found[at]}"
        return self._divergence(actions_text(record.actions), actions_text(self._answer), difference)

    def _divergence(self, expected: str, actual: str, difference: str) -> Divergence:
        number, event = self._asked
        return Divergence(
            process=self.process,
            stream=self.stream,
            number=number,
            step=self._step,
            event=describe(event),
            expected=expected,
            actual=actual,
            difference=difference + self._changed(),
            story=self._story_lines(),
            code_changed=self._code_changed,
        )

    def _story_lines(self) -> tuple[str, ...]:
        return tuple(f"{number} {describe(record)}" for number, record in self._story)

    def _unplayable(self, number: int, error: CaptureMismatch) -> Incomplete:
        return self._incomplete(f"record {number}: {error}{self._changed()}", self._story_lines())

    def _incomplete(self, reason: str, story: tuple[str, ...] = ()) -> Incomplete:
        return Incomplete(
            process=self.process,
            stream=self.stream,
            events=self.events,
            reason=reason,
            story=story,
            code_changed=self._code_changed,
        )

    def _changed(self) -> str:
        return " (its events or actions have changed since it was recorded)" if self._code_changed else ""


_config = msgspec.msgpack.Decoder(dict[str, Any])


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _same_error(error: Exception, record: rec.Raised) -> bool:
    if type(error).__name__ != record.error:
        return False
    # What a broken invariant shows is for people, and may hold addresses.
    return isinstance(error, AssertionError) or str(error)[:TEXT_CHARS_MAX] == record.message


def replay_stream(entries: Iterable[Entry], *, secrets: Mapping[str, Any] | None = None) -> Verdict:
    """Replay one machine from its entries, the first of which declares its stream.

    Raises `CaptureMismatch` if it does not.
    """
    iterator = iter(entries)
    first = next(iterator, None)
    if first is None:
        raise CaptureMismatch("there are no records to replay")
    replay = StreamReplay(first, secrets=secrets)
    for entry in iterator:
        if replay.feed(entry) is not None:
            break
    return replay.finish()


def replay_process(
    log: ProcessLog, wanted: Filter | None = None, *, secrets: Mapping[str, Any] | None = None
) -> Iterator[Verdict]:
    """Replay all machines of a process, in one pass; a verdict each, as soon as it is known.

    wanted: only its processes, steps and `until_ns` count: a machine is always replayed from its start, and
    to the end of the last step asked for. A damaged log is replayed up to the damage.
    """
    wanted = wanted or Filter()
    seen: set[int] = set()
    running: dict[int, StreamReplay] = {}
    cut = ""
    try:
        for entry in log.entries():
            record = entry.record
            if _is_past(entry, wanted):
                break
            if isinstance(record, rec.StreamDeclared) and record.machine not in (LINK, ""):
                if record.stream in seen:
                    continue  # declared again in a later segment
                seen.add(record.stream)
                running[record.stream] = StreamReplay(entry, secrets=secrets)
            # A mark or a loss concerns every machine; anything else its own alone.
            everyone = isinstance(record, rec.Mark | rec.Lost)
            for stream in list(running) if everyone else [record.stream] if record.stream in running else []:
                verdict = running[stream].feed(entry)
                if verdict is not None:
                    del running[stream]
                    yield verdict
    except CaptureDamaged as damage:
        cut = str(damage)
    for replay in running.values():
        yield replay.cut(cut) if cut else replay.finish()


def _is_past(entry: Entry, wanted: Filter) -> bool:
    if wanted.until_ns is not None and entry.wall_ns >= wanted.until_ns:
        return True
    return (
        wanted.steps is not None
        and isinstance(entry.record, rec.Mark)
        and entry.record.step > wanted.steps[1]
    )


def replay_log(
    path: Path, wanted: Filter | None = None, *, secrets: Mapping[str, Any] | None = None
) -> Iterator[Verdict]:
    """Replay every machine of every wanted process of a capture. Raises as `open_log`."""
    wanted = wanted or Filter()
    for process in open_log(path).processes:
        if wanted.takes_process(process.origin):
            yield from replay_process(process, wanted, secrets=secrets)
