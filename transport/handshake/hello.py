"""The hello: two processes prove to each other that they hold the same cookie, and state their identity.

Sans-I/O, for a byte stream that a stranger may have opened. Four messages, listener last:

    dialer   -> OPEN       a fresh nonce
    listener -> CHALLENGE  a fresh nonce
    dialer   -> PROOF      proof, identity
    listener -> WELCOME    proof, identity

where proof = HMAC-SHA256(cookie, role | SHA-256(every message before | identity)).

Either side may send REFUSAL instead (the dialer until it has proved), and closes. Each message is a header
(magic, version, type, length: the same in all versions, so that another version is named) and a body
of at most `MAX_BODY_BYTES`. The proofs cover the whole conversation, so nothing in it can be changed,
replayed or reflected; the dialer proves first, so a stranger learns nothing that depends on the cookie.
Once it is accepted, `HelloMachine.session_secret` is the root of the keys of the session (see `session`).
Source of the scheme: mutual challenge-response, ISO/IEC 9798-4, with the roles bound into the code.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar, TypeAlias, assert_never

import msgspec

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.identity import Identity, PeerInfo, Side
from zbmd.transport.machine import SetTimer, TimerFired

HELLO_MAGIC = b"zbmd"
HELLO_VERSION = 2
"""Raised with the hello, and with what is said after it: rings, records, tags, bulk data."""
NONCE_BYTES = 32
PROOF_BYTES = 32
COOKIE_BYTES_MIN = 32
MAX_BODY_BYTES = 128 * 1024
"""Largest body of one message: an identity with `identity.MAX_CONTRACTS` contracts fits."""
STORY_EVENTS = 8
CONTRACTS_NAMED = 5

_HEADER = struct.Struct("<4sHHI")
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""First bytes of an alert and of a handshake of TLS."""


# --- errors ---------------------------------------------------------------------------------------------


class RefusalReason(IntEnum):
    """Why a hello failed; the number is what a REFUSAL message carries."""

    GARBAGE = 1
    WRONG_VERSION = 2
    OVERSIZED = 3
    WRONG_COOKIE = 4
    WRONG_USER = 5
    WRONG_JOB = 6
    CONTRACTS_DIFFER = 7
    TIMEOUT = 8
    HUNG_UP = 9


class HelloError(RemoteProtocolError):
    """A hello failed: the connection must be closed. by_peer: the peer refused us."""

    refusal: ClassVar[RefusalReason]
    by_peer: bool = False


class Garbage(HelloError):
    """The peer sent something that is no hello, or one out of turn."""

    refusal = RefusalReason.GARBAGE


class WrongVersion(HelloError):
    """The peer speaks another version of the hello."""

    refusal = RefusalReason.WRONG_VERSION


class Oversized(HelloError):
    """The peer announced a message beyond `MAX_BODY_BYTES`."""

    refusal = RefusalReason.OVERSIZED


class WrongCookie(HelloError):
    """The peer does not hold our cookie."""

    refusal = RefusalReason.WRONG_COOKIE


class WrongUser(HelloError):
    """The kernel says that the peer belongs to another user."""

    refusal = RefusalReason.WRONG_USER


class WrongJob(HelloError):
    """The peer belongs to another job."""

    refusal = RefusalReason.WRONG_JOB


class ContractsDiffer(HelloError):
    """Both sides have a contract of the same id and version, and they are not the same."""

    refusal = RefusalReason.CONTRACTS_DIFFER


class HelloTimeout(HelloError):
    """The hello was not done by its deadline."""

    refusal = RefusalReason.TIMEOUT


class HungUp(HelloError):
    """The peer closed the connection before the hello was done."""

    refusal = RefusalReason.HUNG_UP


_ERRORS: dict[int, type[HelloError]] = {error.refusal: error for error in HelloError.__subclasses__()}
_ADVICE = {
    RefusalReason.GARBAGE: "something that is no zbmd process uses this address",
    RefusalReason.WRONG_VERSION: "run the same release of zbmd on both sides",
    RefusalReason.OVERSIZED: "something that is no zbmd process uses this address",
    RefusalReason.WRONG_COOKIE: "give both sides the same cookie file (ZBMD_COOKIE_FILE)",
    RefusalReason.WRONG_USER: "run both processes as the same user",
    RefusalReason.WRONG_JOB: "an old process of another run may hold the address: end it",
    RefusalReason.CONTRACTS_DIFFER: "give a changed contract a new version",
    RefusalReason.TIMEOUT: "the peer is stuck or the host overloaded: look at its log",
    RefusalReason.HUNG_UP: "the peer ended meanwhile or refused us without a word: look at its log",
}


# --- events and actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The connection stands. `peer_uid`: the kernel's word (SO_PEERCRED); None where there is none."""

    peer_uid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesReceived:
    """The next bytes of the stream, cut anywhere."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerClosed:
    """The peer closed the stream: end of file or reset."""


HelloEvent: TypeAlias = Opened | BytesReceived | TimerFired | PeerClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBytes:
    """Send these bytes, in order."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The hello is done: hand the stream on. `surplus`: bytes of what follows that were read already."""

    peer: PeerInfo
    surplus: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The hello failed: send what was asked for, then close and report `error`."""

    error: HelloError


HelloAction: TypeAlias = SendBytes | SetTimer | Accept | Reject


class HelloState(Enum):
    """The message or event that the machine waits for."""

    NEW = "the connection"
    OPEN = "the dialer's OPEN"
    CHALLENGE = "the listener's CHALLENGE"
    PROOF = "the dialer's PROOF"
    WELCOME = "the listener's WELCOME"
    ACCEPTED = "nothing: accepted"
    REJECTED = "nothing: rejected"


class _Type(IntEnum):
    OPEN = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


_TYPES = {member.value: member for member in _Type}
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_identity_decoder = msgspec.msgpack.Decoder(Identity)


class _Failed(Exception):
    """Leaves the machine's depths with what to report."""

    def __init__(self, error: type[HelloError], what: str, *, by_peer: bool = False) -> None:
        super().__init__(what)
        self.error = error
        self.what = what
        self.by_peer = by_peer


class HelloMachine:
    """One side of one hello.

    side: which end; identity: ours; cookie: the shared secret, at least `COOKIE_BYTES_MIN` bytes; nonce:
    `NONCE_BYTES` fresh random bytes; deadline_ns: monotonic time by which the hello must be done.
    Ends with exactly one `Accept` or `Reject`; timers and closing are ignored after it.
    Raises `LocalProtocolError` for arguments that no peer would accept and for events out of turn.
    """

    def __init__(
        self, *, side: Side, identity: Identity, cookie: bytes, nonce: bytes, deadline_ns: int
    ) -> None:
        if len(cookie) < COOKIE_BYTES_MIN:
            raise LocalProtocolError(
                f"a cookie of {len(cookie)} bytes; at least {COOKIE_BYTES_MIN} are needed"
            )
        if len(nonce) != NONCE_BYTES:
            raise LocalProtocolError(f"a nonce of {len(nonce)} bytes; it must have {NONCE_BYTES}")
        self.side = side
        self.state = HelloState.NEW
        self.peer: PeerInfo | None = None
        self._identity = identity
        self._packed_identity = _pack(identity)
        self._cookie = cookie
        self._nonce = nonce
        self._deadline_ns = deadline_ns
        self._buffer = bytearray()
        self._transcript = hashlib.sha256()
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)
        self._same_host = False

    def handle(self, event: HelloEvent, *, now_ns: int) -> list[HelloAction]:
        """Take one event at monotonic `now_ns`, ns. What the peer does wrong ends in a `Reject`."""
        if self.state in (HelloState.ACCEPTED, HelloState.REJECTED):
            if self.state is HelloState.ACCEPTED and isinstance(event, BytesReceived):
                raise LocalProtocolError("bytes after the hello: the stream was handed on with Accept")
            return []
        try:
            match event:
                case Opened(peer_uid=peer_uid):
                    return self._opened(peer_uid)
                case BytesReceived(data=data):
                    return self._received(data)
                case TimerFired():
                    if now_ns < self._deadline_ns:
                        return [SetTimer(at_ns=self._deadline_ns)]
                    raise _Failed(HelloTimeout, "the deadline has passed")
                case PeerClosed():
                    raise _Failed(HungUp, "the peer closed the connection")
                case _:
                    assert_never(event)
        except _Failed as failed:
            return self._reject(failed)

    def session_secret(self) -> bytes:
        """Return 32 bytes that only the two sides of this hello can know, once it is accepted.

        HKDF-Extract of RFC 5869 with SHA-256: the salt is the hash of the whole conversation, with both fresh
        nonces, and the input the cookie. It is handed out by call alone, so that no log of actions holds it.
        Raises `LocalProtocolError` before the hello is accepted.
        """
        if self.state is not HelloState.ACCEPTED:
            raise LocalProtocolError(
                "a session's secret before its hello was accepted", story=tuple(self._story)
            )
        return hmac.digest(self._transcript.digest(), self._cookie, "sha256")

    def check_invariants(self) -> None:
        """The buffer is bounded and only whole accepted hellos have a peer; see `Machine`."""
        assert len(self._buffer) < _HEADER.size + MAX_BODY_BYTES, len(self._buffer)
        assert (self.peer is not None) == (self.state is HelloState.ACCEPTED), (self.peer, self.state)
        own = (
            {HelloState.OPEN, HelloState.PROOF}
            if self.side is Side.LISTENER
            else {HelloState.CHALLENGE, HelloState.WELCOME}
        )
        assert self.state in own | {HelloState.NEW, HelloState.ACCEPTED, HelloState.REJECTED}, (
            self.side,
            self.state,
        )

    # -- steps ---------------------------------------------------------------------------------------

    def _opened(self, peer_uid: int | None) -> list[HelloAction]:
        if self.state is not HelloState.NEW:
            raise LocalProtocolError("a hello is opened once", story=tuple(self._story))
        self._story.append(f"opened (peer uid {peer_uid})")
        self._same_host = peer_uid is not None
        if peer_uid is not None and peer_uid != self._identity.uid:
            raise _Failed(WrongUser, f"it belongs to uid {peer_uid}, we to uid {self._identity.uid}")
        timer = SetTimer(at_ns=self._deadline_ns)
        if self.side is Side.LISTENER:
            self.state = HelloState.OPEN
            return [timer]
        self.state = HelloState.CHALLENGE
        return [timer, self._send(_Type.OPEN, self._nonce)]

    def _received(self, data: bytes) -> list[HelloAction]:
        if self.state is HelloState.NEW:
            raise LocalProtocolError("bytes before the connection was opened")
        actions: list[HelloAction] = []
        # Bounded: the peer may send one message and whatever has come behind it, and then waits for us.
        pending = memoryview(data)
        while self.peer is None:
            pending = self._fill(pending, _HEADER.size)
            message, body_bytes = self._peek()
            if message is None:
                break
            pending = self._fill(pending, _HEADER.size + body_bytes)
            if len(self._buffer) < _HEADER.size + body_bytes:
                break
            raw = bytes(self._buffer)
            self._buffer.clear()
            actions += self._message(message, raw)
        if self.peer is not None:
            actions.append(Accept(peer=self.peer, surplus=bytes(pending)))
        return actions

    def _fill(self, pending: memoryview, nbytes: int) -> memoryview:
        missing = max(0, nbytes - len(self._buffer))
        self._buffer += pending[:missing]
        return pending[missing:]

    def _peek(self) -> tuple[_Type | None, int]:
        """The type and body length of the message in the buffer; no type: its header is not whole yet."""
        magic = bytes(self._buffer[: len(HELLO_MAGIC)])
        if magic != HELLO_MAGIC[: len(magic)]:
            if magic[:2] in _TLS_RECORDS:
                raise _Failed(Garbage, "it speaks TLS, we do not: set the same ZBMD_PROTECTION on both sides")
            raise _Failed(Garbage, f"it began with {magic!r}, which is no hello")
        if len(self._buffer) < _HEADER.size:
            return None, 0
        _, version, code, body_bytes = _HEADER.unpack_from(self._buffer)
        if version != HELLO_VERSION:
            raise _Failed(WrongVersion, f"it speaks version {version} of the hello, we {HELLO_VERSION}")
        if body_bytes > MAX_BODY_BYTES:
            raise _Failed(Oversized, f"it announced {body_bytes} bytes; {MAX_BODY_BYTES} is the bound")
        if code not in _TYPES:
            raise _Failed(Garbage, f"it sent a message of unknown type {code}")
        return _TYPES[code], body_bytes

    def _message(self, message: _Type, raw: bytes) -> list[HelloAction]:
        self._story.append(f"{message.name} received")
        body = raw[_HEADER.size :]
        before = self._transcript.copy()
        self._transcript.update(raw)
        match (self.state, message):
            case (_, _Type.REFUSAL):
                raise _refused(body)
            case (HelloState.OPEN, _Type.OPEN):
                _expect_nonce(body)
                self.state = HelloState.PROOF
                return [self._send(_Type.CHALLENGE, self._nonce)]
            case (HelloState.CHALLENGE, _Type.CHALLENGE):
                _expect_nonce(body)
                self.state = HelloState.WELCOME
                return [self._send_proof(_Type.PROOF)]
            case (HelloState.PROOF, _Type.PROOF):
                peer = self._check(body, before, by=Side.DIALER)
                welcome = self._send_proof(_Type.WELCOME)
                self.peer, self.state = peer, HelloState.ACCEPTED
                return [welcome]
            case (HelloState.WELCOME, _Type.WELCOME):
                self.peer, self.state = self._check(body, before, by=Side.LISTENER), HelloState.ACCEPTED
                return []
            case _:
                raise _Failed(Garbage, f"it sent {message.name} out of turn")

    # -- proofs --------------------------------------------------------------------------------------

    def _send_proof(self, message: _Type) -> SendBytes:
        proof = _proof(self._cookie, self.side, self._transcript, self._packed_identity)
        return self._send(message, proof + self._packed_identity)

    def _check(self, body: bytes, before: hashlib._Hash, *, by: Side) -> PeerInfo:
        """The identity in `body`, if its proof holds over the messages `before` and we fit together."""
        proof, packed = body[:PROOF_BYTES], body[PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._cookie, by, before, packed)):
            raise _Failed(WrongCookie, "it does not hold our cookie")
        try:
            peer = _identity_decoder.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Failed(Garbage, f"its identity cannot be read: {error}") from None
        self._story.append(f"{peer.name} pid {peer.pid} incarnation {peer.incarnation} proved")
        ours = self._identity
        if self._same_host and peer.uid != ours.uid:  # on another host the same user may have another number
            raise _Failed(WrongUser, f"{peer.name} belongs to uid {peer.uid}, we to uid {ours.uid}")
        if ours.job and peer.job and ours.job != peer.job:
            raise _Failed(WrongJob, f"{peer.name} belongs to job {peer.job:#x}, we to job {ours.job:#x}")
        shared = ours.contracts.keys() & peer.contracts.keys()
        differing = sorted(key for key in shared if ours.contracts[key] != peer.contracts[key])
        if differing:
            named = ", ".join(differing[:CONTRACTS_NAMED])
            raise _Failed(
                ContractsDiffer, f"{peer.name} has {len(differing)} other contracts than we: {named}"
            )
        return peer

    # -- sending and failing -------------------------------------------------------------------------

    def _send(self, message: _Type, body: bytes) -> SendBytes:
        data = _HEADER.pack(HELLO_MAGIC, HELLO_VERSION, message, len(body)) + body
        self._transcript.update(data)
        self._story.append(f"{message.name} sent")
        return SendBytes(data=data)

    def _reject(self, failed: _Failed) -> list[HelloAction]:
        refusal = failed.error.refusal
        error = failed.error(
            f"the hello as {self.side.value} failed, waiting for {self.state.value}: {failed.what} "
            f"({_ADVICE[refusal]})",
            story=tuple(self._story),
        )
        error.by_peer = failed.by_peer
        # To one that speaks no hello, has gone or has refused us there is nothing to say; and a listener that
        # has our PROOF may have accepted us, so that the next bytes would be read as what follows the hello.
        silent = (
            failed.by_peer
            or refusal in (RefusalReason.GARBAGE, RefusalReason.HUNG_UP)
            or self.state is HelloState.WELCOME
        )
        self.state = HelloState.REJECTED
        self._buffer.clear()
        reject = Reject(error=error)
        return [reject] if silent else [self._send(_Type.REFUSAL, bytes([refusal])), reject]


def _pack(identity: Identity) -> bytes:
    packed = _encoder.encode(identity)
    try:
        _identity_decoder.decode(packed)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(f"no peer would accept the identity {identity}: {error}") from None
    return packed


def _proof(cookie: bytes, by: Side, before: hashlib._Hash, packed_identity: bytes) -> bytes:
    transcript = before.copy()
    transcript.update(packed_identity)
    text = b"zbmd hello " + by.value.encode() + b"\0" + transcript.digest()
    return hmac.digest(cookie, text, "sha256")


def _expect_nonce(body: bytes) -> None:
    if len(body) != NONCE_BYTES:
        raise _Failed(Garbage, f"it sent a nonce of {len(body)} bytes; it must have {NONCE_BYTES}")


def _refused(body: bytes) -> _Failed:
    code = body[0] if len(body) == 1 else 0
    error = _ERRORS.get(code)
    if error is None:
        return _Failed(Garbage, f"it refused us for an unknown reason ({body[:8]!r})")
    return _Failed(error, f"the peer refused us: {error.refusal.name}", by_peer=True)
