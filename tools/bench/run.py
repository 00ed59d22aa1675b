"""One run of `zbmd bench p2p` or `put`: everyone in turn, at every case and size, and what it comes to."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import rich.console
import rich.progress

from zbmd.tools.bench.peer_catalogue import (
    OF_RDMA,
    OF_TCP,
    ONE_THREAD,
    OURS_OTHERWISE,
    Peer,
    Site,
    find_peer,
    iperf3_client,
)
from zbmd.tools.bench.peers.control import window_of, windows
from zbmd.tools.bench.result import Contestant, Measurement
from zbmd.tools.bench.stats import (
    ITERATIONS_LEAST,
    OURS,
    Ratio,
    bandwidth_gbytes_per_s,
    iterations_for,
    median,
    percentile,
    ratio_of_medians,
    size_in_words,
    turns,
)
from zbmd.tools.bench.transport.perftest import BANDWIDTH, LATENCY, MESSAGES, MIB_S, TYPICAL_US, perftest
from zbmd.tools.bench.workers import CONTROL, ContenderFailed, Workers
from zbmd.transport.errors import UserError

# Everyone who takes part in a run, ready to be measured in turn: our two ranks, and the peers.

IPERF3_TIMEOUT_S: Final = 30.0
IPERF3_READY: Final = b"Server listening"
WRITES_LEAST: Final = 5
"""perftest wants as many."""


class Contender(Protocol):
    """One who is measured."""

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation. Raises `ContenderFailed`."""
        ...


class OurRanks:
    """Two processes of ours, joined over `transport`."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        *,
        transport: str,
        nbytes_max: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        rendezvous = os.pipe()
        common = [sys.executable, "-m", "zbmd.tools.bench.transport.rank", "--control", CONTROL]
        common += [
            "--transport",
            transport,
            "--bytes-max",
            str(nbytes_max),
            "--rendezvous",
            *map(str, rendezvous),
        ]
        workers = Workers(
            OURS,
            [[*common, "--rank", rank] for rank in ("0", "1")],
            ranks=2,
            environment={**ONE_THREAD, **(environment or {})},
            pass_fds=rendezvous,
        )
        self._workers = stack.enter_context(workers)

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """See `Contender`; `case` is one of `bench_rank.Rank`."""
        return self._workers.ask(case, nbytes, iterations)[0]


class PeerRanks:
    """A peer's processes. What is p2p for us is p2p for it, wherever our buffers lie."""

    def __init__(self, stack: contextlib.ExitStack, peer: Peer) -> None:
        self._workers = stack.enter_context(peer.workers())

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """See `Contender`."""
        return self._workers.ask(case.partition("-")[0], nbytes, iterations)[0]


class Iperf3:
    """A server for the whole run, and one client a turn: a stream of bytes over loopback, for `IPERF3_S`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        server = ["iperf3", "-s", "-B", "127.0.0.1", "-p", self._port, "--forceflush"]
        self._server = stack.enter_context(
            subprocess.Popen(
                server, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        stack.callback(self._server.kill)
        assert self._server.stdout is not None
        lines = [self._server.stdout.readline() for _ in range(2)]
        if not any(IPERF3_READY in line for line in lines):
            raise ContenderFailed(f"iperf3 -s said {lines!r}")

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """The mean time that `nbytes` took to be received, as one sample."""
        try:
            done = subprocess.run(
                iperf3_client(self._port),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=IPERF3_TIMEOUT_S,
                check=True,
            )
            report = msgspec.json.decode(done.stdout, type=_Iperf3Report)
        except (subprocess.SubprocessError, msgspec.DecodeError) as error:
            raise ContenderFailed(f"{shlex.join(iperf3_client(self._port))} failed: {error}") from error
        received = report.end.sum_received
        return [1e9 * nbytes * received.seconds / received.bytes]


class _Sum(msgspec.Struct):
    seconds: float
    bytes: int


class _End(msgspec.Struct):
    sum_received: _Sum


class Perftest:
    """Two processes a turn, neither of them pinned: we are not, either."""

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """One sample: what it calls typical, one way, there and back for a frame; or the mean of as many
        writes as we do, as many at once."""
        count = max(iterations, WRITES_LEAST)
        try:
            if case.startswith("put"):
                depth = window_of(nbytes)
                count = max(WRITES_LEAST, windows(iterations, nbytes) * depth)
                mib_s = perftest(BANDWIDTH, nbytes, count, pinned=False, depth=depth)[MIB_S]
                return [nbytes / (1 << 20) / mib_s * 1e9]
            if case.startswith("frame"):
                return [2 * perftest(MESSAGES, nbytes, count, pinned=False)[TYPICAL_US] * 1e3]
            return [perftest(LATENCY, nbytes, count, pinned=False)[TYPICAL_US] * 1e3]
        except UserError as error:
            raise ContenderFailed(str(error)) from error


class _Iperf3Report(msgspec.Struct):
    end: _End


def start(peer: Peer, stack: contextlib.ExitStack, *, nbytes_max: int) -> Contender:
    """Start a peer, to be ended with `stack`. Raises `ContenderFailed`."""
    if peer.name in OURS_OTHERWISE:
        return OurRanks(stack, transport="tcp", nbytes_max=nbytes_max, environment=peer.environment)
    if peer.name in OF_RDMA:
        return Perftest()
    return Iperf3(stack) if peer.name == "iperf3" else PeerRanks(stack, peer)


# How far a benchmark is, on a terminal; elsewhere it is silent until the result is there.


@contextlib.contextmanager
def progress(total: int) -> Generator[Callable[[str], None]]:
    """A bar of `total` turns on standard error; call what it gives before each turn, with its name."""
    screen = rich.console.Console(stderr=True)
    columns = (
        rich.progress.BarColumn(bar_width=30),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def tell(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield tell


TRANSPORTS: Final = ("shm", "tcp", "rdma")
STREAM_BYTES_MIN: Final = 1 << 20
"""A stream of bytes (iperf3) is compared with transfers of at least this size."""
TURN_S_MAX: Final = 1.0
TURN_PARTS: Final = 10
FRAME_BYTES_MAX: Final = 64 << 10
"""Larger payloads travel as regions, not as frames."""
FRAME_ITERATIONS: Final = 2000
MEMCPY: Final = ("memcpy", "memcpy-shared")
BETWEEN_MPI: Final = (*OURS_OTHERWISE, "openmpi", "openmpi-c", "mpich", "mpich-c", "gloo", *MEMCPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCase:
    """One thing that is timed. `peers`: those that do the same; `bytes_max`: no larger sizes."""

    name: str
    peers: tuple[str, ...]
    bytes_max: int = 1 << 62
    iterations_max: int = 1 << 62
    transports: tuple[str, ...] = TRANSPORTS


CASES: Final = {
    "p2p": (
        TransferCase(name="p2p-native", peers=OF_RDMA, transports=("rdma",)),
        TransferCase(name="p2p-arena", peers=(*BETWEEN_MPI, *OF_RDMA)),
        TransferCase(name="p2p-foreign", peers=BETWEEN_MPI, transports=("shm",)),
        TransferCase(name="echo", peers=BETWEEN_MPI),
        TransferCase(
            name="frame",
            peers=("xoscar", *OURS_OTHERWISE, *OF_RDMA),
            bytes_max=FRAME_BYTES_MAX,
            iterations_max=FRAME_ITERATIONS,
        ),
        TransferCase(
            name="frame-training", peers=(), bytes_max=FRAME_BYTES_MAX, iterations_max=FRAME_ITERATIONS
        ),
    ),
    "put": (
        TransferCase(name="put-arena", peers=(*BETWEEN_MPI, "sockets", "iperf3", *OF_RDMA)),
        TransferCase(name="put-foreign", peers=(*BETWEEN_MPI, "sockets", "iperf3")),
        TransferCase(name="put-asyncio", peers=OF_RDMA, transports=("rdma",)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The cases, sizes and contenders of a run."""

    cases: tuple[TransferCase, ...]
    sizes: tuple[int, ...]
    rounds: int
    iterations: int | None
    """An operation's count a turn; None: as the size allows."""
    transport: str
    peers: tuple[str, ...]

    def steps(self) -> list[tuple[TransferCase, int]]:
        """Each case at each size that it can have."""
        return [
            (case, size)
            for case in self.cases
            if self.transport in case.transports
            for size in self.sizes
            if size <= case.bytes_max
        ]

    def iterations_of(self, case: TransferCase, nbytes: int) -> int:
        """Return the operations of a turn."""
        return self.iterations or min(iterations_for(nbytes), case.iterations_max)

    def peers_of(self, case: TransferCase, nbytes: int) -> list[str]:
        """The peers that take part in a case at a size."""
        streams = nbytes >= STREAM_BYTES_MIN
        return [name for name in self.peers if name in case.peers and (streams or name != "iperf3")]

    @property
    def total(self) -> int:
        """Turns of everyone."""
        return self.rounds * sum(2 + len(self.peers_of(case, nbytes)) for case, nbytes in self.steps())


def check_plan(plan: TransferPlan) -> None:
    """Raise `UserError` if there is nothing to time, or a peer has no part in it."""
    steps = plan.steps()
    if not steps:
        raise UserError(
            f"these cases have no such size over {plan.transport}: frames have at most "
            f"{size_in_words(FRAME_BYTES_MAX)}, and p2p-foreign is one of shm."
        )
    for name in plan.peers:
        if name in OF_TCP and plan.transport != "tcp":
            raise UserError(f"{name} sends over TCP: compare it with --transport tcp.")
        if (name in OF_RDMA) != (plan.transport == "rdma"):
            raise UserError(f"{name} is no peer over {plan.transport}: perftest is RDMA's, and alone there.")
        if not any(name in plan.peers_of(case, nbytes) for case, nbytes in steps):
            raise UserError(f"{name} has no part in these cases at these sizes: {_parts_of(name)}.")


def _parts_of(name: str) -> str:
    parts = [f"{kind} {case.name}" for kind, cases in CASES.items() for case in cases if name in case.peers]
    least = f", from {size_in_words(STREAM_BYTES_MIN)}" if name == "iperf3" else ""
    return f"it can be compared in {', '.join(parts)}{least}"


Samples = dict[str, list[list[float]]]
"""Nanoseconds by contender and turn; we have two turns a round, a peer one."""
Tell = Callable[[str], None]


def run(plan: TransferPlan) -> tuple[list[Measurement], list[Contestant]]:
    """Run it; Raises `PeerMissing` before anything has run, `ContenderFailed`."""
    with contextlib.ExitStack() as stack:
        everyone, peers = _start_all(plan, stack)
        rows: list[Measurement] = []
        with progress(plan.total) as tell:
            for case, nbytes in plan.steps():
                rows += rows_of(case.name, nbytes, measure(plan, case, nbytes, everyone, tell))
    return rows, [peer.contestant for peer in peers]


def _start_all(plan: TransferPlan, stack: contextlib.ExitStack) -> tuple[dict[str, Contender], list[Peer]]:
    """Everyone, to be ended with `stack`. The files that they start from do not outlive their start."""
    nbytes_max = max(size for _, size in plan.steps())
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as scratch:
        site = Site(transport=plan.transport, scratch=Path(scratch))
        peers = [find_peer(name, site) for name in plan.peers]
        everyone: dict[str, Contender] = {
            OURS: OurRanks(stack, transport=plan.transport, nbytes_max=nbytes_max)
        }
        everyone.update((peer.name, start(peer, stack, nbytes_max=nbytes_max)) for peer in peers)
    return everyone, peers


def measure(
    plan: TransferPlan, case: TransferCase, nbytes: int, everyone: Mapping[str, Contender], tell: Tell
) -> Samples:
    """All turns of one case at one size."""
    peers = plan.peers_of(case, nbytes)
    samples: Samples = {name: [] for name in (OURS, *peers)}
    for order in turns(peers, plan.rounds):
        for name in order:
            tell(f"{case.name} {nbytes} {name}")
            samples[name].append(_turn(everyone[name], case, nbytes, plan.iterations_of(case, nbytes)))
    return samples


def _turn(contender: Contender, case: TransferCase, nbytes: int, iterations: int) -> list[float]:
    """All iterations, in parts; the parts that fit into `TURN_S_MAX`: spinning on a busy machine is slow."""
    part = min(iterations, max(ITERATIONS_LEAST, iterations // TURN_PARTS))
    end_s = time.monotonic() + TURN_S_MAX
    samples = contender.measure(case.name, nbytes, part)
    while len(samples) < iterations and time.monotonic() < end_s:
        samples += contender.measure(case.name, nbytes, part)
    return samples


def rows_of(case: str, nbytes: int, samples: Samples) -> list[Measurement]:
    """Our row first, with the noise floor, then a row for each peer with our ratio to it."""
    ours = [median(turn) for turn in samples[OURS]]
    firsts, seconds = ours[0::2], ours[1::2]
    means = [(first + second) / 2 for first, second in zip(firsts, seconds, strict=True)]
    rows = [_row(case, nbytes, OURS, samples[OURS], ratio_of_medians(seconds, firsts))]
    for name, turns_of in samples.items():
        if name != OURS:
            ratio = ratio_of_medians(means, [median(turn) for turn in turns_of])
            rows.append(_row(case, nbytes, name, turns_of, ratio))
    return rows


def _row(case: str, nbytes: int, who: str, turns_of: Sequence[Sequence[float]], ratio: Ratio) -> Measurement:
    """A contender's row: percentiles over all its turns."""
    pooled = [sample / 1e3 for turn in turns_of for sample in turn]
    p50_us = median(pooled)
    bandwidth = bandwidth_gbytes_per_s(nbytes, p50_us)
    return Measurement(
        case=case,
        who=who,
        size_bytes=nbytes,
        samples=len(pooled),
        time_us_p50=p50_us,
        time_us_p99=percentile(pooled, 0.99),
        algbw_gbytes_per_s=bandwidth,
        busbw_gbytes_per_s=bandwidth,
        time_ratio=ratio,
    )
