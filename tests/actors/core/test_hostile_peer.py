"""A peer that holds the cookie and says what no actor system says: its link ends, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core import peer as peer_module
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.rank.host_contracts import REPORT_BYTES_MAX, read_report
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.shm.connect import Endpoint, link_pair
from zbmd.transport.shm.link import ShmLink


class Ping(Contract, id="hostile.ping"):
    number: int


class Echo(Actor):
    @on(Ping)
    async def ping(self, message: Ping) -> Ping:
        return message


class Attached:
    """Our system, with an enemy on the other end of a link."""

    def __init__(self) -> None:
        limits = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 21, queue_frames_max=64)
        ours, self.enemy = link_pair(
            *(
                Endpoint(
                    identity=Identity(name=name, pid=1, uid=1, incarnation=1), cookie=bytes(32), limits=limits
                )
                for name in ("ours", "enemy")
            )
        )
        self.system = ActorSystem("ours")
        self.ended: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
        self.system.attach(ours, on_closed=self.ended.set_result)

    async def still_works(self) -> None:
        echo = await self.system.spawn(Echo)
        assert await echo.ask(Ping(3), reply=Ping, timeout=60) == Ping(3)


@asynccontextmanager
async def attached() -> AsyncGenerator[Attached]:
    made = Attached()
    try:
        yield made
    finally:
        made.enemy.close()
        await made.system.stop()


BODY = msgspec.Raw(msgspec.msgpack.encode(Ping(1)))
LONG_NAME = "a" * (MAX_PAYLOAD_BYTES - 100)


@pytest.mark.parametrize(
    "envelope",
    [
        wire.Tell(LONG_NAME, 0, "", BODY),
        wire.Ask(1, LONG_NAME, 0, 1, "", BODY),
        wire.Bounce(LONG_NAME, 0, "", "c/1", "x", "y"),
    ],
    ids=["tell", "ask", "bounce"],
)
async def test_a_name_that_would_not_fit_into_the_answer_is_refused(envelope: wire.Envelope) -> None:
    async with attached() as made:
        made.enemy.send(wire.encode(envelope))
        assert isinstance(await made.ended, RemoteProtocolError)
        await made.still_works()


async def test_an_answer_of_one_byte_is_nil_or_refused() -> None:
    async with attached() as made:
        asked: asyncio.Queue[bytes] = asyncio.Queue()
        made.enemy.on_frame = lambda header, payload: asked.put_nowait(bytes(payload))
        first = asyncio.ensure_future(made.system.ref("enemy/a").ask(Ping(1), timeout=60))
        await asked.get()
        made.enemy.send(wire.encode(wire.Reply(1, msgspec.Raw(b"\xc0"))))
        assert await first is None
        second = asyncio.ensure_future(made.system.ref("enemy/a").ask(Ping(1), timeout=60))
        await asked.get()
        made.enemy.send(wire.encode(wire.Reply(2, msgspec.Raw(b"\x05"))))
        with pytest.raises(RemoteProtocolError, match="not a contract"):
            await second
        assert isinstance(await made.ended, RemoteProtocolError)
        await made.still_works()


async def test_a_peer_that_asks_and_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are kept up to a bound; then its link ends, and whoever waits for it hears of it."""
    monkeypatch.setattr(peer_module, "OUTBOX_FRAMES_MAX", 16)
    async with attached() as made:
        waiting = asyncio.ensure_future(made.system.ref("enemy/a").ask(Ping(1), timeout=60))
        await asyncio.sleep(0)
        number = 0
        while not made.ended.done():
            try:
                await _ask_without_reading(made.enemy, number)
            except ZbmdError:
                break
            number += 1
        error = await made.ended
        assert isinstance(error, RemoteProtocolError) and "unread" in str(error)
        with pytest.raises(PeerLost):
            await waiting
        await made.still_works()


async def _ask_without_reading(enemy: ShmLink, number: int) -> None:
    enemy.send(wire.encode_ask(number, "nobody", 0, 1_000_000_000, "", Ping(1)))
    await enemy.writable()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "payload", [b"\x81\xa2\xff\xfe\x01", b"\x91" * 5000, b"\x80" * (REPORT_BYTES_MAX + 1)]
)
def test_a_report_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_report(payload)
