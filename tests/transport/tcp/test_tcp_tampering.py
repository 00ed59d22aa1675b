"""A man in the middle of a TCP link: whatever is done to the records, the link ends with its name."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.links.link_harness import COOKIE, Ear
from support.tcp.tcp_middle import Middle, Tamper

from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import TAG_BYTES, Protection
from zbmd.transport.secure.record_stream import (
    DuplicatedRecord,
    ForgedRecord,
    OversizedRecord,
    ReorderedRecord,
    ReplayedRecord,
    TruncatedRecord,
)
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.connect import dial, listen
from zbmd.transport.tcp.link import TcpLink

FRAMES = [b"zero", b"one", b"two", b"three", bytes(300_000)]


def endpoint(name: str) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=COOKIE)


async def tampered(tamper: Tamper, protection: Protection = Protection.MAC) -> tuple[list[bytes], object]:
    """The part of `FRAMES` that the listener got, and how its link ended."""
    settings = TcpSettings(protection=protection)
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b"), settings=settings)
    tag_bytes = TAG_BYTES if protection is Protection.MAC else 0
    async with Middle(listener.address, tag_bytes=tag_bytes) as middle:
        ours = await dial(middle.address, endpoint("a"), settings=settings)
        theirs = await links.get()
        middle.tamper = tamper
        ear = Ear(theirs)
        our_ear = Ear(ours)
        for frame in FRAMES:
            ours.send(frame)
        await ours.flush()
        ours.close()
        await our_ear.end()
        error = await ear.end()
    listener.close()
    await listener.wait_closed()
    return ear.payloads, error


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CASES: dict[str, tuple[Tamper, type[ZbmdError], int]] = {
    "duplicated": (lambda r: [*r[:2], *r[1:]], DuplicatedRecord, 2),
    "replayed": (lambda r: [*r[:3], r[0], *r[3:]] if len(r) > 2 else r, ReplayedRecord, 3),
    "reordered": (lambda r: [r[0], *r[2:3], *r[1:2], *r[3:]] if len(r) > 2 else r[:1], ReorderedRecord, 1),
    "held back": (lambda r: [r[0], *r[2:]], ReorderedRecord, 1),
    "a bit changed": (lambda r: [*r[:2], *(flipped(x, 60) for x in r[2:3]), *r[3:]], ForgedRecord, 2),
    "a bit of a large frame": (lambda r: [*r[:4], *(flipped(x, 200_000) for x in r[4:])], ForgedRecord, 4),
    "the mac cut": (lambda r: [*r[:2], *(flipped(x, len(x) - 1) for x in r[2:3]), *r[3:]], ForgedRecord, 2),
    "the kind changed": (lambda r: [r[0], *(flipped(x, 3) for x in r[1:])], ForgedRecord, 1),
    "injected": (lambda r: [r[0], b"\x10\0\0\x02\x01\0\0\0" + bytes(32), *r[1:]], ForgedRecord, 1),
    "oversized": (lambda r: [r[0], b"\xff\xff\xff\x02\x01\0\0\0", *r[1:]], OversizedRecord, 1),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_done_to_the_records_is_named(name: str) -> None:
    tamper, error_type, good = CASES[name]
    payloads, error = await tampered(tamper)
    assert type(error) is error_type
    assert payloads == FRAMES[:good], "what came before it, and nothing after"


@pytest.mark.parametrize("name", ["duplicated", "replayed", "reordered", "held back", "oversized"])
async def test_without_a_mac_accidents_are_named(name: str) -> None:
    tamper, error_type, good = CASES[name]
    payloads, error = await tampered(tamper, Protection.NONE)
    assert type(error) is error_type
    assert payloads == FRAMES[:good]


async def test_what_nobody_touches_arrives() -> None:
    assert await tampered(lambda records: records) == (FRAMES, None)


@pytest.mark.parametrize("left", [1, 7, 8, 30, 100_000])
async def test_a_stream_cut_inside_a_record_is_a_loss_that_tells_how(left: int) -> None:
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b"))
    async with Middle(listener.address, tag_bytes=TAG_BYTES) as middle:
        ours = await dial(middle.address, endpoint("a"))
        theirs = await links.get()

        def cut(records: list[bytes]) -> list[bytes]:
            if len(records) == len(FRAMES):
                asyncio.get_running_loop().call_soon(middle.cut)
            return [record[:left] if n == 4 else record for n, record in enumerate(records)]

        middle.tamper = cut
        ear, our_ear = Ear(theirs), Ear(ours)
        for frame in FRAMES:
            ours.send(frame)
        for error in (await ear.end(), await our_ear.end()):
            assert isinstance(error, PeerLost)
        assert isinstance(ear.ends[0], PeerLost)
        assert isinstance(ear.ends[0].__cause__, TruncatedRecord)
        assert ear.payloads == FRAMES[:4]
    listener.close()
    await listener.wait_closed()


async def test_a_goodbye_cannot_be_taken_away_or_made_up() -> None:
    payloads, error = await tampered(lambda records: records[: len(FRAMES)])
    assert payloads == FRAMES
    assert isinstance(error, PeerLost)
    payloads, error = await tampered(lambda r: [r[0], b"\0\0\0\x03\x01\0\0\0" + bytes(16)])
    assert payloads == FRAMES[:1]
    assert type(error) is ForgedRecord


async def test_a_recorded_session_cannot_be_played_to_another() -> None:
    recorded: list[bytes] = []

    def record(records: list[bytes]) -> list[bytes]:
        recorded[:] = records
        return records

    assert (await tampered(record))[1] is None
    payloads, error = await tampered(lambda records: recorded[: len(records)])
    assert payloads == []
    assert type(error) is ForgedRecord
