"""Control protocol between a benchmark and the processes it times, over one unix socket per rank.

The process connects to an address that it was given (abstract, or with a slash a path, which other network
namespaces reach, too) and says its rank in one line. From then on each line that it reads is `WHAT NBYTES
ITERATIONS`, and it answers with one line of JSON: `Reply`. The end of the connection is the end of the
process, so a killed benchmark leaves nothing running. While a process
waits for its next line it sleeps in the kernel: it never polls while another one is measured.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Final

# Collectives: float32, sums, and a barrier before each measurement, for every contender. The size of a case
# is the bytes of a rank's largest array.

ITEM_BYTES: Final = 4
CASES: Final = {
    "all-reduce": "all-reduce in place",
    "all-reduce-keep": "all-reduce that keeps its inputs",
    "all-reduce-foreign": "all-reduce in place, of ordinary arrays",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "broadcast": "broadcast in place",
    "reduce": "reduce to rank 0",
    "gather": "gather to rank 0",
    "scatter": "scatter from rank 0",
    "all-to-all": "all-to-all",
}
"""The cases and what they are; only ours tells arrays in shared memory from ordinary ones."""
FOREIGN: Final = "-foreign"
"""Behind a case: of ordinary arrays."""
CASES_FOREIGN: Final = {
    f"{case}{FOREIGN}": f"{text}, of ordinary arrays"
    for case, text in CASES.items()
    if not case.startswith("all-reduce")
}
"""More cases, which run when they are asked for."""


MODEL: Final = "model"
"""No case: what the group has measured of its link as it was made."""
CPU: Final = "cpu-"
"""Before a case: not its time but the CPU that it takes a rank."""


def measured(what: str, iterations: int, operation: Callable[[], object]) -> list[float]:
    """Nanoseconds of `operation`, of CPU if `what` says so."""
    return busy(iterations, operation) if what.startswith(CPU) else timed(iterations, operation, 1)


def bus_factor(case: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it (its PERFORMANCE.md)."""
    if case.startswith("all-reduce"):
        return 2 * (ranks - 1) / ranks
    if case.removesuffix(FOREIGN) in ("broadcast", "reduce"):
        return 1.0
    return (ranks - 1) / ranks


def elements(nbytes: int, ranks: int) -> tuple[int, int]:
    """(of the largest array, of a block of it); at least one a block."""
    block = max(1, nbytes // ITEM_BYTES // ranks)
    return max(1, nbytes // ITEM_BYTES), block


# Point-to-point patterns, the same for every contender.
#
# p2p: a ping and its answer of the same size, half the round trip a sample. As in osu_latency, what is sent
#      never changes and what has arrived is not looked at, so both stay in the caches where they are.
# echo: the same, but each side sends back what it has received: every byte crosses from core to core.
# put: a window of messages one way and one small answer, the window's time over its length a sample (osu_bw).

WINDOW_MAX: Final = 64
WINDOW_BYTES: Final = 64 << 20
WARMUP_MAX: Final = 100


def window_of(nbytes: int) -> int:
    """Messages in flight before one is waited for: up to 64, of 64 MiB together, at least one."""
    return max(1, min(WINDOW_MAX, WINDOW_BYTES // nbytes))


def warmups(iterations: int) -> int:
    """Return the number of operations before those that count."""
    return min(WARMUP_MAX, 1 + iterations // 10)


def busy(iterations: int, operation: Callable[[], object]) -> list[float]:
    """Nanoseconds of CPU that this process spends on a call of `operation`, all its threads, on average."""
    for _ in range(warmups(iterations)):
        operation()
    began = time.process_time_ns()
    for _ in range(iterations):
        operation()
    return [(time.process_time_ns() - began) / iterations]


def timed(iterations: int, operation: Callable[[], object], parts: int) -> list[float]:
    """Nanoseconds of each call of `operation`, divided by `parts`; the first ones do not count."""
    clock = time.perf_counter_ns
    for _ in range(warmups(iterations)):
        operation()
    samples: list[float] = []
    for _ in range(iterations):
        began = clock()
        operation()
        samples.append((clock() - began) / parts)
    return samples


async def timed_on_loop(
    iterations: int, operation: Callable[[], Awaitable[object]], parts: int
) -> list[float]:
    """As `timed`, of what is awaited."""
    clock = time.perf_counter_ns
    samples: list[float] = []
    for number in range(warmups(iterations) + iterations):
        began = clock()
        await operation()
        if number >= warmups(iterations):
            samples.append((clock() - began) / parts)
    return samples


def windows(iterations: int, nbytes: int) -> int:
    """Return the number of windows that make `iterations` messages, at least two."""
    return max(2, iterations // window_of(nbytes))


COMMAND_BYTES_MAX: Final = 256
REPLY_BYTES_MAX: Final = 64 << 20

Measure = Callable[[str, int, int], list[float]]
"""Takes what to measure, bytes and iterations; returns nanoseconds, one number an operation."""
MeasureOnLoop = Callable[[str, int, int], Awaitable[list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Nanoseconds, one number for each operation; empty from a rank that only took part.

    Of the standard library alone: a peer may run in an interpreter that has nothing else.
    """

    ns: list[float] = field(default_factory=list)


def socket_name(control: str) -> str:
    """Return the control address as the kernel names it."""
    return control if "/" in control else f"\0{control}"


def connect(control: str, rank: int) -> socket.socket:
    """Connect to the benchmark at the address `control` as `rank`. Raises OSError if it is gone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(socket_name(control))
        sock.sendall(f"{rank}\n".encode())
    except OSError:
        sock.close()
        raise
    return sock


def parse_command(line: bytes) -> tuple[str, int, int]:
    """Return what to measure, bytes and iterations. Raises ValueError on anything else."""
    what, nbytes, iterations = line.decode().split()
    return what, int(nbytes), int(iterations)


def encode_reply(ns: list[float]) -> bytes:
    """One line."""
    return json.dumps(asdict(Reply(ns=ns))).encode() + b"\n"


def serve(control: str, rank: int, measure: Measure) -> None:
    """Measure what is asked for until the benchmark hangs up."""
    with connect(control, rank) as sock, sock.makefile("rb") as lines:
        while line := lines.readline(COMMAND_BYTES_MAX):
            sock.sendall(encode_reply(measure(*parse_command(line))))


async def serve_on_loop(control: str, rank: int, measure: MeasureOnLoop) -> None:
    """As `serve`, with what is awaited."""
    reader, writer = await asyncio.open_unix_connection(sock=connect(control, rank))
    while line := await reader.readline():
        writer.write(encode_reply(await measure(*parse_command(line))))
        await writer.drain()
    writer.close()
