"""Puts over a long fat path with 1, 2, 4 and 8 stripes, and with as many as are chosen, beside iperf3 -P.

    python -m zbmd.tools.lab.bench.transport.stripes [--rtt 20ms] [--rate MBPS] [--loss 0] [--rounds N]
        [--seconds
        S] [--json]

Two hosts in network namespaces (wants root), joined by a switch in user space that delays what each sends by
half of the round trip and lets it through at `--rate`. In each round every contender takes its turn, so that
all meet the same machine: iperf3 for `--seconds` behind one that is not counted, ours for as many bytes as
the path carries in that time, behind as many puts that are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import uvloop

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.bulk.stripe_io import SLOW_BYTES_PER_S, buffer_bytes_max, stripes_for
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

STRIPES: Final = (1, 2, 4, 8)
CHOSEN: Final = 0
"""As many as `transport.bulk.stripe_io` chooses."""
PUT_BYTES: Final = 4 << 20
IN_FLIGHT: Final = 8
WARM_UP_S: Final = 1.0
IPERF3_TRIES: Final = 4
"""On a busy machine its client sometimes finds its server gone."""
COOKIE: Final = bytes(32)


def _endpoint(slot: int) -> tuple[Endpoint, Segment]:
    segment = Segment.create(slot=slot, incarnation=1, arena_bytes=1 << 20, inbox_bytes=2 * PUT_BYTES)
    identity = Identity(name=f"rank{slot}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    return Endpoint(identity=identity, cookie=COOKIE, segment=segment), segment


async def _listen(address: str) -> None:
    """Take puts for ever."""
    endpoint, segment = _endpoint(0)
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await tcp.listen(address, links.put_nowait, endpoint)
    print(listener.address, flush=True)
    link = await links.get()
    await join_bulk(link, endpoint, DataPlane(), slot=1)
    inbox = segment.inbox.empty(PUT_BYTES, np.uint8)
    link.send(msgspec.msgpack.encode(segment.regions.register(inbox)))
    await asyncio.get_running_loop().create_future()


async def _dial(address: str, stripes: int) -> None:
    """For each line of input put as many bytes as it says, and print how many ns that took."""
    endpoint, _ = _endpoint(1)
    link = await tcp.dial(address, endpoint)
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        came.set_result(bytes(payload))

    link.on_frame = on_frame
    await join_bulk(link, endpoint, DataPlane(), slot=0, stripes=stripes or None)
    region = link.open_region(msgspec.msgpack.decode(await came, type=RegionHandle))
    data, value = np.ones(PUT_BYTES, np.uint8), 0
    print("linked", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        begin_ns = time.monotonic_ns()
        under_way = []
        for _ in range(int(line) // PUT_BYTES):
            value += 1
            under_way.append(region.put(data, channel=0, value=value))
            if len(under_way) == IN_FLIGHT:
                await under_way.pop(0)
        for put in under_way:
            await put
        print(time.monotonic_ns() - begin_ns, flush=True)


class Ours:
    """Two ranks of ours with `stripes` stripes between them."""

    def __init__(self, stack: contextlib.ExitStack, lab: Lab, stripes: int) -> None:
        module = [sys.executable, "-m", "zbmd.tools.lab.bench.transport.stripes"]
        self.name = f"zbmd, {stripes} stripe{'s' if stripes > 1 else ''}" if stripes else "zbmd, as chosen"
        listener = _start(stack, lab.hosts[0], [*module, "--listen", f"{lab.hosts[0].address}:0"])
        address = _line(listener)
        self._dialer = _start(stack, lab.hosts[1], [*module, "--dial", address, "--stripes", str(stripes)])
        _line(self._dialer)

    def measure(self, rate_mbps: float, seconds: float) -> float:
        """Mbit/s of payload."""
        for duration_s in (WARM_UP_S, seconds):
            nbytes = max(1, round(rate_mbps * 125_000 * duration_s / PUT_BYTES)) * PUT_BYTES
            assert self._dialer.stdin is not None
            self._dialer.stdin.write(f"{nbytes}\n".encode())
            self._dialer.stdin.flush()
            took_ns = int(_line(self._dialer))
        return nbytes * 8e3 / took_ns


class Iperf3:
    """iperf3 with `streams` connections."""

    def __init__(self, stack: contextlib.ExitStack, lab: Lab, streams: int) -> None:
        self.name = f"iperf3 -P {streams}"
        self._lab = lab
        self._streams = streams

    def measure(self, rate_mbps: float, seconds: float) -> float:
        """Mbit/s of payload, as the receiver saw it."""
        for tries_left in reversed(range(IPERF3_TRIES)):
            with contextlib.ExitStack() as stack:
                server = _start(stack, self._lab.hosts[0], ["iperf3", "-s", "-1", "--forceflush"])
                while "listening" not in _line(server):
                    pass
                try:
                    return self._run(seconds)
                except ZbmdError:
                    if not tries_left:
                        raise
        raise AssertionError("the last try returns or raises")

    def _run(self, seconds: float) -> float:
        target = self._lab.hosts[0].address
        command = ["iperf3", "-J", "-c", target, "-P", str(self._streams), "-t", f"{seconds:g}"]
        command += ["-O", f"{WARM_UP_S:g}", "-l", "1M"]
        done = self._lab.hosts[1].popen(command, stdout=subprocess.PIPE)
        result: dict[str, Any] = json.loads(done.communicate()[0])
        if "error" in result:
            raise ZbmdError(f"{' '.join(command)}: {result['error']}")
        return float(result["end"]["sum_received"]["bits_per_second"]) / 1e6


def _start(stack: contextlib.ExitStack, host: LabHost, command: Sequence[str]) -> subprocess.Popen[bytes]:
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ZbmdError("a rank of ours has ended: its error is above")
    return line.decode().strip()


def run(rtt_s: float, rate_mbps: float, loss: float, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Mbit/s of each contender, by round."""
    figures: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(2, shaped=True))
        for host in lab.hosts:
            host.shape(delay_ms=rtt_s * 500, loss=loss, rate_mbps=rate_mbps)
        contenders: list[Ours | Iperf3] = [Iperf3(stack, lab, streams) for streams in STRIPES]
        contenders += [Ours(stack, lab, stripes) for stripes in (*STRIPES, CHOSEN)]
        for _ in range(rounds):
            for contender in contenders:
                figure = contender.measure(rate_mbps, seconds)
                figures.setdefault(contender.name, []).append(figure)
    return figures


def table(figures: dict[str, list[float]], what: str) -> str:
    """The figures as a person reads them."""
    lines = [
        f"# {what}; {now_utc()}  {this_machine()}",
        f"{'':20}{'Mbit/s p50':>12}{'least':>9}{'most':>9}",
    ]
    lines += [
        f"{name:20}{median(values):>12,.0f}{min(values):>9,.0f}{max(values):>9,.0f}"
        for name, values in figures.items()
    ]
    return "\n".join(lines)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.bench.transport.stripes", __doc__)
    parser.add_argument("--rtt", default="20ms", metavar="TIME")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="MBPS")
    parser.add_argument("--loss", type=float, default=0.0, metavar="FRACTION")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    add_json(parser)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    parser.add_argument("--dial", help=argparse.SUPPRESS)
    parser.add_argument("--stripes", type=int, default=CHOSEN, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.listen is not None or arguments.dial is not None:
        # What they print is read as figures.
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if arguments.listen is not None:
        uvloop.run(_listen(arguments.listen))
        return 0
    if arguments.dial is not None:
        uvloop.run(_dial(arguments.dial, arguments.stripes))
        return 0
    rtt_s = parse_duration(arguments.rtt)
    figures = run(rtt_s, arguments.rate, arguments.loss, arguments.rounds, arguments.seconds)
    rtt_us, buffer_bytes = round(rtt_s * 1e6), buffer_bytes_max()
    least, most = stripes_for(rtt_us, buffer_bytes, SLOW_BYTES_PER_S), stripes_for(rtt_us, buffer_bytes)
    path = f"round trip {arguments.rtt}, {arguments.rate:g} Mbit/s, loss {arguments.loss:g}"
    what = f"{path}; chosen: {least} to {most} stripes"
    print(json.dumps({"what": what, "mbps": figures}) if arguments.json else table(figures, what))
    return 0


if __name__ == "__main__":
    sys.exit(main())
