"""The processes of `zbmd bench detect`: a survivor that is to notice deaths, and the victims that are killed.

`python -m zbmd.tools.bench.transport.deaths --address NAME --control NAME` watches victims as any rank does,
and reports when it noticed each. Commands: `load 1|0` starts and stops a training step's work, `watch
INCARNATION` waits for that victim's link and watches it, `notice INCARNATION` answers with CLOCK_MONOTONIC of
the native notice, the end of a native wait, the loop's callback and the end of the link, in this order.
With `--incarnation N --bytes B` instead of `--control` it is a victim: it joins the survivor, touches its
memory, prints `READY` and waits for its end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from typing import Final

import numpy as np
import uvloop

from zbmd.tools.bench.peers.control import serve_on_loop
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import WAIT_LOST, now_ns
from zbmd.transport.shm.connect import dial, listen
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread

COOKIE: Final = bytes(32)
SLOT, VICTIM_SLOT = 0, 1
CHANNEL: Final = 0
NEVER: Final = 1
"""A value that no victim ever notifies."""
VICTIM_S_MAX: Final = 120
WINDOWS: Final = 2
"""Sequences a pass of the load, as in a shard of the demo's training."""
READY: Final = "ready\n"


class TrainingLoad:
    """Forward and backward passes of the demo's model, one after the other, between `start` and `stop`.

    numpy releases the GIL in its kernels, so this competes for cores, caches and, between kernels, the GIL,
    as a rank's compute thread does.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._first_pass = threading.Event()
        self._thread = threading.Thread(target=self._run, name="training-load", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until its first pass is over."""
        self._thread.start()
        self._first_pass.wait()

    def stop(self) -> None:
        """End the thread after the pass under way, and wait for that."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        from zbmd.training.config import GPTConfig  # for the survivor alone
        from zbmd.training.model.gpt import GPT

        config = GPTConfig()
        model = GPT(config)
        params = model.init(seed=0)
        grads = np.zeros_like(params)
        tokens = np.random.default_rng(0).integers(0, 256, (WINDOWS, config.context + 1))
        while not self._stop.is_set():
            model.loss_and_grads(params, grads, tokens, global_batch=WINDOWS)
            self._first_pass.set()


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


async def _survive(address: str, control: str) -> None:
    survivor = Survivor(address)
    try:
        await serve_on_loop(control, 0, survivor.do)
    finally:
        await survivor.close()


async def _be_killed(address: str, incarnation: int, nbytes: int) -> None:
    segment = Segment.create(slot=VICTIM_SLOT, incarnation=incarnation, arena_bytes=0, inbox_bytes=0)
    life = LifeThread(segment)
    memory = np.ones(nbytes, np.uint8)
    identity = Identity(name="victim", pid=os.getpid(), uid=os.getuid(), incarnation=incarnation)
    link = await dial(address, Endpoint(identity=identity, cookie=COOKIE, segment=segment))
    link.on_frame = lambda header, payload: None
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.on_closed = lambda error: ended.set_result(None)
    sys.stdout.write(READY)
    sys.stdout.flush()
    await ended
    life.goodbye()
    del memory


def main() -> None:
    """Serve the benchmark; or live until killed, or until the survivor has gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--control")
    parser.add_argument("--incarnation", type=int)
    parser.add_argument("--bytes", type=int)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    if arguments.control is not None:
        uvloop.run(_survive(arguments.address, arguments.control))
    else:
        uvloop.run(_be_killed(arguments.address, arguments.incarnation, arguments.bytes))


if __name__ == "__main__":
    main()
