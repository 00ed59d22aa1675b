"""Puts over RDMA beside perftest's `ib_write_lat` and `ib_write_bw`, from one device of this host to another.

    python -m zbmd.tools.lab.rdma_vm python -m zbmd.tools.lab.bench.transport.rdma

`ZBMD_RDMA_DEVICES` names the devices, as in the RDMA machine. Each side is a process that stays on a
processor of its own, ours as perftest's; they take turns. A round trip is a put each way; perftest's sides
poll memory, ours their completions, before they sleep. Of an emulated machine only the ratio means anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Final

import msgspec
import numpy as np

from zbmd.tools.bench.transport.perftest import (
    BANDWIDTH,
    LATENCY,
    MIB_S,
    TYPICAL_US,
    At,
    given_pair,
    perftest,
    processor,
)
from zbmd.transport.bulk.limits import BulkPeerInfo
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.rdma.connect import open_rdma_plane
from zbmd.transport.rdma.peer import RdmaPeer, RdmaRegion
from zbmd.transport.rdma.plane import RdmaPlane
from zbmd.transport.rdma.setup import MemoryAt

LATENCY_BYTES: Final = 8
BANDWIDTH_BYTES: Final = 1 << 20
WAIT_NS: Final = 120_000_000_000
END_S: Final = 60.0
MIB: Final = 1 << 20
CHANNEL: Final = 0


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Message from one side to the other."""

    at: MemoryAt
    inbox: RegionHandle


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides are to measure; the answer is slot 0's."""

    what: str
    count: int


class Side:
    """One process of ours, connected. What it measures, the other side measures with it."""

    def __init__(self, slot: int, plane: RdmaPlane, peer: RdmaPeer, region: RdmaRegion) -> None:
        self._slot = slot
        self._plane = plane
        self._peer = peer
        self._region = region
        self._source = plane.segment.arena.empty(BANDWIDTH_BYTES, np.uint8)
        self._value = 1
        """The next of the cells of both sides."""

    def native(self, rounds: int) -> float:
        """Half a round trip, us, without Python in it: the median."""
        took = self._region.ping(
            self._source[:LATENCY_BYTES],
            channel=CHANNEL,
            value=self._value,
            first=self._slot == 0,
            rounds=rounds,
            deadline_ns=_native.now_ns() + WAIT_NS,
        )
        self._value += rounds
        return float(np.median(took)) / 2e3

    def python(self, rounds: int) -> float:
        """The same by `put` and `wait`, called from Python."""
        small, took = self._source[:LATENCY_BYTES], []
        for value in range(self._value, self._value + rounds):
            began_ns = _native.now_ns()
            if self._slot == 0:
                self._region.put(small, channel=CHANNEL, value=value)
            self._wait(value)
            if self._slot == 1:
                self._region.put(small, channel=CHANNEL, value=value)
            took.append(_native.now_ns() - began_ns)
        self._value += rounds
        return statistics.median(took) / 2e3

    def bandwidth(self, puts: int) -> float:
        """MiB a second, until the other side has seen the last one."""
        last = self._value + puts
        began_ns = _native.now_ns()
        if self._slot == 0:
            for value in range(self._value, last):
                self._region.put(self._source, channel=CHANNEL, value=value)
            self._wait(last)
        else:
            self._wait(last - 1)
            self._region.notify(CHANNEL, last)
        self._value = last + 1
        return puts * BANDWIDTH_BYTES / MIB / ((_native.now_ns() - began_ns) / 1e9)

    def reused(self, _: int) -> float:
        """Of all transfers so far, those that registered nothing."""
        counts = self._plane.counts
        return 1 - counts.registered / max(1, counts.transfers)

    def _wait(self, value: int) -> None:
        deadline_ns = _native.now_ns() + WAIT_NS
        if self._plane.wait(1 - self._slot, CHANNEL, value, deadline_ns=deadline_ns) != _native.WAIT_OK:
            raise UserError("the other side did not answer in time")


def serve(slot: int, talk: Connection, device: str, address: str) -> None:
    """One process, until it is told to end."""
    os.sched_setaffinity(0, {processor(slot)})
    with contextlib.ExitStack() as stack:
        segment = Segment.create(
            slot=slot, incarnation=1, arena_bytes=2 * BANDWIDTH_BYTES, inbox_bytes=2 * BANDWIDTH_BYTES
        )
        stack.callback(segment.close)
        plane = open_rdma_plane(device, address, segment=segment)
        stack.callback(plane.close)
        peer = RdmaPeer(plane, BulkPeerInfo(name=f"slot{1 - slot}", slot=1 - slot, incarnation=1))
        inbox = segment.inbox.empty(BANDWIDTH_BYTES, np.uint8)
        talk.send_bytes(msgspec.msgpack.encode(Offer(at=peer.at, inbox=segment.regions.register(inbox))))
        theirs = msgspec.msgpack.decode(talk.recv_bytes(), type=Offer)
        peer.connect(theirs.at)
        talk.send_bytes(b"ready")
        talk.recv_bytes()
        side = Side(slot, plane, peer, peer.open_region(theirs.inbox))
        measures: dict[str, Callable[[int], float]] = {
            "native": side.native,
            "python": side.python,
            "bandwidth": side.bandwidth,
            "reused": side.reused,
        }
        with contextlib.suppress(EOFError):
            while True:
                ask = msgspec.msgpack.decode(talk.recv_bytes(), type=Ask)
                talk.send_bytes(msgspec.msgpack.encode(measures[ask.what](ask.count)))
        peer.close()
        peer.ended.wait(_native.now_ns() + WAIT_NS)


Measure = Callable[[str, int], float]


@contextlib.contextmanager
def ours(devices: tuple[At, At]) -> Generator[Measure]:
    """Both processes of ours; call what comes with what to measure, and how many."""
    context = SpawnContext()
    pipes = [context.Pipe() for _ in devices]
    sides = [context.Process(target=serve, args=(slot, pipes[slot][1], *devices[slot])) for slot in range(2)]

    def measure(what: str, count: int) -> float:
        for pipe in pipes:
            pipe[0].send_bytes(msgspec.msgpack.encode(Ask(what=what, count=count)))
        answers = [msgspec.msgpack.decode(pipe[0].recv_bytes(), type=float) for pipe in pipes]
        return answers[0]

    try:
        for process in sides:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for _ in range(2):  # offers, and then that both are ready
            told = [pipe[0].recv_bytes() for pipe in pipes]
            for slot, words in enumerate(reversed(told)):
                pipes[slot][0].send_bytes(words)
        yield measure
        for pipe in pipes:
            pipe[0].close()
        for process in sides:
            process.join(END_S)
    finally:
        for process in sides:
            process.kill()


class Figures(msgspec.Struct):
    """Of all turns."""

    native_us: list[float] = []
    python_us: list[float] = []
    perftest_us: list[float] = []
    mib_s: list[float] = []
    perftest_mib_s: list[float] = []
    reused: float = 0.0


def measured(turns: int, rounds: int, puts: int) -> Figures:
    """Everyone in turn. Raises `UserError`."""
    found = Figures()
    with ours(given_pair()) as measure:
        for _ in range(turns):
            found.native_us.append(measure("native", rounds))
            found.perftest_us.append(perftest(LATENCY, LATENCY_BYTES, rounds, pinned=True)[TYPICAL_US])
            found.python_us.append(measure("python", rounds))
            found.mib_s.append(measure("bandwidth", puts))
            found.perftest_mib_s.append(perftest(BANDWIDTH, BANDWIDTH_BYTES, puts, pinned=True)[MIB_S])
        found.reused = measure("reused", 0)
    return found


def table(found: Figures) -> str:
    """Medians of the turns, and their spread."""
    lines = [f"{'what':<40}{'zbmd':>10}{'perftest':>10}{'ratio':>7}   turns of zbmd; of perftest"]
    rows = (
        ("put of 8 B, native, one way, us", found.native_us, found.perftest_us),
        ("put of 8 B, from Python, one way, us", found.python_us, found.perftest_us),
        ("puts of 1 MiB, MiB/s", found.mib_s, found.perftest_mib_s),
    )
    for what, mine, other in rows:
        us, them = statistics.median(mine), statistics.median(other)
        turns = "; ".join(" ".join(f"{each:.1f}" for each in turns) for turns in (mine, other))
        lines.append(f"{what:<40}{us:>10.1f}{them:>10.1f}{us / them:>7.2f}   {turns}")
    lines.append(f"registrations reused: {found.reused:.1%} of all transfers")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="bench_rdma", description="Time puts over RDMA beside perftest.")
    parser.add_argument("--turns", type=int, default=5, help="of everyone (default: 5)")
    parser.add_argument("--rounds", type=int, default=1000, help="round trips of 8 B a turn (default: 1000)")
    parser.add_argument("--puts", type=int, default=100, help="puts of 1 MiB a turn (default: 100)")
    arguments = parser.parse_args(argv)
    try:
        found = measured(arguments.turns, arguments.rounds, arguments.puts)
    except ZbmdError as error:
        print(f"bench_rdma: {error}", file=sys.stderr)
        return 1
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
