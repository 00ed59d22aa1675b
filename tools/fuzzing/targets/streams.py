"""Targets between hosts: records over a stream that an enemy may write into, and what the kernel tells."""

from __future__ import annotations

from zbmd.tools.fuzzing.script import Script, block, blocks, read_blocks
from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.tools.fuzzing.targets import wires
from zbmd.transport.host.topology.interfaces import parse_addresses
from zbmd.transport.secure.record_stream import RecordError, RecordKind, Sealer, SecureStream
from zbmd.transport.secure.session_keys import KEY_BYTES, Keys

FRAME_BYTES_MAX = 4096
RECORDS_MAX = 64
HELD_BYTES_MAX = 2 * FRAME_BYTES_MAX
_KEYS = Keys(send=b"\1" * KEY_BYTES, receive=b"\2" * KEY_BYTES)


def _record(kind: RecordKind, body: bytes, sequence: int = 0) -> bytes:
    sealer = Sealer(None)
    sealer.sequence = sequence
    return b"".join(sealer.seal(kind, (body,)))


def _plain_seeds() -> tuple[bytes, ...]:
    records = [_record(RecordKind.FRAME, wires.frame(bytes([n]) * n), n) for n in range(4)]
    whole = b"".join([*records, _record(RecordKind.GOODBYE, b"", 4)])
    return (blocks([whole]), blocks(records), blocks(whole[at : at + 7] for at in range(0, len(whole), 7)))


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


def _keyed(data: bytes) -> None:
    """What stands between the ends may drop, double, replay, change and cut: nothing else is delivered."""
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


def _addresses(data: bytes) -> None:
    if any(index < 0 or not address for index, address in parse_addresses(data)):
        raise Broken("an interface without an address")


_LOOPBACK = bytes.fromhex(
    "34000000140002000100000000000000020880fe010000000800010007f000010800020007f0000107000300"
    "6c6f0000080008008000000014000000030002000100000000000000"
)

TARGETS = (
    Target(
        name="stream.plain",
        what="records without keys, cut anywhere",
        allowed=(RecordError,),
        seeds=_plain_seeds,
        run=_plain,
    ),
    Target(
        name="stream.keyed",
        what="records with keys, and somebody in between",
        allowed=(RecordError,),
        seeds=_keyed_seeds,
        run=_keyed,
    ),
    Target(
        name="netlink",
        what="the kernel's list of addresses",
        allowed=(),
        seeds=lambda: (_LOOPBACK,),
        run=_addresses,
    ),
)
