"""Messages between actor systems: a closed set of envelopes, each one frame of a link.

An envelope is a MessagePack array that begins with its number. `body` holds a contract. Names and texts
are bounded by the schema, the whole by `MAX_PAYLOAD_BYTES`, before anything is allocated for it.

A message with a long field of bytes is encoded around it, without a copy of these bytes (`Scattered`).
Joined, the pieces are what msgspec makes of the same envelope, to the last byte. Received pieces are decoded
in the same way: a token stands where the long bytes were, and the field that has it then gets them. No peer
knows the token, so a field is exactly the token only where bytes began at the cut.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import inspect as schema

from zbmd.actors.contracts import Contract, ContractDecoder, contract_tag
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.errors import InvalidMessage
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.memory.frame_loans import BLOCK_BYTES_MIN
from zbmd.transport.memory.scattered import LONG_HEAD, LONG_HEAD_BYTES, Scattered

# --- long fields ------------------------------------------------------------------------------------------


LONG_BYTES: Final = BLOCK_BYTES_MIN
"""A shorter field is copied sooner than it is cut out."""
CLASSES_MAX: Final = 4096
"""Of which it is known which fields may be long."""

_FIXARRAY, _FIXARRAY_MAX = 0x90, 15
_ARRAY16: Final = b"\xdc"
_NOTHING: Final = msgspec.Raw()
_TOKEN: Final = os.urandom(16)
_SHORT_HEAD: Final = LONG_HEAD + len(_TOKEN).to_bytes(4)
_fields: dict[type, tuple[str, ...]] = {}


def long_field(message: Any) -> str | None:
    """The name of the message's first field of long `bytes`; None if it has none, or is no contract."""
    names = _fields.get(type(message))
    if names is None:
        names = _learn(type(message))
    for name in names:
        value = getattr(message, name)
        if type(value) is bytes and len(value) >= LONG_BYTES:
            return name
    return None


def _learn(cls: type) -> tuple[str, ...]:
    if len(_fields) >= CLASSES_MAX:
        _fields.clear()
    names: tuple[str, ...] = ()
    if issubclass(cls, Contract):
        info = schema.type_info(cls)
        assert isinstance(info, schema.StructType)
        names = tuple(field.name for field in info.fields if isinstance(field.type, schema.BytesType))
    _fields[cls] = names
    return names


def scatter(
    envelope: msgspec.Struct, message: Contract, name: str, encode: Callable[[Any], bytes]
) -> Scattered:
    """The payload of an envelope whose last field, `body`, is the message; its field `name` is as it was.

    Raises what `encode` raises.
    """
    head = bytearray(encode(msgspec.structs.replace(envelope, body=_NOTHING)))
    names = message.__struct_fields__
    head += _array_of(len(names) + 1)
    head += encode(contract_tag(message))
    into, tail, body = head, bytearray(), b""
    for each in names:
        value = getattr(message, each)
        if each == name:
            body = value
            head += LONG_HEAD + len(body).to_bytes(4)
            into = tail
        else:
            into += encode(value)
    return Scattered(bytes(head), body, bytes(tail))


def _array_of(count: int) -> bytes:
    return bytes((_FIXARRAY | count,)) if count <= _FIXARRAY_MAX else _ARRAY16 + count.to_bytes(2)


def shortened(payload: Scattered) -> bytes | None:
    """The payload with a token in place of its body, to be decoded and `filled`; None if it has no head."""
    head, _, tail = payload.pieces
    return head[:-LONG_HEAD_BYTES] + _SHORT_HEAD + _TOKEN + tail if head else None


def filled(message: Contract, body: bytes) -> bool:
    """Put the body where the token is; False if that is not the whole of a field that may hold any bytes."""
    names = _fields.get(type(message))
    if names is None:
        names = _learn(type(message))
    for name in names:
        if getattr(message, name) == _TOKEN and _takes_any(type(message), name):
            msgspec.structs.force_setattr(message, name, body)
            return True
    return False


@functools.lru_cache(CLASSES_MAX)
def _takes_any(cls: type[Contract], name: str) -> bool:
    """Return whether nothing has looked at the token in its place: no bound of length, no `__post_init__`."""
    info = schema.type_info(cls)
    assert isinstance(info, schema.StructType)
    field = next(field.type for field in info.fields if field.name == name)
    assert isinstance(field, schema.BytesType)
    return field.min_length is None and field.max_length is None and not hasattr(cls, "__post_init__")


TEXT_CHARS_MAX = 4096
ACTOR_NAME_CHARS_MAX = 128
SPAWN_ARGUMENTS_MAX = 64
TELL_ALL_ADDRESSEES_MAX = 256

# Up to 2**63 - 1: msgspec's constraints end there, and no counter here gets near.
Natural = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
ProcessName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ActorName = Annotated[str, msgspec.Meta(pattern=rf"^[A-Za-z0-9_.:<>-]{{1,{ACTOR_NAME_CHARS_MAX}}}$")]
Sender = Annotated[str, msgspec.Meta(max_length=ACTOR_NAME_CHARS_MAX)]
# Of a message: not held against the pattern, which would cost more than to find that nobody has the name; but
# bounded, since it goes back to its sender with a rejection, which must fit into a frame.
Addressee = Annotated[str, msgspec.Meta(max_length=ACTOR_NAME_CHARS_MAX)]
Plain: TypeAlias = bool | int | float | str | None
Payload: TypeAlias = bytes | Scattered
PayloadT = TypeVar("PayloadT", bytes, Payload)
NIL = b"\xc0"


class RefData(msgspec.Struct, array_like=True, frozen=True):
    """A reference on the wire."""

    process: ProcessName
    process_incarnation: Natural
    actor: ActorName
    incarnation: Natural


class ReasonData(msgspec.Struct, array_like=True, frozen=True):
    """A reason on the wire."""

    kind: ReasonKind
    text: Text


class Tell(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A message; `sender` is the telling actor's name or empty."""

    to: Addressee
    incarnation: int
    sender: Sender
    body: msgspec.Raw


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A message that wants an answer within `timeout_ns`; `call` names it on this link."""

    call: Natural
    to: Addressee
    incarnation: int
    timeout_ns: Natural
    sender: Sender
    body: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The answer to an ask; nil if the handler returned None."""

    call: Natural
    body: msgspec.Raw


class Fail(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The error that answers an ask or a spawn."""

    call: Natural
    code: Text
    text: Text


class Bounce(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A told message was rejected."""

    to: Addressee
    incarnation: int
    sender: Sender
    contract: Text
    code: Text
    text: Text


class Watch(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Monitor an actor: exactly one `ActorEnded` with the same number will answer."""

    watch: Natural
    to: ActorName
    incarnation: Natural


class Unwatch(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Monitor it no longer."""

    watch: Natural


class ActorEnded(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """A monitored actor ended; `incarnation` names which."""

    watch: Natural
    incarnation: Natural
    reason: ReasonData


class LinkActors(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Link the receiver's actor `to` with the sender's actor `source`."""

    source: ActorName
    source_incarnation: Natural
    to: ActorName
    incarnation: Natural


class UnlinkActors(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """Undo `LinkActors`."""

    source: ActorName
    source_incarnation: Natural
    to: ActorName
    incarnation: Natural


class Exit(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """The sender's actor `source`, linked with `to`, ended."""

    source: ActorName
    source_incarnation: Natural
    to: ActorName
    incarnation: Natural
    reason: ReasonData


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """Stop the actor, or kill it."""

    to: ActorName
    incarnation: Natural
    reason: ReasonData


class Spawn(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """Spawn a registered class; answered by `Reply` with a `RefData`, or `Fail`."""

    call: Natural
    timeout_ns: Natural
    class_id: Text
    name: Annotated[str, msgspec.Meta(max_length=ACTOR_NAME_CHARS_MAX)]
    parent: RefData | None
    arguments: Annotated[list[Plain], msgspec.Meta(max_length=SPAWN_ARGUMENTS_MAX)]


class Unspawn(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """The asker of the spawn `call` has given up: end its actor, also one that is about to start."""

    call: Natural


class Withdraw(msgspec.Struct, array_like=True, frozen=True, tag=14):
    """The asker has given up the ask `call`: it need not be handled (any further)."""

    call: Natural
    to: Addressee
    incarnation: int


class TellAll(msgspec.Struct, array_like=True, frozen=True, tag=15):
    """A `Tell` to several actors, by name and incarnation."""

    to: Annotated[list[tuple[Addressee, int]], msgspec.Meta(max_length=TELL_ALL_ADDRESSEES_MAX)]
    sender: Sender
    body: msgspec.Raw


Envelope: TypeAlias = (
    Tell
    | Ask
    | Reply
    | Fail
    | Bounce
    | Watch
    | Unwatch
    | ActorEnded
    | LinkActors
    | UnlinkActors
    | Exit
    | Stop
    | Spawn
    | Unspawn
    | Withdraw
    | TellAll
)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, Ref):
        return (value.process, value.process_incarnation, value.actor, value.incarnation)
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a message")


_encode = msgspec.msgpack.Encoder(enc_hook=_enc_hook).encode
_decode_envelope: Callable[[bytes | memoryview], Envelope] = msgspec.msgpack.Decoder(Envelope).decode


def encode(envelope: Envelope) -> bytes:
    """Return the payload of one frame."""
    return _encode(envelope)


def encode_tell(to: str, incarnation: int, sender: str, message: Any) -> Payload:
    """Return a `Tell`, its message encoded in the same pass. Raises `InvalidMessage`."""
    return _with_body(Tell(to, incarnation, sender, message), message)


def encode_body(message: Any) -> msgspec.Raw:
    """Return a message by itself, for `encode_tell_all`. Raises `InvalidMessage`."""
    try:
        return msgspec.Raw(_encode(message))
    except Exception as error:
        raise InvalidMessage(f"{_name(message)} cannot be encoded: {error}") from error


def encode_tell_all(to: list[tuple[str, int]], sender: str, message: Any, body: msgspec.Raw) -> bytes:
    """Return a `TellAll` of `message`, whose bytes are `body`. Raises `InvalidMessage`."""
    return _checked(encode(TellAll(to, sender, body)), message)


def encode_ask(call: int, to: str, incarnation: int, timeout_ns: int, sender: str, message: Any) -> Payload:
    """Return an `Ask`, its message encoded in the same pass. Raises `InvalidMessage`."""
    return _with_body(Ask(call, to, incarnation, timeout_ns, sender, message), message)


def encode_reply(call: int, message: Any) -> Payload:
    """Return a `Reply`; message: a contract, None or a `Ref`. Raises `InvalidMessage`."""
    return _with_body(Reply(call, message), message)


def with_body(envelope: Tell | Ask | Reply, message: Any) -> Payload:
    """An envelope with `message` as its body, whose long bytes are not copied. Raises what msgspec raises."""
    long = long_field(message)
    return _encode(envelope) if long is None else scatter(envelope, message, long, _encode)


def _with_body(envelope: Tell | Ask | Reply, message: Any) -> Payload:
    try:
        payload = with_body(envelope, message)
    except Exception as error:
        raise InvalidMessage(f"{_name(message)} cannot be encoded: {error}") from error
    return _checked(payload, message)


def _checked(payload: PayloadT, message: Any) -> PayloadT:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidMessage(
            f"{_name(message)} takes {len(payload)} bytes, a message at most {MAX_PAYLOAD_BYTES}: "
            "send bulk data as a region and its handle in the message"
        )
    return payload


def _name(message: Any) -> str:
    return contract_tag(message) if isinstance(message, Contract) else type(message).__name__


def reason_data(reason: Reason) -> ReasonData:
    """The reason as it goes on the wire."""
    return ReasonData(reason.kind, reason.text[:TEXT_CHARS_MAX])


class Codec:
    """Decodes what a peer sent. `bind` makes a reference usable in this process."""

    __slots__ = ("_bind", "current", "decode_contract")

    def __init__(self, bind: Callable[[RefData], Ref]) -> None:
        self._bind = bind
        contracts = ContractDecoder(self._dec_hook)
        self.decode_contract = contracts.decode
        self.current = contracts.current

    def decode(self, payload: bytes | memoryview) -> Envelope:
        """Return the envelope in a frame. Raises `RemoteProtocolError`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise RemoteProtocolError(f"an envelope of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
        try:
            return _decode_envelope(payload)
        except Exception as error:
            raise RemoteProtocolError(f"not an envelope: {type(error).__name__}: {error}") from error

    def decode_around(self, payload: Scattered) -> Tell | Ask | Reply | None:
        """The envelope, its body decoded already; the payload's body is the message's long field, not a copy.

        None if it is none of these, or not cut around such a field: then all of it says what it is.
        """
        short = shortened(payload)
        if short is None or len(payload) > MAX_PAYLOAD_BYTES:
            return None
        try:
            envelope = _decode_envelope(short)
            if not isinstance(envelope, Tell | Ask | Reply):
                return None
            message = self.decode_contract(envelope.body)
        except Exception:  # noqa: BLE001 (decoding all of it finds what is wrong with it)
            return None
        if not filled(message, payload.pieces[1]):
            return None
        return msgspec.structs.replace(envelope, body=message)

    def decode_reply(self, body: msgspec.Raw) -> Contract | None:
        """Return the contract in an answer. Raises as `ContractDecoder.decode` does."""
        if memoryview(body).nbytes == 1 and bytes(body) == NIL:  # no contract is that short
            return None
        return self.decode_contract(body)

    def decode_ref(self, body: msgspec.Raw) -> Ref:
        """Return the reference in an answer to `Spawn`. Raises `RemoteProtocolError`."""
        try:
            return self._bind(msgspec.msgpack.decode(body, type=RefData))
        except Exception as error:
            raise RemoteProtocolError(f"not a reference: {error}") from error

    def _dec_hook(self, wanted: type, value: Any) -> Any:
        if wanted is Ref:
            return self._bind(msgspec.convert(value, RefData))
        raise NotImplementedError(f"{wanted.__name__} cannot be part of a message")
