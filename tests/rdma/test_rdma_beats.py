"""Beats that a device writes: from one device to the other, and over the stripe once a port is down."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from support.rdma.rdma_world import RdmaAt, given_devices, interface_of

from zbmd.actors.cluster.heartbeats._heartbeat import NativeHeartbeats
from zbmd.transport.rdma.native._rdma_beat import BeatEnd
from zbmd.transport.rdma.native._rdma_device import Device
from zbmd.transport.rdma.plane import choose_port
from zbmd.transport.rdma.setup import TIMEOUT

MS = 1_000_000
PERIOD_NS = 50 * MS
HOUR_NS = 3600 * 1000 * MS
KEYS = [bytes(range(first, first + 16)) for first in range(0, 64, 16)]
PSN = 7
TURNS = 100_000
HELD_PERIODS = 40
PATIENCE_S = 120.0
NO_RESPONSE = 20
"""IBV_WC_RESP_TIMEOUT_ERR."""


class Side:
    """A thread that beats, its stripe, and its end of a way."""

    def __init__(self, at: RdmaAt, sock: socket.socket, order: int) -> None:
        self.device = Device(at.device)
        self.port = choose_port(self.device, at.address)
        self.end = BeatEnd(self.device)
        self.native = NativeHeartbeats(period_ns=PERIOD_NS, lease_ns=HOUR_NS)
        self.place = self.native.place()
        send, receive = KEYS[:2][::order]
        self.native.adopt(self.place, sock.detach(), send, receive, b"")
        self.way_keys = KEYS[2:][::order]
        self.native.observe(self.place, HOUR_NS)
        self.native.beat_to(self.place, True)
        self.native.say(True, 1, 1)
        self.arrivals = 0
        self.stripe_ended = self.way_ended = ""

    def connect(self, other: Side, timeout: int = TIMEOUT) -> None:
        path = self.port.path_to(other.port.queue_pair(other.end.number, PSN), PSN, timeout=timeout)
        self.end.connect(path, address=other.end.address, key=other.end.key)
        assert self.native.add_way(self.place, self.end.way, *self.way_keys)

    def take(self) -> None:
        news = self.native.take(self.place)
        if news is not None:
            self.arrivals += len(news[0])
            self.stripe_ended, self.way_ended = self.stripe_ended or news[2], self.way_ended or news[3]

    def story(self) -> str:
        return (
            f"way ended: {self.way_ended!r} (status {self.end.status}), stripe ended: {self.stripe_ended!r}; "
            f"{self.native.sent_by_way} sent by it, {self.native.come_by_way} come, {self.arrivals} heard"
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until_s, self.story()
            await asyncio.to_thread(self.take)


@pytest.fixture
def strangers() -> Iterator[tuple[Side, Side]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    given = given_devices()
    made = Side(given[0], dialed, 1), Side(given[-1], accepted, -1)
    yield made
    for side in made:
        side.native.close()
        side.end.close()
        del side.end, side.device  # the last who have it opened


@pytest.fixture
def sides(strangers: tuple[Side, Side]) -> tuple[Side, Side]:
    for side, other in zip(strangers, reversed(strangers), strict=True):
        side.connect(other)
    for side in strangers:
        side.native.use_way(side.place)
    return strangers


async def set_port(interface: str, state: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", "link", "set", interface, state)
    assert await process.wait() == 0


async def test_beats_are_written_while_python_stands_still(sides: tuple[Side, Side]) -> None:
    for side in sides:
        await side.until(lambda side=side: side.native.come_by_way >= 5 and side.native.sent_by_way >= 5)
    began = time.monotonic()
    sum(itertools.repeat(0, TURNS))
    turns = int(TURNS * HELD_PERIODS * PERIOD_NS / 1e9 / (time.monotonic() - began))
    before = [side.native.come_by_way for side in sides]
    sum(itertools.repeat(0, turns))  # one call into C, which gives nobody the GIL
    come = [side.native.come_by_way - first for side, first in zip(sides, before, strict=True)]
    assert min(come) >= HELD_PERIODS // 4, come
    assert not any(side.way_ended or side.stripe_ended for side in sides)


async def test_a_port_that_goes_down_costs_no_beat_that_counts(sides: tuple[Side, Side]) -> None:
    for side in sides:
        await side.until(lambda side=side: side.native.sent_by_way >= 5)
    interface = interface_of(given_devices()[-1].device)
    await set_port(interface, "down")
    try:
        for side in sides:
            await side.until(lambda side=side: side.way_ended == "a beat was not acknowledged")
            heard = side.arrivals
            await side.until(lambda side=side, heard=heard: side.arrivals >= heard + 5)
            assert side.end.status and not side.stripe_ended
    finally:
        await set_port(interface, "up")


async def test_a_device_that_completes_nothing_is_not_waited_for(strangers: tuple[Side, Side]) -> None:
    side, other = strangers
    side.connect(other, timeout=0)  # the device waits for an acknowledgement for ever
    other.end.close()
    side.native.use_way(side.place)
    await side.until(lambda: side.way_ended == "a beat was not acknowledged")
    await other.until(lambda: other.arrivals >= 5)
    assert side.end.status == NO_RESPONSE and not side.stripe_ended
