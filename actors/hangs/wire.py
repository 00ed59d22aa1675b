"""Messages between a rank's watchdog and its host, on a socket of their own.

The rank's event loop may be what hangs, so nothing of this goes over its links: one packet is one message,
sent and received by the watchdog's thread. The kernel proves the sender (SO_PEERCRED).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeVar

import msgspec

from zbmd.actors.view import RANKS_MAX
from zbmd.transport.errors import RemoteProtocolError

PACKET_BYTES_MAX = 128 * 1024
TEXT_CHARS_MAX = 200
FRAMES_MAX = 16
"""Of one stack, the innermost ones."""
PLACES_MAX = 12
"""In one standing: what is stuck comes first."""
GROUPS_MAX = 16
"""As many as a process has channels."""
MEMBERS_MAX = RANKS_MAX

RUNS = "runs"
"""Of a thread that uses a processor."""

Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PlaceKind(Enum):
    """The kinds of places."""

    LOOP = "loop"
    HANDLER = "handler"
    ACTIVITY = "activity"
    OPERATION = "operation"
    MAIN = "main"


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of a stack. `weight`: 2 for the user's code, 1 for a package's, 0 for Python's own."""

    file: Text
    line: Count
    function: Text
    weight: Annotated[int, msgspec.Meta(ge=0, le=2)] = 2


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The position of something that is under way, outermost frame first.

    who: `rank2`, or `rank2/trainer` for an actor; what: `handler Train.step`, `step 41: forward`; still_ns:
    how long it has made no progress; waits_for: the address of the actor whose answer it waits for, or
    nothing; doing: what its thread does: `RUNS`, or the kernel's function that it sleeps in, if known.
    """

    kind: PlaceKind
    who: Text
    what: Text
    still_ns: Count
    stuck: bool
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=FRAMES_MAX)] = ()
    waits_for: Text = ""
    doing: Text = ""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """The position of a rank in a group. `sequence`: of the operation begun last, 0 for none."""

    channel: Count
    epoch: Count
    sequence: Count
    operation: Text
    running: bool
    stuck: bool
    still_ns: Count
    members: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MEMBERS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first packet of a rank."""

    rank: Count
    incarnation: Count


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The watchdog of a rank runs: its process is not stopped, and no native code keeps the GIL."""


class Standing(msgspec.Struct, frozen=True, array_like=True, tag="standing"):
    """Where a rank stands: unasked whenever something is stuck, or is so no more, and as the answer to
    `Ask`."""

    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=PLACES_MAX)]
    groups: Annotated[tuple[Position, ...], msgspec.Meta(max_length=GROUPS_MAX)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The host asks a rank where it stands."""


class Extend(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """The host has a rank extend its time-outs: another one is in a debugger."""


FromRank = Hello | Beat | Standing
FromHost = Ask | Extend

MessageT = TypeVar("MessageT", Hello | Beat | Standing, Ask | Extend)

_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_host: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


def cut(text: str) -> str:
    """Return the text, short enough to be sent."""
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"


def cut_path(path: str) -> str:
    """Return a path, short enough to be sent: its end is what tells."""
    return path if len(path) <= TEXT_CHARS_MAX else "…" + path[-TEXT_CHARS_MAX + 1 :]


def encode(message: FromRank | FromHost) -> bytes:
    """One packet."""
    return msgspec.msgpack.encode(message)


def decode_from_rank(packet: bytes) -> FromRank:
    """Decode a message of a rank. Raises `RemoteProtocolError`."""
    return _decode(_from_rank, packet)


def decode_from_host(packet: bytes) -> FromHost:
    """Decode a message of the host. Raises `RemoteProtocolError`."""
    return _decode(_from_host, packet)


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], packet: bytes) -> MessageT:
    if len(packet) > PACKET_BYTES_MAX:
        raise RemoteProtocolError(f"a packet of {len(packet)} bytes; {PACKET_BYTES_MAX} is the bound")
    try:
        return decoder.decode(packet)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"no packet of a watchdog: {error}") from error
