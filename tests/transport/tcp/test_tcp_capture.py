"""TCP links under capture: hellos replay identical, frames are recorded as they were, no secret is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from support.links.link_harness import COOKIE, Ear

from zbmd.transport import capture
from zbmd.transport.capture.reader import ProcessLog
from zbmd.transport.capture.records import FrameIn
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.tcp.connect import dial, listen, open_stripe
from zbmd.transport.tcp.link import TcpLink

PAYLOADS = [b"", b"small", bytes(300_000)]


def recorded(directory: Path, name: str) -> tuple[Endpoint, capture.LogRecorder]:
    clock = HybridClock()
    origin = capture.Origin(process=name, incarnation=1, job=7)
    log = capture.LogRecorder(directory, origin, capture.Clocks(hybrid=clock))
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, clock=clock, recorder=log), log


def records_of(process: ProcessLog) -> list[capture.Record]:
    return [record for segment in process.segments for _, records in segment.records() for record in records]


async def test_a_link_is_recorded_without_its_secrets(tmp_path: Path) -> None:
    us, our_log = recorded(tmp_path, "us")
    them, their_log = recorded(tmp_path, "them")
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, them)
    ours = await dial(listener.address, us)
    theirs = await links.get()
    ear, our_ear = Ear(theirs), Ear(ours)
    for payload in PAYLOADS:
        ours.send(payload)
    assert await ear.frames(3) == PAYLOADS
    stripe = await open_stripe(ours, 0, us)
    stripe.sock.close()
    sessions = [ours.session, theirs.session, stripe.session]
    ours.close()
    assert await ear.end() is await our_ear.end() is None
    listener.close()
    await listener.wait_closed()
    our_log.close()
    their_log.close()

    verdicts = list(capture.replay_log(tmp_path, secrets={"cookie": COOKIE}))
    assert len(verdicts) == 4, "both sides of the link's hello, and of the stripe's"
    assert all(isinstance(verdict, capture.Identical) for verdict in verdicts)
    by_name = {
        process.origin.process: records_of(process) for process in capture.open_log(tmp_path).processes
    }
    frames = [record for record in by_name["them"] if isinstance(record, FrameIn)]
    assert [bytes(record.frame[48:]) for record in frames] == PAYLOADS
    told = repr(by_name).encode()
    secrets = [COOKIE]
    for session in sessions:
        assert session.keys is not None
        secrets += [session.keys.send, session.keys.receive]
    secrets += [ours.session.join_key, theirs.session.join_key]
    for secret in secrets:
        assert repr(secret)[2:-1].encode() not in told
        assert secret.hex().encode() not in told
