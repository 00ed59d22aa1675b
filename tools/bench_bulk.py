"""TCP puts on loopback with each protection, beside iperf3 in the same run.

    python -m zbmd.tools.bench_bulk [--size 16M] [--rounds N] [--lanes N] [--json]

In each round iperf3 and two ranks of ours for each protection take their turns, so that all meet the same
machine. A sample is the time of one put out of a window of 64 MiB that ends with an answer; iperf3's is the
time of as many bytes of its stream. `iperf3 -l 1M` sends the same 1 MiB from a cache again and again and
throws it away; a put moves as many bytes from one memory to another. `sockets` is the floor of that: blocking
sockets with buffers of a put's size, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from zbmd.tools.bench_certificate import make_certificate
from zbmd.tools.bench_contenders import Contender, Iperf3
from zbmd.tools.bench_result import Machine, now_utc, this_machine
from zbmd.tools.bench_stats import (
    Ratio,
    bandwidth_gbytes_per_s,
    median,
    parse_size,
    percentile,
    ratio_of_medians,
    size_in_words,
)
from zbmd.tools.bench_workers import CONTROL, Workers
from zbmd.transport.session import Protection
from zbmd.transport.tcp_settings import PROTECTION_VARIABLE
from zbmd.transport.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE

SIZE_DEFAULT: Final = "16M"
ROUNDS_DEFAULT: Final = 9
TURN_BYTES: Final = 1 << 30
"""What one turn of ours moves."""
IPERF3: Final = "iperf3 -l 1M"
SOCKETS: Final = "sockets"
GOAL: Final = 0.9


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One contender. ratio: its bandwidth over iperf3's, with its interval."""

    who: str
    time_us_p50: float
    time_us_p99: float
    algbw_gbytes_per_s: float
    ratio: Ratio | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    date: str
    machine: Machine
    size_bytes: int
    rounds: int
    lines: list[Line]


class Ranks:
    """Two processes that listen and dial on a port of loopback."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = [sys.executable, "-m", module, "--control", CONTROL, "--port", port, *arguments]
        commands = [[*common, "--rank", rank] for rank in ("0", "1")]
        self._workers = stack.enter_context(Workers(name, commands, ranks=2, environment=environment))

    def measure(self, case: str, nbytes: int, iterations: int) -> list[float]:
        """See `Contender`."""
        return self._workers.ask(case, nbytes, iterations)[0]


def ours(
    stack: contextlib.ExitStack, protection: Protection, nbytes: int, lanes: int | None, certificates: Path
) -> Ranks:
    """Two ranks of ours with one protection."""
    environment = {
        PROTECTION_VARIABLE: protection.value,
        CERT_VARIABLE: str(certificates / "cert.pem"),
        KEY_VARIABLE: str(certificates / "key.pem"),
        CA_VARIABLE: str(certificates / "cert.pem"),
        "OPENBLAS_NUM_THREADS": "1",
    }
    arguments = ["--bytes-max", str(nbytes), *([] if lanes is None else ["--lanes", str(lanes)])]
    name = f"zbmd, {protection.value}"
    return Ranks(stack, name, "zbmd.tools.bench_bulk_rank", arguments, environment)


def run(nbytes: int, rounds: int, lanes: int | None) -> Result:
    """All contenders in turn, `rounds` times. Raises `ContenderFailed`, `OSError` without iperf3."""
    samples: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        certificates = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-bench-tls-")))
        make_certificate(certificates)
        contenders: dict[str, Contender] = {
            IPERF3: Iperf3(stack),
            SOCKETS: Ranks(stack, SOCKETS, "zbmd.tools.peers.socket_pair"),
        }
        for protection in (Protection.NONE, Protection.MAC, Protection.TLS):
            ranks = ours(stack, protection, nbytes, lanes, certificates)
            contenders[f"zbmd, {protection.value}"] = ranks
        iterations = max(8, TURN_BYTES // nbytes)
        for _ in range(rounds):
            for who, contender in contenders.items():
                took = contender.measure("put-arena", nbytes, iterations)
                samples.setdefault(who, []).append(median(took))
    theirs = samples[IPERF3]
    lines = [_line(who, nbytes, ours, theirs) for who, ours in samples.items()]
    return Result(date=now_utc(), machine=this_machine(), size_bytes=nbytes, rounds=rounds, lines=lines)


def _line(who: str, nbytes: int, ours_ns: list[float], theirs_ns: list[float]) -> Line:
    times_us = [ns / 1e3 for ns in ours_ns]
    return Line(
        who=who,
        time_us_p50=median(times_us),
        time_us_p99=percentile(times_us, 0.99),
        algbw_gbytes_per_s=bandwidth_gbytes_per_s(nbytes, median(times_us)),
        # Of bandwidths: their time over ours.
        ratio=None if who == IPERF3 else ratio_of_medians(theirs_ns, ours_ns),
    )


def table(result: Result) -> str:
    """The result as a person reads it."""
    machine = result.machine
    lines = [
        f"# puts of {size_in_words(result.size_bytes)} over TCP on loopback, {result.rounds} rounds; "
        f"{machine.cpu}, {machine.cores} cores, load {machine.load_average:.1f}",
        f"{'':16}{'time p50 us':>14}{'p99':>12}{'GB/s':>9}{'of iperf3':>11}  95 %",
    ]
    for line in result.lines:
        ratio = line.ratio
        told = "" if ratio is None else f"{ratio.value:>11.2f}  {ratio.low:.2f}..{ratio.high:.2f}"
        lines.append(
            f"{line.who:16}{line.time_us_p50:>14,.0f}{line.time_us_p99:>12,.0f}"
            f"{line.algbw_gbytes_per_s:>9.2f}{told}"
        )
    lines.append(f"goal: {GOAL} of iperf3")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default=SIZE_DEFAULT)
    parser.add_argument("--rounds", type=int, default=ROUNDS_DEFAULT)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = run(parse_size(arguments.size), arguments.rounds, arguments.lanes)
    print(msgspec.json.encode(result).decode() if arguments.json else table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
