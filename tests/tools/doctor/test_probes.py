"""Measurements of a host, their judgement, and `--preflight`, which starts nothing on an unfit host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from zbmd.actors.process.exit import REQUEUE_EXIT_CODE
from zbmd.tools.doctor.probes import CpuSpeed, Measured, decode_measured, judge, measure_host
from zbmd.tools.doctor.report import FindingState
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

FIT = Measured(
    cpus=tuple(CpuSpeed(cpu=cpu, flops_per_s=5e10, wrong=0) for cpu in range(4)),
    memory_per_s=1e10,
    disk_per_s=2e8,
    disk_error="",
    loopback_per_s=1e9,
    loopback_us=30.0,
    clock=True,
)


def cpu(number: int, *, flops_per_s: float = 5e10, wrong: int = 0) -> tuple[CpuSpeed, ...]:
    one = CpuSpeed(cpu=number, flops_per_s=flops_per_s, wrong=wrong)
    return tuple(one if each.cpu == number else each for each in FIT.cpus)


def test_a_fit_host_is_found_fit() -> None:
    assert all(finding.state is not FindingState.NOT_OK for finding in judge(FIT))
    (clock,) = [
        finding for finding in judge(msgspec.structs.replace(FIT, clock=False)) if finding.name == "clock"
    ]
    assert (clock.state, "chrony" in clock.advice) == (FindingState.NOTE, True)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"cpus": cpu(2, wrong=1)}, "processors", "cpu 2 computed wrong products"),
        ({"cpus": cpu(3, flops_per_s=2e10)}, "processors", "cpu 3 20.0 GFLOP/s, where the median has 50.0"),
        ({"memory_per_s": 5e8}, "memory", "500 MB/s copied; at least 1,000 MB/s are expected"),
        ({"disk_per_s": 1e6}, "disk", "1 MB/s written and synced"),
        ({"disk_error": "cannot write in /full: No space left on device"}, "disk", "No space left"),
        ({"loopback_per_s": 1e6}, "loopback", "at least 50 MB/s"),
        ({"loopback_us": 9e3}, "loopback", "a round trip 9000 us"),
    ],
)
def test_an_unfit_host_is_named_with_the_reason_and_what_to_do(
    change: dict[str, object], name: str, words: str
) -> None:
    changed = msgspec.structs.replace(FIT, **change)
    (bad,) = [finding for finding in judge(changed) if finding.state is FindingState.NOT_OK]
    assert bad.name == name and words in bad.detail and bad.advice


def test_this_host_is_measured_with_every_processor_and_exact_products(tmp_path: Path) -> None:
    found = measure_host(tmp_path)
    assert {one.cpu for one in found.cpus} == os.sched_getaffinity(0)
    assert not any(one.wrong for one in found.cpus) and not found.disk_error
    assert min(found.memory_per_s, found.disk_per_s, found.loopback_per_s, found.loopback_us) > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_a_result() -> None:
    assert "cannot write in /proc" in measure_host(Path("/proc")).disk_error


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"[" * 5000])
def test_what_is_no_measurement_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        decode_measured(data)


def test_preflight_starts_the_ranks_of_a_fit_host(launcher: Launcher) -> None:
    ended = launcher.run("run", "--preflight", "-n", "1", "-m", "this")
    told = [line for line in ended.errors if "preflight" in line]
    if ended.code == REQUEUE_EXIT_CODE:  # a machine that is as busy as the one of these tests may be unfit
        assert any("NOT OK" in line for line in told), ended
    else:
        assert ended.code == 0 and any("Namespaces" in line for line in ended.out), ended
    assert sum("all products exact" in line for line in told) == 1, ended


def test_preflight_starts_nothing_on_a_host_that_is_not_fit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    command = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "--preflight", "-n", "1", str(script)]
    done = subprocess.run(command, cwd="/proc", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (REQUEUE_EXIT_CODE, ""), done.stderr
    assert "NOT OK  disk" in done.stderr and "this host does not take part: " in done.stderr
