"""Session setup: what two hosts agree on after the hello, by one message each way.

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
from zbmd.transport.secure.protection import (
    SESSION_ID_BYTES,
    STRIPES_MAX,
    TOKEN_BYTES,
    Protection,
    Purpose,
    Secrets,
    Session,
    join_token,
    token_holds,
)

SETUP_BYTES_MAX: Final = 512

_Stripe = Annotated[int, msgspec.Meta(ge=0, lt=STRIPES_MAX)]
_SessionId = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class StripeJoin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The control session that a stripe joins, and the proof that it may."""

    control_id: _SessionId
    stripe: _Stripe
    token: _Token


class SessionOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The dialer's message. joins: None for a control connection."""

    protection: Protection
    joins: StripeJoin | None = None


class SessionAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer", forbid_unknown_fields=True):
    """The listener's message."""

    protection: Protection


class DeclineReason(Enum):
    """Why a listener declines a connection of one that holds the cookie."""

    PROTECTION = "protection"
    NO_SESSION = "no-session"
    TOKEN = "token"
    STRIPE_TAKEN = "lane-taken"
    BUSY = "busy"


class SessionDecline(msgspec.Struct, frozen=True, array_like=True, tag="decline", forbid_unknown_fields=True):
    """The listener's message when it does not take the connection."""

    why: DeclineReason
    protection: Protection
    """The protection that the listener requires."""


class SetupError(RemoteProtocolError):
    """A connection was not set up after a successful hello. by_peer: the peer declined ours."""

    by_peer: bool = False


class MalformedSetup(SetupError):
    """The peer sent bytes that are no setup message."""


class ProtectionDiffers(SetupError):
    """The two sides ask for different protection."""


class JoinRefused(SetupError):
    """A stripe may not join: no such session, a wrong token, or its number is taken."""


class PeerBusy(SetupError):
    """The listener has no room for another connection; the dialer may try again."""


SessionLookup = Callable[[bytes, int], Session | DeclineReason]
"""The control session that a stripe may join, by its id and the stripe's number, or why there is none."""

MessageT = TypeVar("MessageT")
_encode = msgspec.msgpack.Encoder().encode
_offer_decoder = msgspec.msgpack.Decoder(SessionOffer)
_answer_decoder: msgspec.msgpack.Decoder[SessionAnswer | SessionDecline] = msgspec.msgpack.Decoder(
    SessionAnswer | SessionDecline
)


def make_offer(
    secrets: Secrets, wanted: Protection, *, control: Session | None = None, stripe: int = 0
) -> bytes:
    """The dialer's message; of a stripe of `control`, if that is given."""
    joins = None
    if control is not None:
        token = join_token(control.join_key, stripe=stripe, stripe_session_id=secrets.session_id)
        joins = StripeJoin(control_id=control.control_id, stripe=stripe, token=token)
    return _encode(SessionOffer(protection=wanted, joins=joins))


def accept_offer(
    data: bytes,
    secrets: Secrets,
    wanted: Protection,
    peer: PeerInfo,
    lookup: SessionLookup,
    *,
    has_room: bool = True,
) -> tuple[bytes, Session | SetupError]:
    """The listener's message to the dialer's `data`, and the session, or why there is none.

    The protection of the offer must be ours. A stripe must name an open session of the same peer and
    incarnation, and prove itself. Without `has_room` a control connection is declined. Raises
    `MalformedSetup`, to which there is nothing to say.
    """
    offer = _decode(data, _offer_decoder)
    if offer.protection is not wanted:
        what = f"{peer.name} asks for protection {offer.protection.value}, we for {wanted.value}"
        return _decline(DeclineReason.PROTECTION, wanted, ProtectionDiffers(f"{what}: {_PROTECTION_ADVICE}"))
    answer = _encode(SessionAnswer(protection=wanted))
    joins = offer.joins
    if joins is None and has_room:
        return answer, control_session(secrets, wanted, peer)
    if joins is None:
        return _decline(
            DeclineReason.BUSY, wanted, PeerBusy(f"{peer.name} asks for one more connection than we take")
        )
    control = lookup(joins.control_id, joins.stripe)
    if isinstance(control, DeclineReason):
        error = JoinRefused(f"{peer.name} asks to join a session as stripe {joins.stripe}: {control.value}")
        return _decline(control, wanted, error)
    if (control.peer.name, control.peer.incarnation) != (peer.name, peer.incarnation):
        error = JoinRefused(f"{peer.name} asks to join the session of {control.peer.name}")
        return _decline(DeclineReason.NO_SESSION, wanted, error)
    if not token_holds(
        joins.token, control.join_key, stripe=joins.stripe, stripe_session_id=secrets.session_id
    ):
        return _decline(
            DeclineReason.TOKEN, wanted, JoinRefused(f"{peer.name} asks to join with a forged token")
        )
    return answer, stripe_session(secrets, control, joins.stripe)


def accept_answer(
    data: bytes,
    secrets: Secrets,
    wanted: Protection,
    peer: PeerInfo,
    *,
    control: Session | None = None,
    stripe: int = 0,
) -> Session:
    """The dialer's session, from the listener's message.

    Raises `MalformedSetup` on anything else, and the `SetupError` that the listener reports.
    """
    message = _decode(data, _answer_decoder)
    if isinstance(message, SessionDecline):
        raise _declined(message, wanted, peer)
    if message.protection is not wanted:
        raise MalformedSetup(f"{peer.name} answered our offer with what was not offered: {message}")
    if control is None:
        return control_session(secrets, wanted, peer)
    return stripe_session(secrets, control, stripe)


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


def stripe_session(secrets: Secrets, control: Session, stripe: int) -> Session:
    """The session of a stripe that has joined `control`."""
    return Session(
        session_id=secrets.session_id,
        side=secrets.side,
        peer=control.peer,
        purpose=Purpose.STRIPE,
        protection=control.protection,
        keys=secrets.keys(Purpose.STRIPE) if control.protection is Protection.MAC else None,
        control_id=control.control_id,
        stripe=stripe,
    )


_PROTECTION_ADVICE = "set the same ZBMD_PROTECTION on both sides"


def _decline(why: DeclineReason, wanted: Protection, error: SetupError) -> tuple[bytes, SetupError]:
    return _encode(SessionDecline(why=why, protection=wanted)), error


def _declined(message: SessionDecline, wanted: Protection, peer: PeerInfo) -> SetupError:
    error: SetupError
    match message.why:
        case DeclineReason.PROTECTION:
            error = ProtectionDiffers(
                f"{peer.name} asks for protection {message.protection.value}, we for "
                f"{wanted.value}: {_PROTECTION_ADVICE}"
            )
        case DeclineReason.BUSY:
            error = PeerBusy(f"{peer.name} has no room for another connection: try again")
        case DeclineReason.NO_SESSION | DeclineReason.TOKEN | DeclineReason.STRIPE_TAKEN:
            error = JoinRefused(f"{peer.name} does not let a stripe join our session ({message.why.value})")
    error.by_peer = True
    return error


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    if len(data) > SETUP_BYTES_MAX:
        raise MalformedSetup(f"a setup message of {len(data)} bytes; {SETUP_BYTES_MAX} is the bound")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedSetup(f"{data[:32]!r} is no setup message: {error}") from None
