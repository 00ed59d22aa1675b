"""What the two sides of a connection between hosts agree on after hello: one message each way.

The dialer offers, the listener answers or declines with a reason. Both messages are records of type SETUP of
the secure stream, protected by the session's setup keys in every mode. Sans-I/O; reads untrusted input.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Final, TypeVar

import msgspec

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.identity import PeerInfo
from zbmd.transport.secure.session_keys import (
    LANES_MAX,
    SESSION_ID_BYTES,
    TOKEN_BYTES,
    Protection,
    Purpose,
    Secrets,
    Session,
    join_token,
    token_holds,
)

SETUP_BYTES_MAX: Final = 512

_Lane = Annotated[int, msgspec.Meta(ge=0, lt=LANES_MAX)]
_SessionId = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Joins(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which control session a lane joins, and the proof that it may."""

    control_id: _SessionId
    lane: _Lane
    token: _Token


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The dialer's message. joins: None for a control connection."""

    protection: Protection
    joins: Joins | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer", forbid_unknown_fields=True):
    """The listener's message."""

    protection: Protection


class Why(Enum):
    """Why a listener declines a connection of one that holds the cookie."""

    PROTECTION = "protection"
    NO_SESSION = "no-session"
    TOKEN = "token"
    LANE_TAKEN = "lane-taken"
    BUSY = "busy"


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline", forbid_unknown_fields=True):
    """The listener's message when it does not take the connection."""

    why: Why
    protection: Protection
    """What the listener asks for."""


class SetupError(RemoteProtocolError):
    """A connection was not set up, after a good hello. `by_peer` tells that the peer declined ours."""

    by_peer: bool = False


class MalformedSetup(SetupError):
    """What came is no setup message."""


class ProtectionDiffers(SetupError):
    """The two sides ask for different protection."""


class JoinRefused(SetupError):
    """A lane may not join: no such session, a wrong token, or its number is taken."""


class PeerBusy(SetupError):
    """The listener has no room for another connection; the dialer may try again."""


Lookup = Callable[[bytes, int], Session | Why]
"""The control session that a lane may join, by its id and the lane's number, or why there is none."""

MessageT = TypeVar("MessageT")
_encode = msgspec.msgpack.Encoder().encode
_offer_decoder = msgspec.msgpack.Decoder(Offer)
_answer_decoder: msgspec.msgpack.Decoder[Answer | Decline] = msgspec.msgpack.Decoder(Answer | Decline)


def make_offer(
    secrets: Secrets, wanted: Protection, *, control: Session | None = None, lane: int = 0
) -> bytes:
    """The dialer's message; of a lane of `control`, if that is given."""
    joins = None
    if control is not None:
        token = join_token(control.join_key, lane=lane, lane_session_id=secrets.session_id)
        joins = Joins(control_id=control.control_id, lane=lane, token=token)
    return _encode(Offer(protection=wanted, joins=joins))


def accept_offer(
    data: bytes,
    secrets: Secrets,
    wanted: Protection,
    peer: PeerInfo,
    lookup: Lookup,
    *,
    has_room: bool = True,
) -> tuple[bytes, Session | SetupError]:
    """The listener's message to the dialer's `data`, and the session, or why there is none.

    The protection of the offer must be ours. A lane must name an open session of the same peer and
    incarnation, and prove itself. Without `has_room` a control connection is declined. Raises
    `MalformedSetup`, to which there is nothing to say.
    """
    offer = _decode(data, _offer_decoder)
    if offer.protection is not wanted:
        what = f"{peer.name} asks for protection {offer.protection.value}, we for {wanted.value}"
        return _decline(Why.PROTECTION, wanted, ProtectionDiffers(f"{what}: {_PROTECTION_ADVICE}"))
    answer = _encode(Answer(protection=wanted))
    joins = offer.joins
    if joins is None and has_room:
        return answer, control_session(secrets, wanted, peer)
    if joins is None:
        return _decline(Why.BUSY, wanted, PeerBusy(f"{peer.name} asks for one more connection than we take"))
    control = lookup(joins.control_id, joins.lane)
    if isinstance(control, Why):
        error = JoinRefused(f"{peer.name} asks to join a session as lane {joins.lane}: {control.value}")
        return _decline(control, wanted, error)
    if (control.peer.name, control.peer.incarnation) != (peer.name, peer.incarnation):
        error = JoinRefused(f"{peer.name} asks to join the session of {control.peer.name}")
        return _decline(Why.NO_SESSION, wanted, error)
    if not token_holds(joins.token, control.join_key, lane=joins.lane, lane_session_id=secrets.session_id):
        return _decline(Why.TOKEN, wanted, JoinRefused(f"{peer.name} asks to join with a forged token"))
    return answer, lane_session(secrets, control, joins.lane)


def accept_answer(
    data: bytes,
    secrets: Secrets,
    wanted: Protection,
    peer: PeerInfo,
    *,
    control: Session | None = None,
    lane: int = 0,
) -> Session:
    """The dialer's session, from the listener's message.

    Raises `MalformedSetup` on anything else, and the `SetupError` that the listener tells of.
    """
    message = _decode(data, _answer_decoder)
    if isinstance(message, Decline):
        raise _declined(message, wanted, peer)
    if message.protection is not wanted:
        raise MalformedSetup(f"{peer.name} answered our offer with what was not offered: {message}")
    if control is None:
        return control_session(secrets, wanted, peer)
    return lane_session(secrets, control, lane)


def control_session(secrets: Secrets, protection: Protection, peer: PeerInfo) -> Session:
    """The session of a control connection."""
    return Session(
        session_id=secrets.session_id,
        side=secrets.side,
        peer=peer,
        purpose=Purpose.CONTROL,
        protection=protection,
        keys=secrets.keys(Purpose.CONTROL) if protection is Protection.MAC else None,
        control_id=secrets.session_id,
        join_key=secrets.join_key(),
    )


def lane_session(secrets: Secrets, control: Session, lane: int) -> Session:
    """The session of a lane that has joined `control`."""
    return Session(
        session_id=secrets.session_id,
        side=secrets.side,
        peer=control.peer,
        purpose=Purpose.LANE,
        protection=control.protection,
        keys=secrets.keys(Purpose.LANE) if control.protection is Protection.MAC else None,
        control_id=control.control_id,
        lane=lane,
    )


_PROTECTION_ADVICE = "set the same ZBMD_PROTECTION on both sides"


def _decline(why: Why, wanted: Protection, error: SetupError) -> tuple[bytes, SetupError]:
    return _encode(Decline(why=why, protection=wanted)), error


def _declined(message: Decline, wanted: Protection, peer: PeerInfo) -> SetupError:
    error: SetupError
    match message.why:
        case Why.PROTECTION:
            error = ProtectionDiffers(
                f"{peer.name} asks for protection {message.protection.value}, we for "
                f"{wanted.value}: {_PROTECTION_ADVICE}"
            )
        case Why.BUSY:
            error = PeerBusy(f"{peer.name} has no room for another connection: try again")
        case Why.NO_SESSION | Why.TOKEN | Why.LANE_TAKEN:
            error = JoinRefused(f"{peer.name} does not let a lane join our session ({message.why.value})")
    error.by_peer = True
    return error


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    if len(data) > SETUP_BYTES_MAX:
        raise MalformedSetup(f"a setup message of {len(data)} bytes; {SETUP_BYTES_MAX} is the bound")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedSetup(f"{data[:32]!r} is no setup message: {error}") from None
