"""Session keys and MACs: the keys of each direction, an id, tokens by which more connections join, and tags.

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
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.identity import PeerInfo, Side

# ---- the tag of a bulk payload: one a chunk, and one over those, so that they are made beside the system
# calls.
#
# A payload of up to `TAG_CHUNK_BYTES` has the tag of its bytes. A longer one is cut there; each chunk has a
# tag with a nonce of its own, and the tag of the payload is that of all of these, joined. It is the only one
# that is sent. (Two levels of universal hashing: Wegman, Carter, "New hash functions and their use in
# authentication and set equality", 1981.)
#
# A process has one `TagHelper`, a thread that makes tags without the GIL while the data-plane thread is in a
# system call. Nobody waits for it: what it has not made when it is needed is made again by whoever needs it.

# ---- the MAC of a record between hosts: AES-256-GMAC, with a 16-byte tag
#
# GMAC is AES-GCM without a plaintext (NIST SP 800-38D). The nonce is the record's kind (u32) and its sequence
# number (u64), both big-endian: a key belongs to one direction of one connection and a number to one record
# of it, so no nonce is used twice. The tag covers the body; GMAC itself covers its length. So kind, number,
# length and content are all bound.
#
# Measured from Python on one core of a VM (AMD EPYC with VAES, OpenSSL 3), one tag, in us:
#
#     bytes      AES-256-GMAC   keyed BLAKE2b   HMAC-SHA256 (SHA-NI, copied context)
#     64             0.8            0.7             2.2
#     4,096          1.2            5.2             3.9
#     1 MiB         70           1,140            580

TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct(">IQ")
_JOIN_BYTES_MAX: Final = 1 << 16
"""Up to here joining the parts costs less than setting up a cipher that takes them one by one."""

Buffer: TypeAlias = bytes | bytearray | memoryview
Seal: TypeAlias = Callable[[bytes, bytes, Buffer], bytes]


class RecordMac:
    """Makes and checks the tags of one direction. key: `KEY_BYTES` bytes. Keeps no state between calls."""

    __slots__ = ("_aead", "_algorithm")

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, len(key)
        self._aead = AESGCM(key)
        self._algorithm = algorithms.AES(key)

    def tag(self, kind: int, sequence: int, parts: Sequence[Buffer]) -> bytes:
        """The tag of record `sequence` (u64) of `kind` (u32), whose body is `parts`, one after the other."""
        nonce = _NONCE.pack(kind, sequence)
        if len(parts) == 1:
            return self._aead.encrypt(nonce, b"", parts[0])  # without the GIL
        if sum(len(part) for part in parts) <= _JOIN_BYTES_MAX:
            return self._aead.encrypt(nonce, b"", b"".join(parts))
        running = self.running(kind, sequence)
        for part in parts:
            running.update(part)
        return running.tag()

    @property
    def seal(self) -> Seal:
        """Makes a tag of (nonce, b"", body), for callers that make the nonces themselves."""
        return self._aead.encrypt

    def running(self, kind: int, sequence: int) -> RunningTag:
        """The tag of a record whose body comes in parts, one by one; to check a tag, compare it with this."""
        return RunningTag(self._algorithm, _NONCE.pack(kind, sequence))

    def holds(self, kind: int, sequence: int, body: Buffer, tag: Buffer) -> bool:
        """Whether `tag` is that of the record; compared in constant time."""
        try:
            self._aead.decrypt(_NONCE.pack(kind, sequence), tag, body)
        except InvalidTag:
            return False
        return True


class RunningTag:
    """A tag of what `update` is given, in that order. Compare it with `hmac.compare_digest`."""

    __slots__ = ("_encryptor",)

    def __init__(self, algorithm: algorithms.AES, nonce: bytes) -> None:
        self._encryptor = Cipher(algorithm, modes.GCM(nonce)).encryptor()

    def update(self, part: Buffer) -> None:
        """Go on with `part`."""
        self._encryptor.authenticate_additional_data(part)

    def tag(self) -> bytes:
        """The tag of all parts. Called once, after the last."""
        self._encryptor.finalize()
        return self._encryptor.tag


TAG_CHUNK_BYTES: Final = 1 << 20
"""Bytes that the tag of a chunk covers, about 50 us of work. Both sides of a stripe must agree on it."""
# Kinds of the tags of one sequence number (see `record_mac`); those of chunks are the ones that follow.
_PAYLOAD: Final = 2
_FIRST_CHUNK: Final = 3


class TagHelper:
    """The thread; it starts with the first chunk. `submit` and `close` are for one other thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[LyingTag, int] | None] = SimpleQueue()
        """At most the chunks of what is under way: one payload a stripe and direction, and those given up."""
        self._thread: threading.Thread | None = None

    def submit(self, payload: LyingTag, chunk: int) -> None:
        """Have chunk `chunk` tagged."""
        self._queue.put((payload, chunk))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zbmd-tags", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            payload, chunk = task
            payload.make(chunk)
            del task, payload  # whose memory is somebody's, and may be waited for


class LyingTag:
    """The tag of `payload`, flat bytes which come to be known from the first to the last and then lie still.

    helper: makes the tags of chunks meanwhile; None if nobody does.
    """

    __slots__ = ("_helper", "_mac", "_ready", "_sequence", "_tags", "payload")

    def __init__(self, mac: RecordMac, sequence: int, payload: memoryview, helper: TagHelper | None) -> None:
        self._mac = mac
        self._sequence = sequence
        self.payload = payload
        self._helper = helper
        self._tags: list[bytes | None] = [None] * -(-len(payload) // TAG_CHUNK_BYTES)
        self._ready = 0

    def apart(self) -> LyingTag:
        """The same over a copy: once this returns, `payload` may change."""
        copy = LyingTag(self._mac, self._sequence, memoryview(bytearray(self.payload)), None)
        # A tag that the helper is making now comes too late for it, and may be wrong.
        copy._tags = list(self._tags)
        copy._ready = self._ready
        return copy

    def reached(self, at: int) -> None:
        """The first `at` bytes are known."""
        # But for the last chunk: its tag is wanted at once.
        ready = min(at // TAG_CHUNK_BYTES, len(self._tags) - 1)
        for chunk in range(self._ready, ready):
            if self._helper is None:
                self.make(chunk)
            else:
                self._helper.submit(self, chunk)
        self._ready = max(self._ready, ready)

    def make(self, chunk: int) -> bytes:
        """The tag of a chunk, made unless it has been already. For any thread."""
        tag = self._tags[chunk]
        if tag is None:
            begin = chunk * TAG_CHUNK_BYTES
            body = self.payload[begin : begin + TAG_CHUNK_BYTES]
            tag = self._mac.tag(_kind_of(chunk, len(self._tags)), self._sequence, (body,))
            self._tags[chunk] = tag
        return tag

    def tag(self) -> bytes:
        """The tag of the payload, all of which is known."""
        # From the last chunk on: the helper comes from the first.
        tags = [self.make(chunk) for chunk in reversed(range(len(self._tags)))]
        return _joined(self._mac, self._sequence, tags[::-1])


class PassingTag:
    """The tag of a payload of `nbytes` whose parts are seen once and do not stay."""

    __slots__ = ("_at", "_chunks", "_mac", "_running", "_sequence", "_tags")

    def __init__(self, mac: RecordMac, sequence: int, nbytes: int) -> None:
        self._mac = mac
        self._sequence = sequence
        self._chunks = -(-nbytes // TAG_CHUNK_BYTES)
        self._tags: list[bytes] = []
        self._at = 0
        self._running = self._begin()

    def _begin(self) -> RunningTag:
        return self._mac.running(_kind_of(len(self._tags), self._chunks), self._sequence)

    def update(self, part: memoryview) -> None:
        """Go on with `part`."""
        while len(part):
            if self._at == TAG_CHUNK_BYTES:
                self._tags.append(self._running.tag())
                self._at, self._running = 0, self._begin()
            piece, part = part[: TAG_CHUNK_BYTES - self._at], part[TAG_CHUNK_BYTES - self._at :]
            self._running.update(piece)
            self._at += len(piece)

    def tag(self) -> bytes:
        """The tag of all parts. Called once, after the last."""
        return _joined(self._mac, self._sequence, [*self._tags, self._running.tag()])


def _kind_of(chunk: int, chunks: int) -> int:
    return _PAYLOAD if chunks == 1 else _FIRST_CHUNK + chunk


def _joined(mac: RecordMac, sequence: int, tags: list[bytes]) -> bytes:
    return tags[0] if len(tags) == 1 else mac.tag(_PAYLOAD, sequence, tags)


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
        """The key of the tokens of this session's stripes (`join_token`)."""
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
    """Return the token that lets one connection, and no other, join a control session: `TOKEN_BYTES` bytes.

    join_key: of the control session; stripe_session_id: of the connection that joins.
    """
    text = b"zbmd lane\0" + stripe.to_bytes(4, "little") + stripe_session_id
    return hmac.digest(join_key, text, "sha256")


def token_holds(token: bytes, join_key: bytes, *, stripe: int, stripe_session_id: bytes) -> bool:
    """Whether `token` is that of `join_token`, compared in constant time."""
    return hmac.compare_digest(
        token, join_token(join_key, stripe=stripe, stripe_session_id=stripe_session_id)
    )
