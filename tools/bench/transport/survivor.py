"""The process that is to notice deaths: it watches victims as any rank does, and says when it was told.

`python -m zbmd.tools.bench.transport.survivor --control NAME --address NAME`. Commands: `load 1|0` starts and
stops a training step's work, `watch INCARNATION` waits for that victim's link and watches it, `notice
INCARNATION` answers with CLOCK_MONOTONIC of the native notice, the end of a native wait, the loop's callback
and the end of the link, in this order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Final

import uvloop

from zbmd.tools.bench.load import TrainingLoad
from zbmd.tools.bench.peers.control import connect, encode_reply, parse_command
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.prctl import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import WAIT_LOST, now_ns
from zbmd.transport.shm.connect import listen
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread

COOKIE: Final = bytes(32)
SLOT, VICTIM_SLOT = 0, 1
CHANNEL: Final = 0
NEVER: Final = 1
"""A value that no victim ever notifies."""
VICTIM_S_MAX: Final = 120


class Victim:
    """One victim under watch, and when its end was noticed where."""

    def __init__(self, segment: Segment, watch: DeathWatch, link: Link) -> None:
        self._segment = segment
        self._link = link
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[tuple[int, int]] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._waited = loop.run_in_executor(None, self._wait)
        assert link.peer_segment is not None
        watch.watch(link.peer_segment, self._on_death)
        link.on_frame = lambda header, payload: None
        link.on_closed = self._on_closed

    async def noticed(self) -> list[float]:
        """Wait for all notices, and make room for the next victim."""
        native_ns, loop_ns = await self._told
        found = [native_ns, await self._waited, loop_ns, await self._ended]
        self._segment.clear_lost(VICTIM_SLOT)
        return [float(ns) for ns in found]

    def _wait(self) -> int:
        ended = self._segment.wait(
            VICTIM_SLOT,
            CHANNEL,
            NEVER,
            group_mask=1 << VICTIM_SLOT,
            deadline_ns=now_ns() + VICTIM_S_MAX * 1_000_000_000,
        )
        at_ns = now_ns()
        if ended != WAIT_LOST:
            raise RuntimeError(f"a wait for a victim ended with {ended}, not with its loss")
        return at_ns

    def _on_death(self, slot: int, notice: DeathNotice) -> None:
        self._told.set_result((notice.at_ns, now_ns()))

    def _on_closed(self, error: ZbmdError | None) -> None:
        self._ended.set_result(now_ns())


class Survivor:
    """Takes the victims' links, one after the other."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._segment = Segment.create(slot=SLOT, incarnation=1, arena_bytes=0, inbox_bytes=0)
        self._life = LifeThread(self._segment)
        self._watch = DeathWatch(self._segment, self._loop)
        identity = Identity(name="survivor", pid=os.getpid(), uid=os.getuid(), incarnation=1)
        endpoint = Endpoint(identity=identity, cookie=COOKIE, segment=self._segment)
        self._links: asyncio.Queue[Link] = asyncio.Queue(maxsize=1)
        self._listener = listen(address, self._links.put_nowait, endpoint)
        self._load: TrainingLoad | None = None
        self._victim: Victim | None = None

    async def do(self, what: str, number: int, _: int) -> list[float]:
        """Carry out one command; see this module."""
        if what == "load":
            await self._set_load(bool(number))
        elif what == "watch":
            link = await self._links.get()
            assert link.peer.incarnation == number
            self._victim = Victim(self._segment, self._watch, link)
        elif what == "notice":
            assert self._victim is not None
            return await self._victim.noticed()
        else:
            raise ValueError(f"no such command: {what}")
        return []

    async def close(self) -> None:
        """Give everything back."""
        await self._set_load(False)
        self._listener.close()
        self._watch.close()
        self._life.goodbye()
        self._segment.close()

    async def _set_load(self, on: bool) -> None:
        if self._load is not None:
            await asyncio.to_thread(self._load.stop)
            self._load = None
        if on:
            self._load = TrainingLoad()
            await asyncio.to_thread(self._load.start)


async def _serve(control: str, address: str) -> None:
    survivor = Survivor(address)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=connect(control, 0))
        while line := await reader.readline():
            writer.write(encode_reply(await survivor.do(*parse_command(line))))
            await writer.drain()
        writer.close()
    finally:
        await survivor.close()


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_serve(arguments.control, arguments.address))


if __name__ == "__main__":
    main()
