"""Everyone who takes part in a run, ready to be measured in turn: our two ranks, and the peers."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from zbmd.tools.bench.peer_catalogue import OF_RDMA, ONE_THREAD, OURS_OTHERWISE, Peer, iperf3_client
from zbmd.tools.bench.peers.control import window_of, windows
from zbmd.tools.bench.stats import OURS
from zbmd.tools.bench.transport.perftest import BANDWIDTH, LATENCY, MESSAGES, MIB_S, TYPICAL_US, perftest
from zbmd.tools.bench.workers import CONTROL, ContenderFailed, Workers
from zbmd.transport.errors import UserError

IPERF3_TIMEOUT_S: Final = 30.0
IPERF3_READY: Final = b"Server listening"
READY_LINES_MAX: Final = 20
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
        self._workers = stack.enter_context(
            Workers(peer.name, peer.commands, ranks=peer.ranks, environment=peer.environment)
        )

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
