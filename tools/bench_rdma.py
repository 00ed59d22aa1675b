"""Puts over RDMA beside perftest's `ib_write_lat` and `ib_write_bw`, from one device of this host to another.

    python -m zbmd.tools.rdma_vm python -m zbmd.tools.bench_rdma

`ZBMD_RDMA_DEVICES` names the devices, as in the RDMA machine. Each side is a process. A round trip is a put
each way; who waits polls natively (`RdmaPlane.wait`). Of an emulated machine only the ratio means
anything.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Final

import msgspec
import numpy as np

from zbmd.transport import _native, rdma
from zbmd.transport._rdma import Device
from zbmd.transport.bulk_peer import BulkPeerInfo
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.rdma_plane import choose_port
from zbmd.transport.rdma_setup import MemoryAt
from zbmd.transport.region import RegionHandle
from zbmd.transport.segment import Segment

LATENCY_BYTES: Final = 8
BANDWIDTH_BYTES: Final = 1 << 20
WAIT_NS: Final = 120_000_000_000
PERFTEST_S: Final = 120.0
LISTENS_S: Final = 60.0
LISTENS_LOOK_S: Final = 0.1


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one side tells the other."""

    at: MemoryAt
    inbox: RegionHandle


def side(slot: int, talk: Connection, device: str, address: str, rounds: int, puts: int) -> None:
    """One process: slot 0 begins, and sends what it has measured."""
    segment = Segment.create(
        slot=slot, incarnation=1, arena_bytes=2 * BANDWIDTH_BYTES, inbox_bytes=2 * BANDWIDTH_BYTES
    )
    plane = rdma.open_plane(device, address, segment=segment)
    other = 1 - slot
    peer = plane.connect(BulkPeerInfo(name=f"slot{other}", slot=other, incarnation=1))
    inbox = segment.inbox.empty(BANDWIDTH_BYTES, np.uint8)
    source = segment.arena.empty(BANDWIDTH_BYTES, np.uint8)
    talk.send_bytes(msgspec.msgpack.encode(Offer(at=peer.at, inbox=segment.regions.register(inbox))))
    theirs = msgspec.msgpack.decode(talk.recv_bytes(), type=Offer)
    peer.connect(theirs.at)
    talk.send_bytes(b"ready")
    talk.recv_bytes()
    region = peer.open_region(theirs.inbox)
    small = source[:LATENCY_BYTES]

    def wait(value: int) -> None:
        deadline_ns = _native.now_ns() + WAIT_NS
        if plane.wait(other, 0, value, deadline_ns=deadline_ns) != _native.WAIT_OK:
            raise UserError("the other side did not answer in time")

    round_trips_ns: list[int] = []
    for value in range(1, rounds + 1):
        start_ns = _native.now_ns()
        if slot == 0:
            region.put(small, channel=0, value=value)
        wait(value)
        if slot == 1:
            region.put(small, channel=0, value=value)
        round_trips_ns.append(_native.now_ns() - start_ns)
    start_ns = _native.now_ns()
    if slot == 0:
        for value in range(rounds + 1, rounds + puts + 1):
            region.put(source, channel=0, value=value)
        wait(rounds + 1)
    else:
        wait(rounds + puts)
        region.notify(0, rounds + 1)
    took_s = (_native.now_ns() - start_ns) / 1e9
    if slot == 0:
        us = statistics.median(round_trips_ns) / 2e3
        share = plane.reused / max(1, plane.reused + plane.registered)
        talk.send_bytes(msgspec.msgpack.encode((us, puts * BANDWIDTH_BYTES / took_s / 1e6, share)))
    peer.settled().wait(_native.now_ns() + WAIT_NS)
    peer.close()
    peer.ended.wait(_native.now_ns() + WAIT_NS)
    plane.close()
    segment.close()


def ours(devices: list[list[str]], rounds: int, puts: int) -> tuple[float, float, float]:
    """Median of half a round trip, us; MB/s; the share of transfers that registered nothing."""
    context = SpawnContext()
    pipes = [context.Pipe() for _ in devices]
    sides = [
        context.Process(target=side, args=(slot, pipes[slot][1], *devices[slot], rounds, puts))
        for slot in range(2)
    ]
    try:
        for process in sides:
            process.start()
        for _ in range(2):  # offers, and then that both are ready
            told = [pipe[0].recv_bytes() for pipe in pipes]
            for slot, words in enumerate(reversed(told)):
                pipes[slot][0].send_bytes(words)
        found: tuple[float, float, float] = msgspec.msgpack.decode(
            pipes[0][0].recv_bytes(), type=tuple[float, float, float]
        )
        for process in sides:
            process.join(LISTENS_S)
        return found
    finally:
        for process in sides:
            process.kill()


def theirs(program: str, devices: list[list[str]], nbytes: int, count: int) -> list[float]:
    """The numbers of perftest's result line."""
    shared = ["-n", str(count), "-s", str(nbytes), "-F"]
    at = [choose_port(Device(name), address).gid_index for name, address in devices[:2]]
    server = subprocess.Popen(
        [program, "-d", devices[1][0], "-x", str(at[1]), *shared], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        limit_s = time.monotonic() + LISTENS_S
        while True:  # its server says nothing when it listens
            client = subprocess.run(
                [program, "-d", devices[0][0], "-x", str(at[0]), *shared, devices[1][1]],
                capture_output=True,
                text=True,
                check=False,
                timeout=PERFTEST_S,
            )
            if client.returncode == 0:
                break
            if server.poll() is not None or time.monotonic() > limit_s:
                raise UserError(f"{program} failed: {client.stderr or client.stdout}")
            time.sleep(LISTENS_LOOK_S)
    finally:
        server.kill()
        server.communicate()
    line = re.search(rf"^\s*{nbytes}\s+{count}\s+(.+)$", client.stdout, re.MULTILINE)
    if line is None:
        raise UserError(f"{program} printed no result: {client.stdout}")
    return [float(word) for word in line[1].split()[:4]]


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="bench_rdma", description="Time puts over RDMA beside perftest.")
    parser.add_argument("--rounds", type=int, default=500, help="round trips of 8 bytes (default: 500)")
    parser.add_argument("--puts", type=int, default=50, help="puts of 1 MiB (default: 50)")
    arguments = parser.parse_args(argv)
    given = os.environ.get("ZBMD_RDMA_DEVICES", "")
    devices = [each.split("@") for each in given.split(",") if each.count("@") == 1]
    try:
        if len(devices) < 2:
            raise UserError("ZBMD_RDMA_DEVICES names no two devices: rxe0@10.98.0.1,rxe1@10.98.0.2")
        us, mb_s, share = ours(devices[:2], arguments.rounds, arguments.puts)
        lat = theirs("ib_write_lat", devices, LATENCY_BYTES, arguments.rounds)[2]
        bandwidth = theirs("ib_write_bw", devices, BANDWIDTH_BYTES, arguments.puts)[1]
    except ZbmdError as error:
        print(f"bench_rdma: {error}", file=sys.stderr)
        return 1
    print(f"{'what':<32}{'zbmd':>12}{'perftest':>12}{'ratio':>8}")
    print(f"{'put of 8 B, one way, us':<32}{us:>12.1f}{lat:>12.1f}{us / lat:>8.2f}")
    print(f"{'puts of 1 MiB, MB/s':<32}{mb_s:>12.1f}{bandwidth:>12.1f}{mb_s / bandwidth:>8.2f}")
    print(f"registrations reused: {share:.1%} of all transfers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
