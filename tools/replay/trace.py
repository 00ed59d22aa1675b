"""A capture as a trace for Perfetto (ui.perfetto.dev) or Chrome: the JSON "trace event format".

One process of the trace is one process incarnation, one track is one stream. Steps and operations are slices,
what machines take in are instants, and each frame is a short slice at either end with a flow between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zbmd.actors.core import wire
from zbmd.tools.cli.trace_events import TraceEvents
from zbmd.tools.replay.players import OPERATIONS
from zbmd.tools.replay.story import body_text, envelope_of, stream_names
from zbmd.transport.capture import ClockSkew, Entry, ProcessLog, describe
from zbmd.transport.capture.records import (
    ActionsGiven,
    DeathSeen,
    EventTaken,
    FrameIn,
    FrameOut,
    Mark,
    NoteRecord,
    Raised,
    StreamDeclared,
    TimerRecord,
)
from zbmd.transport.capture.registry import LINK
from zbmd.transport.frames import HEADER_BYTES

FRAME_SLICE_US = 1.0
"""A frame takes no time that is recorded; a flow needs a slice at either end."""


def write_trace(
    path: Path, entries: Iterable[Entry], logs: Sequence[ProcessLog], offsets: Mapping[str, ClockSkew]
) -> int:
    """Write the trace of these entries, in causal order, and return how many flows it has.

    Raises `OSError` if the file cannot be written.
    """
    trace = _Trace(logs, offsets)
    for entry in entries:
        trace.take(entry)
    path.write_bytes(trace.finish().encode("zbmd replay"))
    return trace.flows


class _Trace:
    def __init__(self, logs: Sequence[ProcessLog], offsets: Mapping[str, ClockSkew]) -> None:
        self.flows = 0
        self._pids = {log.name: number for number, log in enumerate(logs, 1)}
        self._offset_ns = {name: skew.offset_ns for name, skew in offsets.items()}
        self._declared = stream_names(logs)
        self._first_ns: int | None = None
        self._last_us = 0.0
        self._events = TraceEvents()
        _name_tracks(self._events, logs)
        self._steps: dict[tuple[str, int], tuple[int, float]] = {}
        self._running: dict[tuple[str, int], tuple[str, float, dict[str, Any]]] = {}
        self._sent: dict[tuple[str, bytes], tuple[str, tuple[int, int, float]]] = {}
        """By who sent it, and the frame's header: its name, and where its slice is."""

    def take(self, entry: Entry) -> None:
        """Take the next entry."""
        record = entry.record
        at_ns = entry.wall_ns - self._offset_ns.get(entry.log.name, 0)
        if self._first_ns is None:
            self._first_ns = at_ns
        at_us = (at_ns - self._first_ns) / 1e3
        self._last_us = max(self._last_us, at_us)
        where = (self._pids[entry.log.name], record.stream, at_us)
        match record:
            case Mark(step=step):
                self._end_step(entry.log.name, record.stream, at_us)
                self._steps[entry.log.name, record.stream] = (step, at_us)
            case EventTaken() if self._kind(entry) == OPERATIONS.name:
                self._operation(entry, record, at_us)
            case EventTaken(tag=tag):
                self._instant(where, tag, describe(record))
            case FrameOut() | FrameIn():
                self._frame(entry, record, where)
            case TimerRecord(name=name):
                self._instant(where, f"timer {name}", describe(record))
            case DeathSeen(process=process):
                self._instant(where, f"end of {process}", describe(record))
            case NoteRecord(text=text):
                self._instant(where, text, text)
            case Raised(error=error):
                self._instant(where, error, describe(record))
            case ActionsGiven() | _:
                pass

    def finish(self) -> TraceEvents:
        """All events; what still runs at the end ends there."""
        for process, stream in list(self._steps):
            self._end_step(process, stream, self._last_us)
        for (process, stream), (name, began_us, told) in self._running.items():
            self._slice(process, stream, name, began_us, self._last_us, {**told, "ended": "not in the log"})
        self._running.clear()
        return self._events

    def _kind(self, entry: Entry) -> str:
        declared = self._declared.get((entry.log.name, entry.record.stream))
        return "" if declared is None else declared.machine

    def _instant(self, where: tuple[int, int, float], name: str, text: str) -> None:
        pid, tid, at_us = where
        self._events.instant(pid, tid, name, at_us, {"what": text})

    def _slice(
        self,
        process: str,
        stream: int,
        name: str,
        began_us: float,
        ended_us: float,
        told: Mapping[str, Any],
    ) -> None:
        self._events.slice(self._pids[process], stream, name, began_us, ended_us, told=told)

    def _end_step(self, process: str, stream: int, at_us: float) -> None:
        step = self._steps.pop((process, stream), None)
        if step is not None:
            self._slice(process, stream, f"step {step[0]}", step[1], at_us, {"step": step[0]})

    def _operation(self, entry: Entry, record: EventTaken, at_us: float) -> None:
        key = (entry.log.name, record.stream)
        fields = _plain(record.fields)
        if record.tag == "OperationBegan":
            self._running[key] = (str(fields.get("operation")), at_us, fields)
            return
        running = self._running.pop(key, None)
        if running is not None:
            name, began_us, told = running
            self._slice(*key, name, began_us, at_us, {**told, "error": fields.get("error")})

    def _frame(self, entry: Entry, record: FrameIn | FrameOut, where: tuple[int, int, float]) -> None:
        name = frame_name(record)
        pid, tid, at_us = where
        self._events.slice(pid, tid, name, at_us, at_us + FRAME_SLICE_US)
        if isinstance(record, FrameOut):
            # The header is the sender's own: its clock gives no stamp twice, but another's may give the same.
            self._sent[entry.log.name, record.header] = name, where
            return
        link = self._declared.get((entry.log.name, record.stream))
        sender = "" if link is None else link.name
        sent = self._sent.pop((sender, record.frame[:HEADER_BYTES]), None)
        if sent is None:
            return  # its sender's log is not here, or ends before it
        self.flows += 1
        self._events.flow(self.flows, sent[0], sent[1], where, category="frame")


def _name_tracks(events: TraceEvents, logs: Sequence[ProcessLog]) -> None:
    for number, log in enumerate(logs, 1):
        events.process(number, log.name)
        events.thread(number, 0, "process")
        for stream, declared in log.streams.items():
            events.thread(number, stream, _track(declared))


def _track(declared: StreamDeclared) -> str:
    return f"link {declared.name}" if declared.machine == LINK else declared.name


def frame_name(record: FrameIn | FrameOut) -> str:
    """Return the name of a frame: what is done with its message, and the contract."""
    envelope = envelope_of(record)
    if isinstance(envelope, wire.Tell | wire.Ask | wire.Reply):
        return f"{type(envelope).__name__.lower()} {body_text(envelope.body).partition('(')[0]}"
    return "frame" if envelope is None else type(envelope).__name__.lower()


def _plain(fields: msgspec.Raw) -> dict[str, Any]:
    try:
        found = msgspec.msgpack.decode(fields, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in found.items()}
