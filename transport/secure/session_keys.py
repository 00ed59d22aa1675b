"""Session keys: the keys of each direction, an id, and the tokens by which more connections join.

A connection between hosts begins with the hello (`hello`), whose secret is the root of all keys here, and one
exchange of setup messages (`session_setup`). What then stands is a `Session`. The first connection to a peer
is the control connection and carries a link; further ones, *stripes*, carry bulk data. A stripe runs a hello
of its own, so that its keys are its own, and joins the control session by a token that only the two ends of
that can make. The dialer of the control connection dials its stripes: `tcp.open_stripe`; at the listener
they come out of `TcpLink.on_stripe`.

Keys are by HKDF-SHA256 (RFC 5869): extracted in `HelloMachine.session_secret`, expanded here, one for each
purpose and direction, so that nothing said in one role can be played back in another. There is no forward
secrecy: who holds the cookie and a recording can forge, not only read. Where that matters use TLS.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.identity import PeerInfo, Side

SESSION_ID_BYTES: Final = 16
KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 32
SECRET_BYTES: Final = 32
STRIPES_MAX: Final = 16
"""Stripes of one control session."""

_LABEL: Final = b"zbmd session 1"


class Protection(Enum):
    """The protection against an attacker on the wire, once the hello is done."""

    MAC = "mac"
    """A message authentication code on every record: nothing can be changed, all can be read."""
    TLS = "tls"
    """TLS 1.3 with certificates of both sides, around hello and records."""
    NONE = "none"
    """Nothing: for networks that are protected otherwise. Both sides must ask for it."""


class Purpose(Enum):
    """The purpose of a connection."""

    CONTROL = "control"
    """Carries the frames of a link."""
    STRIPE = "lane"
    """Carries bulk data beside a control connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The two keys of a connection, seen from one side: `KEY_BYTES` each, for AES-256-GMAC (`record_mac`)."""

    send: bytes = field(repr=False)
    receive: bytes = field(repr=False)


class Secrets:
    """All that is derived from the secret of one hello.

    secret: `HelloMachine.session_secret`; side: our end; binding: what names the channel below, the same on
    both sides (empty without TLS, see `tls.channel_binding`), so that a hello cannot be relayed from one
    channel to another.
    """

    __slots__ = ("_binding", "_secret", "side")

    def __init__(self, secret: bytes, side: Side, *, binding: bytes = b"") -> None:
        if len(secret) != SECRET_BYTES:
            raise LocalProtocolError(f"a session's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._binding = binding
        self.side = side

    @property
    def session_id(self) -> bytes:
        """`SESSION_ID_BYTES` bytes that name this connection on both sides, and no other. Not secret."""
        return self._expand(b"id", SESSION_ID_BYTES)

    def setup_keys(self) -> Keys:
        """The keys of the setup messages, which are protected in every mode."""
        return self._keys(b"setup")

    def keys(self, purpose: Purpose) -> Keys:
        """The keys of all that follows the setup."""
        return self._keys(purpose.value.encode())

    def join_key(self) -> bytes:
        """What the tokens of this session's stripes are made with (`join_token`)."""
        return self._expand(b"join", KEY_BYTES)

    def _keys(self, purpose: bytes) -> Keys:
        of_dialer, of_listener = (
            self._expand(b"key " + purpose + b" from " + by.value.encode(), KEY_BYTES)
            for by in (Side.DIALER, Side.LISTENER)
        )
        if self.side is Side.DIALER:
            return Keys(send=of_dialer, receive=of_listener)
        return Keys(send=of_listener, receive=of_dialer)

    def _expand(self, what: bytes, nbytes: int) -> bytes:
        info = b"\0".join((_LABEL, what, self._binding))
        return HKDFExpand(algorithm=SHA256(), length=nbytes, info=info).derive(self._secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One authenticated connection, seen from one side."""

    session_id: bytes
    """Of this connection; the same on both sides."""
    side: Side
    """Our end of this connection."""
    peer: PeerInfo
    """The identity that the peer proved, with its incarnation."""
    purpose: Purpose
    protection: Protection
    keys: Keys | None
    """For the MAC of each direction; None if the protection is another."""
    control_id: bytes
    """The session id of the control connection: its own, or that which a stripe has joined."""
    stripe: int = 0
    """Of a stripe: its number, 0..`STRIPES_MAX` - 1."""
    join_key: bytes = field(default=b"", repr=False)
    """Of a control session: makes the tokens of its stripes."""


def join_token(join_key: bytes, *, stripe: int, stripe_session_id: bytes) -> bytes:
    """What lets one connection, and no other, join a control session: `TOKEN_BYTES` bytes.

    join_key: of the control session; stripe_session_id: of the connection that joins.
    """
    text = b"zbmd lane\0" + stripe.to_bytes(4, "little") + stripe_session_id
    return hmac.digest(join_key, text, "sha256")


def token_holds(token: bytes, join_key: bytes, *, stripe: int, stripe_session_id: bytes) -> bool:
    """Whether `token` is that of `join_token`, compared in constant time."""
    return hmac.compare_digest(
        token, join_token(join_key, stripe=stripe, stripe_session_id=stripe_session_id)
    )
