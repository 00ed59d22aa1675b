"""Time the round trip of a frame between two processes through asyncio: the public `Link`, nothing below it.

    python -m zbmd.tools.bench_frames [--seconds S] [--sizes N,N,…] [--no-spin] [--json]

One process sends a frame, the other answers with the same payload from its `on_frame`; both run uvloop. Each
size is timed on idle processes and again while a thread of each computes (numpy, as a training step does).
`noise_percent` is the same measurement against itself (A against A).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import uvloop

from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import Identity
from zbmd.transport.link import Link, LinkLimits
from zbmd.transport.shm import Endpoint, dial, listen
from zbmd.transport.shm_link import ShmLink

SIZES = (8, 4096)
WARM_UP = 2000
TIMEOUT_S = 60.0
COOKIE = bytes(32)
COMPUTE_NUMBERS = 1 << 16
"""The compute thread takes the tanh of so many numbers at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    payload_bytes: int
    computing: bool
    p50_us: float
    p99_us: float
    per_second: float
    noise_percent: float


def _endpoint(name: str, *, spin: bool) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1)
    return Endpoint(identity=identity, cookie=COOKIE, limits=LinkLimits() if spin else LinkLimits(spin_ns=0))


@contextmanager
def _computing(wanted: bool) -> Generator[None]:
    """A thread that computes as a training step does: numpy, which releases the GIL within each call."""
    stop = threading.Event()

    def compute() -> None:
        a = np.full(COMPUTE_NUMBERS, 0.01, np.float32)
        while not stop.is_set():
            np.tanh(a, out=a)

    thread = threading.Thread(target=compute, name="compute")
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


async def _serve(address: str, *, spin: bool, computing: bool) -> None:
    link = await dial(address, _endpoint("echo", spin=spin))
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    link.on_frame = lambda _, payload: link.send(bytes(payload))
    link.on_closed = ended.set_result
    with _computing(computing):
        await ended


async def _round_trips(link: Link, payload: bytes, seconds: float) -> list[float]:
    """Times of round trips in us, sorted."""
    clock, times_us = time.perf_counter_ns, list[float]()
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    end_ns = clock() + int(seconds * 1e9)
    sent_ns = 0

    def on_frame(_: FrameHeader, __: memoryview) -> None:
        nonlocal sent_ns
        now_ns = clock()
        times_us.append((now_ns - sent_ns) / 1e3)
        if now_ns < end_ns or len(times_us) < 2 * WARM_UP:
            sent_ns = clock()
            link.send(payload)
        else:
            over.set_result(None)

    link.on_frame = on_frame
    sent_ns = clock()
    link.send(payload)
    await over
    return sorted(times_us[WARM_UP:])


async def _measure(sizes: Sequence[int], seconds: float, *, spin: bool, computing: bool) -> list[Row]:
    address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(4)}"
    came: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
    listener = listen(address, came.set_result, _endpoint("bench", spin=spin))
    options = [*([] if spin else ["--no-spin"]), *(["--computing"] if computing else [])]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "zbmd.tools.bench_frames", "--serve", address, *options
    )
    rows: list[Row] = []
    try:
        link = await asyncio.wait_for(came, TIMEOUT_S)
        with _computing(computing):
            for size in sizes:
                first = await _round_trips(link, bytes(size), seconds)
                again = await _round_trips(link, bytes(size), seconds)
                p50_us, p50_again_us = first[len(first) // 2], again[len(again) // 2]
                rows.append(
                    Row(
                        payload_bytes=size,
                        computing=computing,
                        p50_us=p50_us,
                        p99_us=first[len(first) * 99 // 100],
                        per_second=len(first) / (sum(first) / 1e6),
                        noise_percent=abs(p50_us - p50_again_us) / p50_us * 100,
                    )
                )
        link.close()
    finally:
        listener.close()
        await child.wait()
    return rows


def measure(seconds: float = 1.0, *, sizes: Sequence[int] = SIZES, spin: bool = True) -> list[Row]:
    """Time shm frames of `sizes` bytes for `seconds` each, idle and while computing. Runs its own loop."""
    rows: list[Row] = []
    for computing in (False, True):
        rows += uvloop.run(_measure(sizes, seconds, spin=spin, computing=computing))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="bench_frames", description="Time the round trip of frames over shared memory, through asyncio."
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default 1)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="payloads in bytes")
    parser.add_argument("--no-spin", action="store_true", help="park at once instead of spinning first")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--computing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        uvloop.run(_serve(options.serve, spin=not options.no_spin, computing=options.computing))
        return 0
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = measure(options.seconds, sizes=sizes, spin=not options.no_spin)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'bytes':>8} {'':12} {'p50 us':>9} {'p99 us':>9} {'per second':>12} {'noise %':>8}")
    for row in rows:
        state = "computing" if row.computing else "idle"
        print(
            f"{row.payload_bytes:8} {state:12} {row.p50_us:9.1f} {row.p99_us:9.1f} "
            f"{row.per_second:12,.0f} {row.noise_percent:8.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
