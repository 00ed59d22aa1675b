"""Targets of the transport: frames, the hello, the exchange of descriptors, clocks."""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from zbmd.tools.fuzzing.target import Broken, Script, block, blocks, read_blocks, target
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import FrameHeader, pack_header, unpack_frame, unpack_header
from zbmd.transport.handshake import session_setup
from zbmd.transport.handshake.hello import (
    HELLO_MAGIC,
    HELLO_VERSION,
    NONCE_BYTES,
    Accept,
    BytesReceived,
    HelloAction,
    HelloMachine,
    Opened,
    PeerClosed,
    Reject,
    SendBytes,
)
from zbmd.transport.host.topology.interfaces import parse_addresses
from zbmd.transport.identity import Identity, Side
from zbmd.transport.machine import TimerFired
from zbmd.transport.secure.protection import KEY_BYTES, SECRET_BYTES, Keys, Protection, Secrets, Session
from zbmd.transport.secure.record_stream import RecordError, RecordKind, Sealer, SecureStream
from zbmd.transport.shm.attach import AttachAnswer, AttachOffer, decode

JOB = 7
INCARNATION = 3
WALL_NS = 1_700_000_000_000_000_000
COOKIE = b"a cookie that the fuzzers share."
PIECES_MAX = 64
UID = 1000
FRAME_BYTES_MAX = 4096
RECORDS_MAX = 64
HELD_BYTES_MAX = 2 * FRAME_BYTES_MAX
_LOOPBACK = bytes.fromhex(
    "34000000140002000100000000000000020880fe010000000800010007f000010800020007f0000107000300"
    "6c6f0000080008008000000014000000030002000100000000000000"
)
_KEYS = Keys(send=b"\1" * KEY_BYTES, receive=b"\2" * KEY_BYTES)


def _record(kind: RecordKind, body: bytes, sequence: int = 0) -> bytes:
    sealer = Sealer(None)
    sealer.sequence = sequence
    return b"".join(sealer.seal(kind, (body,)))


def _plain_seeds() -> tuple[bytes, ...]:
    records = [_record(RecordKind.FRAME, frame(bytes([n]) * n), n) for n in range(4)]
    whole = b"".join([*records, _record(RecordKind.GOODBYE, b"", 4)])
    return (blocks([whole]), blocks(records), blocks(whole[at : at + 7] for at in range(0, len(whole), 7)))


@target("stream.plain", "records without keys, cut anywhere", _plain_seeds, RecordError)
def _plain(data: bytes) -> None:
    """A stream without keys, in the pieces that the network happens to make of it."""
    stream = SecureStream(None, frame_bytes_max=FRAME_BYTES_MAX)
    for piece in read_blocks(data, RECORDS_MAX):
        _feed(stream, piece)
    ended = stream.end()
    if ended is not None:
        raise ended


def _feed(stream: SecureStream, piece: bytes) -> list[bytes]:
    """The frames that `piece` completes. Raises what they are followed by."""
    stream.feed(piece)
    stream.check_invariants()
    if stream.partial_bytes > HELD_BYTES_MAX:
        raise Broken(f"{stream.partial_bytes} bytes are held for one record")
    frames: list[bytes] = []
    while (frame := stream.next_frame()) is not None:
        frames.append(bytes(frame))
    return frames


def _keyed_seeds() -> tuple[bytes, ...]:
    good = b"\0" + block(b"frame")
    return (
        good * 4,
        good * 2 + b"\1" + good,
        good + b"\2" + good,
        good * 3 + b"\3\1" + good,
        good + b"\4\3\1" + good,
        good + b"\5" + block(b"") + good,
        good + b"\6\4" + good,
    )


@target("stream.keyed", "records with keys, and somebody in between", _keyed_seeds, RecordError)
def _keyed(data: bytes) -> None:
    """An attacker between the ends may drop, double, replay, change and cut: nothing else is delivered."""
    script, sealer = Script(data), Sealer(_KEYS.receive)
    stream = SecureStream(_KEYS, frame_bytes_max=FRAME_BYTES_MAX)
    said: list[bytes] = []
    sent: list[bytes] = [b""]
    heard: list[bytes] = []
    for _ in range(RECORDS_MAX):
        if script.ended:
            break
        wire = _meddle(script, sealer, said, sent)
        try:
            heard += _feed(stream, wire)
        finally:
            if heard != said[: len(heard)]:
                raise Broken(f"{heard} was delivered of {said}")


def _meddle(script: Script, sealer: Sealer, said: list[bytes], sent: list[bytes]) -> bytes:
    match script.number(1) % 7:
        case 1:
            return sent[-1]
        case 2:
            b"".join(sealer.seal(RecordKind.FRAME, (b"held back",)))
            said.append(b"held back")
            return b""
        case 3:
            return sent[script.number(1) % len(sent)]
        case 4:
            changed = bytearray(sent[-1])
            if changed:
                changed[script.number(1) % len(changed)] ^= 1 << script.number(1) % 8
            return bytes(changed)
        case 5:
            body = script.block()[: FRAME_BYTES_MAX + 1]
            kind = RecordKind.SETUP if len(body) % 2 else RecordKind.GOODBYE
            return b"".join(sealer.seal(kind, (body,)))
        case 6:
            return script.take(script.number(1))
        case _:
            body = script.block()[: FRAME_BYTES_MAX + 1]
            record = b"".join(sealer.seal(RecordKind.FRAME, (body,)))
            said.append(body)
            sent.append(record)
            return record


@target("netlink", "the kernel's list of addresses", (_LOOPBACK,))
def _addresses(data: bytes) -> None:
    if any(index < 0 or not address for index, address in parse_addresses(data)):
        raise Broken("an interface without an address")


# ---- frames


def frame(payload: bytes, *, trace_id: int = 5, hlc: int = WALL_NS) -> bytes:
    """A whole frame of the peer that every target here knows."""
    header = FrameHeader(
        payload_bytes=len(payload), job=JOB, incarnation=INCARNATION, epoch=2, hlc=hlc, trace_id=trace_id
    )
    return pack_header(header) + payload


def _frames() -> tuple[bytes, ...]:
    return (frame(b""), frame(b"payload"), frame(bytes(5000), hlc=(1 << 64) - 1))


@target("frames.frame", "a whole frame", _frames, RemoteProtocolError)
def _unpack_frame(data: bytes) -> None:
    header, payload = unpack_frame(data, job=JOB, incarnation=INCARNATION)
    if len(payload) != header.payload_bytes or pack_header(header) + bytes(payload) != data:
        raise Broken(f"{header} does not stand for the frame that it was read from")


@target("frames.header", "a frame's header, and the clock stamp in it", _frames, RemoteProtocolError)
def _unpack_header(data: bytes) -> None:
    clock = HybridClock()
    if clock.merge(unpack_header(data).hlc, WALL_NS) > WALL_NS + 2 * clock.max_drift_ns:
        raise Broken("a peer's stamp has carried the clock away")


# ---- the hello


def identity(name: str = "rank1", **fields: object) -> Identity:
    """A process that every hello here accepts."""
    known = {"pid": 10, "uid": UID, "incarnation": INCARNATION, "job": JOB, "contracts": {"a.b/1": "0f"}}
    return msgspec.convert({"name": name, **known, **fields}, Identity)


def machine(side: Side, nonce: int = 1) -> HelloMachine:
    """Our side of a hello that has just been opened."""
    return HelloMachine(
        side=side,
        identity=identity("rank0"),
        cookie=COOKIE,
        nonce=bytes([nonce]) * NONCE_BYTES,
        deadline_ns=1_000,
    )


def _conversation() -> tuple[list[bytes], list[bytes]]:
    """Return the messages of a good dialer and of a good listener."""
    dialer, listener = machine(Side.DIALER, 2), machine(Side.LISTENER)
    said: dict[Side, list[bytes]] = {Side.DIALER: [], Side.LISTENER: []}
    actions: list[HelloAction] = dialer.handle(Opened(peer_uid=UID), now_ns=0)
    listener.handle(Opened(peer_uid=UID), now_ns=0)
    speaker, hearer = dialer, listener
    while sent := b"".join(action.data for action in actions if isinstance(action, SendBytes)):
        said[speaker.side].append(sent)
        actions = hearer.handle(BytesReceived(data=sent), now_ns=0)
        speaker, hearer = hearer, speaker
    return said[Side.DIALER], said[Side.LISTENER]


def _hello_seeds() -> tuple[bytes, ...]:
    dialer, listener = _conversation()
    refusal = struct.pack("<4sHHI", HELLO_MAGIC, HELLO_VERSION, 5, 1) + b"\x04"
    return (
        b"\0" + blocks(dialer),
        b"\1" + blocks(listener),
        b"\0" + blocks([b"".join(dialer)]),
        b"\1" + blocks([refusal]),
        b"\1" + blocks([listener[0], refusal]),
        b"\0" + blocks([dialer[0], b"", b""]),
    )


@target("hello.stream", "either side of a hello with a stranger", _hello_seeds)
def _hello_stream(data: bytes) -> None:
    """A whole hello: the first byte picks our side, each block is what comes next; an empty one is time."""
    script = Script(data)
    side = Side.LISTENER if script.number(1) % 2 == 0 else Side.DIALER
    ours = machine(side)
    _checked(ours, ours.handle(Opened(peer_uid=UID), now_ns=0))
    for number, piece in enumerate(read_blocks(script.rest(), PIECES_MAX)):
        event = BytesReceived(data=piece) if piece else TimerFired()
        if _checked(ours, ours.handle(event, now_ns=number * 100)):
            return
    if not _checked(ours, ours.handle(PeerClosed(), now_ns=0)):
        raise Broken("a hello whose peer has gone is not over")


def _checked(ours: HelloMachine, actions: list[HelloAction]) -> bool:
    """Whether this ended the hello, with exactly one verdict as the last action."""
    ours.check_invariants()
    verdicts = [action for action in actions if isinstance(action, Accept | Reject)]
    if len(verdicts) > 1 or (verdicts and actions[-1] is not verdicts[0]):
        raise Broken(f"a hello ended with {actions}")
    for verdict in verdicts:
        if isinstance(verdict, Reject) and not isinstance(verdict.error, RemoteProtocolError):
            raise Broken(f"a hello was refused with {verdict.error!r}")
    return bool(verdicts)


def _identities() -> tuple[bytes, ...]:
    good = [identity(), identity(contracts={f"c{i}/1": "0" for i in range(20)}), identity("node", job=0)]
    return tuple(msgspec.msgpack.encode(each) for each in good)


@target("hello.identity", "the identity of somebody who holds the cookie", _identities, RemoteProtocolError)
def _hello_identity(data: bytes) -> None:
    """An identity that is no identity, under a proof that is right: its sender holds the cookie."""
    ours = machine(Side.LISTENER)
    ours.handle(Opened(peer_uid=UID), now_ns=0)
    opening = _message(1, bytes(NONCE_BYTES))
    (challenge,) = ours.handle(BytesReceived(data=opening), now_ns=0)
    assert isinstance(challenge, SendBytes)
    transcript = hashlib.sha256(opening + challenge.data + data).digest()
    proof = hmac.digest(COOKIE, b"zbmd hello dialer\0" + transcript, "sha256")
    (*_, verdict) = ours.handle(BytesReceived(data=_message(3, proof + data)), now_ns=0)
    ours.check_invariants()
    match verdict:
        case Reject(error=error):
            if "cookie" in str(error):
                raise Broken("the proof of this target is wrong: it reaches no decoder")
            raise error
        case Accept(peer=peer):
            if peer.uid != UID or peer.job not in (0, JOB):
                raise Broken(f"{peer} was let in")
        case _:
            raise Broken(f"a proof was answered with {verdict}")


def _message(kind: int, body: bytes) -> bytes:
    return struct.pack("<4sHHI", HELLO_MAGIC, HELLO_VERSION, kind, len(body)) + body


# ---- the exchange of descriptors


def _attach_seeds() -> tuple[bytes, ...]:
    offers = (AttachOffer(ring_bytes=1 << 17, slot=3), AttachOffer(ring_bytes=1 << 12, slot=None))
    answers = (AttachAnswer(slot=0), AttachAnswer(slot=None))
    encode = msgspec.msgpack.encode
    return (*(b"\0" + encode(offer) for offer in offers), *(b"\1" + encode(answer) for answer in answers))


@target(
    "attach.message", "an offer or an answer, without its descriptors", _attach_seeds, RemoteProtocolError
)
def _attach(data: bytes) -> None:
    if data[:1] == b"\0":
        decode(data[1:], AttachOffer)
    else:
        decode(data[1:], AttachAnswer)


# ---- the setup of a connection between hosts


def _secrets(side: Side) -> Secrets:
    return Secrets(bytes(range(SECRET_BYTES)), side)


_WANTED = Protection.MAC


def _session_seeds() -> tuple[bytes, ...]:
    secrets, peer = _secrets(Side.DIALER), identity()
    control = session_setup.control_session(secrets, _WANTED, peer)
    offers = (
        session_setup.make_offer(secrets, _WANTED),
        session_setup.make_offer(secrets, _WANTED, control=control, stripe=3),
    )
    answers = [
        session_setup.accept_offer(
            offer, _secrets(Side.LISTENER), _WANTED, peer, lambda *_: control, has_room=has_room
        )[0]
        for offer in offers
        for has_room in (True, False)
    ]
    return (*(b"\0" + offer for offer in offers), *(b"\1" + answer for answer in answers))


@target(
    "session.setup",
    "an offer, an answer or a refusal between hosts, under keys that are right",
    _session_seeds,
    RemoteProtocolError,
)
def _session(data: bytes) -> None:
    """The first byte picks which side hears the rest."""
    listener, peer = _secrets(Side.LISTENER), identity()
    control = session_setup.control_session(listener, _WANTED, peer)
    found: Session | session_setup.SetupError
    if data[:1] == b"\1":
        found = session_setup.accept_answer(data[1:], _secrets(Side.DIALER), _WANTED, peer)
    else:
        _, found = session_setup.accept_offer(data[1:], listener, _WANTED, peer, lambda *_: control)
    if isinstance(found, session_setup.SetupError):
        raise found
    if found.protection is not _WANTED or found.keys is None:
        raise Broken(f"protection {found.protection.value} was agreed on")
