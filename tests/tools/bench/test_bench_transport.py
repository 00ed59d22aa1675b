"""The table of the transport's figures, from results as the benchmarks print them; and links that idle."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from zbmd.tools.bench.result import BenchResult, Machine, Measurement
from zbmd.tools.bench.run import MEMCPY
from zbmd.tools.bench.stats import OURS, Ratio
from zbmd.tools.bench.transport.detect import FLOORS, NOTICES
from zbmd.tools.lab.bench.transport import idle as bench_idle
from zbmd.tools.lab.bench.transport.__main__ import LARGE, TCP_BYTES, VICTIMS, table_of
from zbmd.tools.lab.bench.transport.idle import Idle

MACHINE = Machine(cpu="a processor", cores=2, kernel="6.18", python="3.11", load_average=0.1)
TIMEOUT_S = 180


def row(case: str, who: str, nbytes: int, time_us: float, ratio: float) -> Measurement:
    return Measurement(
        case=case,
        who=who,
        size_bytes=nbytes,
        samples=1,
        time_us_p50=time_us,
        time_us_p99=2 * time_us,
        algbw_gbytes_per_s=nbytes / time_us / 1e3,
        time_ratio=Ratio(value=ratio, low=ratio, high=ratio),
    )


def encoded(benchmark: str, rows: list[Measurement]) -> bytes:
    result = BenchResult(
        benchmark=benchmark,
        command=f"zbmd bench {benchmark}",
        date="2026-11-21T00:00:00+00:00",
        machine=MACHINE,
        transport="shm",
        rounds=3,
        rows=rows,
    )
    return msgspec.json.encode(result)


def table(*, p2p_ratio: float, frame_us: float, notice_us: float, idle_bytes: int) -> list[str]:
    """The verdicts, in the order of the table, where everything else is as given."""
    rows = [row("p2p-arena", who, 8, 0.5, p2p_ratio) for who in (OURS, "openmpi", "openmpi-c")]
    for nbytes in LARGE:
        rows += [row("p2p-arena", who, nbytes, nbytes / 1e4, p2p_ratio) for who in (OURS, *MEMCPY)]
        rows += [row("p2p-foreign", who, nbytes, nbytes / 1e4, p2p_ratio) for who in (OURS, "openmpi")]
    rows += [row(case, OURS, 8, frame_us, 1) for case in ("frame", "frame-training")]
    notices = [
        row("detect-training", who, nbytes, notice_us, 1) for nbytes in VICTIMS for who in (*NOTICES, *FLOORS)
    ]
    puts = [
        row("put-arena", who, TCP_BYTES, (1 if who == "iperf3" else p2p_ratio) * TCP_BYTES / 1e3, p2p_ratio)
        for who in (OURS, "zbmd-none", "zbmd-tls", "iperf3")
    ]
    idle = Idle(links=10, frames=20, private_bytes=0, shared_bytes=idle_bytes)
    text = table_of(
        {
            "p2p": encoded("p2p", rows),
            "tcp": encoded("put", puts),
            "detect": encoded("detect", notices),
            "idle": msgspec.json.encode(idle),
        }
    )
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [line.rsplit("|", 2)[1].strip() for line in lines]


def test_what_meets_its_goal_is_said_to() -> None:
    verdicts = table(p2p_ratio=0.9, frame_us=11, notice_us=400, idle_bytes=256 << 10)
    assert verdicts.count("–") == 2, "frames inside a training step, and TLS, have no goal"
    assert set(verdicts) == {"met", "–"}


def test_what_misses_its_goal_is_said_to() -> None:
    verdicts = table(p2p_ratio=1.2, frame_us=16, notice_us=1400, idle_bytes=300 << 10)
    assert set(verdicts) == {"**missed**", "–"}
    assert len(verdicts) == 1 + 2 * len(LARGE) + 2 + 3 + len(VICTIMS) + 1


def test_links_are_weighed_idle_and_then_used() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zbmd.tools.lab.bench.transport.idle", "--links", "20", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["links"] == 20
    assert found["frames"] == 40
    assert found["total_bytes"] == found["private_bytes"] + found["shared_bytes"]


@pytest.mark.parametrize("links", ["0", "-1", "1000000"])
def test_a_number_of_links_out_of_range_is_told(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_idle.main(["--links", links]) == 2
    assert "out of range" in capsys.readouterr().err
