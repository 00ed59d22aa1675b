"""Records in words, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec

from zbmd.transport.capture.records import (
    ActionsGiven,
    Bulk,
    ClockRead,
    DeathSeen,
    End,
    EventTaken,
    FrameIn,
    FrameOut,
    Lost,
    Mark,
    Note,
    Raised,
    Record,
    SeedDrawn,
    StateTaken,
    StreamDeclared,
    TimerFired,
)
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, unpack_header

VALUE_CHARS_MAX = 80
BYTES_SHOWN_MAX = 8


def describe(record: Record) -> str:
    """A record in one line, without its time and stream."""
    match record:
        case StreamDeclared(name=name, machine=machine, version=version, continued=continued):
            again = " (it began before this file)" if continued else ""
            return f"begins: {machine or 'stream'} {name}, version {version}{again}"
        case EventTaken(tag=tag, fields=fields):
            return f"<- {_instance(tag, _plain(fields))}"
        case ActionsGiven(count=count, digest=digest, actions=actions):
            return f"-> {count} actions, digest {digest.hex()}" if digest else f"-> {actions_text(actions)}"
        case Raised(where=where, error=error, message=message):
            return f"!! {where} raised {error}: {message}"
        case FrameIn(frame=frame):
            return f"<- {_frame(frame, len(frame) - HEADER_BYTES)}"
        case FrameOut(header=header, payload=payload):
            return f"-> {_frame(header, len(payload))}"
        case TimerFired(name=name, due_ns=due_ns):
            return f"<- timer {name}, {(record.at_ns - due_ns) / 1e3:.1f} us late"
        case DeathSeen(process=process, incarnation=incarnation, clean=clean, reason=reason):
            return f"<- {process}#{incarnation} {'left' if clean else 'died'}: {reason}"
        case SeedDrawn(name=name, value=value):
            return f"<- seed {name} {_text(value)}"
        case ClockRead(wall_ns=wall_ns):
            return f"<- wall clock {wall_ns} ns"
        case Note(text=text):
            return f"-- {text}"
        case Bulk(name=name, payload_bytes=payload_bytes, digest=digest):
            return f"<- bulk {name}, {payload_bytes} bytes, digest {digest.hex()}"
        case StateTaken(state=state):
            return f"-- its state, {len(bytes(state))} bytes"
        case Mark(step=step):
            return f"== step {step}"
        case Lost(records=records, reason=reason):
            return f"?? {records} records are missing: {reason}"
        case End(reason=reason):
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
