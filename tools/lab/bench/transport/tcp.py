"""Time what protects TCP links: MACs through Python, and frames of a link under each protection.

    python -m zbmd.tools.lab.bench.transport.tcp [--seconds S] [--json]

The MACs are those that were compared for the records between hosts (`transport/secure/protection.py`). The
links run through the public API over loopback, both ends in this process on one uvloop, TCP_NODELAY on: round
trips of 64 bytes one at a time, and frames of the largest size one after the other. `again_us` is the same
once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import uvloop

from zbmd.tools.cli.options import add_json, script_parser
from zbmd.transport.errors import LinkFull
from zbmd.transport.frames import MAX_PAYLOAD_BYTES, FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import KEY_BYTES, TAG_BYTES, Protection, RecordMac
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.connect import dial, listen
from zbmd.transport.tcp.link import TcpLink

SIZES = (64, 4096, 1 << 20)
REPEATS = 7


@dataclass(frozen=True)
class MacRow:
    """One line of the table. us: median of one tag, round trip or frame."""

    what: str
    nbytes: int
    us: float
    again_us: float


def _tags() -> dict[str, Callable[[bytes], bytes]]:
    key, header = os.urandom(KEY_BYTES), bytes(48)
    gmac, keyed = RecordMac(key), hmac.new(key, digestmod="sha256")

    def blake2b(body: bytes) -> bytes:
        mac = hashlib.blake2b(header, digest_size=TAG_BYTES, key=key)
        mac.update(body)
        return mac.digest()

    def hmac_sha256(body: bytes) -> bytes:
        mac = keyed.copy()
        mac.update(header)
        mac.update(body)
        return mac.digest()[:TAG_BYTES]

    return {
        "AES-256-GMAC": lambda body: gmac.tag(2, 7, (header, body)),
        "keyed BLAKE2b": blake2b,
        "HMAC-SHA256": hmac_sha256,
    }


def _tag_us(tag: Callable[[bytes], bytes], body: bytes, seconds: float) -> float:
    begin = time.perf_counter()
    tag(body)
    count = max(1, int(seconds / REPEATS / max(1e-7, time.perf_counter() - begin)))
    rounds: list[float] = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(count):
            tag(body)
        rounds.append((time.perf_counter() - begin) / count)
    return statistics.median(rounds) * 1e6


async def _pair(protection: Protection) -> tuple[TcpLink, TcpLink]:
    settings = TcpSettings(protection=protection)
    accepted: asyncio.Queue[TcpLink] = asyncio.Queue()
    cookie = os.urandom(32)

    def endpoint(name: str) -> Endpoint:
        identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1)
        return Endpoint(identity=identity, cookie=cookie)

    listener = await listen("127.0.0.1:0", accepted.put_nowait, endpoint("b"), settings=settings)
    link = await dial(listener.address, endpoint("a"), settings=settings)
    listener.close()
    return link, await accepted.get()


async def _round_trip_us(link: TcpLink, other: TcpLink, seconds: float) -> float:
    came = asyncio.Event()

    def answer(header: FrameHeader, payload: memoryview) -> None:
        other.send(bytes(payload))

    other.on_frame = answer
    link.on_frame = lambda header, payload: came.set()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        came.clear()
        link.send(bytes(SIZES[0]))
        await came.wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


async def _frame_us(link: TcpLink, other: TcpLink, seconds: float) -> float:
    taken = 0
    payload = bytes(MAX_PAYLOAD_BYTES)

    def take(header: FrameHeader, payload: memoryview) -> None:
        nonlocal taken
        taken += 1

    other.on_frame = take
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        try:
            link.send(payload)
        except LinkFull:
            await link.writable()
    await link.flush()
    return (time.perf_counter() - begin) / max(1, taken) * 1e6


async def _link_rows(protection: Protection, seconds: float) -> list[MacRow]:
    link, other = await _pair(protection)
    trips = [await _round_trip_us(link, other, seconds) for _ in range(2)]
    frames = [await _frame_us(link, other, seconds) for _ in range(2)]
    link.close()
    other.close()
    name = f"link, {protection.value}"
    return [
        MacRow(f"{name}: round trip", SIZES[0], *trips),
        MacRow(f"{name}: one way, in a row", MAX_PAYLOAD_BYTES, *frames),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run it and print a table, or JSON."""
    parser = script_parser("lab.bench.transport.tcp", __doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    add_json(parser)
    given = parser.parse_args(arguments)
    rows: list[MacRow] = []
    for nbytes in SIZES:
        body = os.urandom(nbytes)
        for name, tag in _tags().items():
            rows.append(
                MacRow(name, nbytes, _tag_us(tag, body, given.seconds), _tag_us(tag, body, given.seconds))
            )
    for protection in (Protection.NONE, Protection.MAC):
        rows += uvloop.run(_link_rows(protection, given.seconds))
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'what':<32}{'bytes':>10}{'us':>12}{'again':>12}{'GB/s':>8}")
    for row in rows:
        rate = row.nbytes / row.us / 1e3
        print(f"{row.what:<32}{row.nbytes:>10}{row.us:>12.2f}{row.again_us:>12.2f}{rate:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
