"""The merged story of a capture: one line an event, on one clock, with what each frame carries."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from zbmd.actors.core import wire
from zbmd.transport.capture import ClockSkew, Entry, ProcessLog, describe, skews
from zbmd.transport.capture.records import ActionsGiven, EventTaken, FrameIn, FrameOut, StreamDeclared
from zbmd.transport.capture.registry import LINK
from zbmd.transport.frames import HEADER_BYTES

ENVELOPE_CHARS_MAX = 160

_envelopes: msgspec.msgpack.Decoder[wire.Envelope] = msgspec.msgpack.Decoder(wire.Envelope)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryLine:
    """One event of the story. at_ns: since 1970, by the clock of the first process; text: what it was."""

    at_ns: int
    process: str
    number: int
    stream: str
    text: str


def clock_offsets(logs: Sequence[ProcessLog]) -> dict[str, ClockSkew]:
    """Return how far each process's wall clock is ahead of the first one's, if frames tie them.

    Processes of one host share a clock, so their frames need not be read for it.
    """
    if len({log.origin.boot_id for log in logs}) == 1 and logs and logs[0].origin.boot_id:
        first = logs[0].segments[0].header.anchor
        found: dict[str, ClockSkew] = {}
        for log in logs:
            anchor = log.segments[0].header.anchor
            offset_ns = (anchor.wall_ns - anchor.monotonic_ns) - (first.wall_ns - first.monotonic_ns)
            found[log.name] = ClockSkew(
                process=log.name, offset_ns=offset_ns, error_ns=0, via=logs[0].name, frames=0
            )
        return found
    return {skew.process: skew for skew in skews(logs)}


def clock_lines(logs: Sequence[ProcessLog], offsets: Mapping[str, ClockSkew]) -> Iterator[str]:
    """The clocks in words."""
    if not logs:
        return
    reference = logs[0].name
    if all(skew.frames == 0 and abs(skew.offset_ns) < 1_000_000 for skew in offsets.values()):
        yield f"clocks: all processes ran on one host; times are those of {reference}"
        return
    yield f"clocks: times are those of {reference}; the others, as far as their frames tell:"
    for log in logs[1:]:
        skew = offsets.get(log.name)
        if skew is None:
            yield f"  {log.name:10} unknown: no frames in both directions tie it to the others"
        else:
            how = f"{skew.frames} frames by way of {skew.via}" if skew.frames else "a clock that they share"
            yield (
                f"  {log.name:10} {skew.offset_ns / 1e3:+,.1f} us, "
                f"give or take {skew.error_ns / 1e3:,.1f} us ({how})"
            )


def clock_time(at_ns: int) -> str:
    """The local time of day, to the microsecond."""
    return datetime.datetime.fromtimestamp(at_ns / 1e9).strftime("%H:%M:%S.%f")


def stream_names(logs: Sequence[ProcessLog]) -> dict[tuple[str, int], StreamDeclared]:
    """Every declared stream by its process and number."""
    return {(log.name, number): declared for log in logs for number, declared in log.streams.items()}


def story(
    entries: Iterable[Entry], logs: Sequence[ProcessLog], offsets: Mapping[str, ClockSkew]
) -> Iterator[StoryLine]:
    """The entries in words, a machine's event and what it answered in one line."""
    declared = stream_names(logs)
    asked: dict[str, tuple[Entry, str]] = {}  # the event of a process that awaits its answer
    for entry in entries:
        record, process = entry.record, entry.log.name
        waiting = asked.pop(process, None)
        if waiting is not None:
            event, text = waiting
            if isinstance(record, ActionsGiven) and record.stream == event.record.stream:
                yield _line(event, f"{text} {describe(record)}", declared, offsets)
                continue
            yield _line(event, text, declared, offsets)
        if isinstance(record, EventTaken):
            asked[process] = (entry, describe(record))
        elif isinstance(record, FrameIn | FrameOut):
            yield _line(entry, _frame_text(record), declared, offsets)
        else:
            yield _line(entry, describe(record), declared, offsets)
    for event, text in asked.values():
        yield _line(event, text, declared, offsets)


def _line(
    entry: Entry,
    text: str,
    declared: Mapping[tuple[str, int], StreamDeclared],
    offsets: Mapping[str, ClockSkew],
) -> StoryLine:
    process = entry.log.name
    found = declared.get((process, entry.record.stream))
    skew = offsets.get(process)
    name = "" if found is None else f"link {found.name}" if found.machine == LINK else found.name
    return StoryLine(
        at_ns=entry.wall_ns - (skew.offset_ns if skew is not None else 0),
        process=process,
        number=entry.number,
        stream=name,
        text=text,
    )


def story_text(lines: Iterable[StoryLine]) -> Iterator[str]:
    """The story as it is printed."""
    for line in lines:
        yield f"{clock_time(line.at_ns)} {line.process:8} {line.number:>6} {line.stream:20} {line.text}"


# ---- what frames carry


def envelope_of(record: FrameIn | FrameOut) -> wire.Envelope | None:
    """Return the actor message in a frame; None if it holds anything else."""
    payload = record.frame[HEADER_BYTES:] if isinstance(record, FrameIn) else record.payload
    try:
        return _envelopes.decode(payload)
    except (ValueError, RecursionError):
        return None


def body_text(body: msgspec.Raw) -> str:
    """A contract as it was on the wire: `id(values)`."""
    try:
        plain = msgspec.msgpack.decode(body)
    except (ValueError, RecursionError):
        return "nothing that can be read"
    if not isinstance(plain, list) or not plain:
        return repr(plain)
    values = ", ".join(_short(value) for value in plain[1:])
    return f"{plain[0]}({values})"


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{value[:8].hex()}…[{len(value)}]" if len(value) > 8 else f"0x{value.hex()}"
    return repr(value)


def _frame_text(record: FrameIn | FrameOut) -> str:
    arrow = "<-" if isinstance(record, FrameIn) else "->"
    envelope = envelope_of(record)
    match envelope:
        case None:
            return describe(record)
        case wire.Tell():
            text = f"tell {envelope.to} {body_text(envelope.body)}"
        case wire.Ask():
            text = f"ask {envelope.call} of {envelope.to} {body_text(envelope.body)}"
        case wire.Reply():
            text = f"answer to ask {envelope.call}: {body_text(envelope.body)}"
        case _:
            text = repr(envelope)
    if len(text) > ENVELOPE_CHARS_MAX:
        text = text[: ENVELOPE_CHARS_MAX - 1] + "…"
    return f"{arrow} {text}"
