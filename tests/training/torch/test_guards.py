"""Guards of ranks under launchers of others. Real launchers, processes and kills; nothing may be left."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.guarded import GUARD, by_hand, guards_of, started, torchrun
from support.jobs.resilient_loops import check_as_undisturbed, steps_in
from support.jobs.resilient_loops import train as run_loop
from support.processes.launcher import TIMEOUT_S

from zbmd.transport.tcp.sockets import free_port

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.optional, pytest.mark.slow]

LOOP = PROGRAMS / "training/guarded_ddp.py"
WAITS = PROGRAMS / "torch/guarded.py"
RANKS = 3


@cache
def _undisturbed() -> dict[str, frozenset[str]]:
    return {}


async def undisturbed() -> frozenset[str]:
    """Lines that ranks of `zbmd-node run` print of a loop in which nobody is killed."""
    if not _undisturbed():
        _, lines = await run_loop(PROGRAMS / "training/resilient_ddp.py", "plain", ranks=RANKS)
        _undisturbed()["plain"] = frozenset(steps_in(lines))
    return frozenset(line for line in _undisturbed()["plain"] if "evaluated" not in line)


def check_survived(text: str, wanted: frozenset[str], fault: str) -> None:
    """The bits are those of an undisturbed run, and survivors are the processes that they were."""
    check_as_undisturbed(
        [line for line in steps_in(text.splitlines()) if "evaluated" not in line], wanted, fault
    )
    killed = {int(entry[4]) for entry in fault.split(",")}
    for rank in range(RANKS):
        begun = re.findall(rf"begun: rank {rank} is process (\d+)", text)
        ended = re.findall(rf"ended: rank {rank} is process (\d+)", text)
        assert len(begun) == 1 + (rank in killed) and ended == begun[-1:], text


@pytest.mark.parametrize(
    "fault", ["rank0:loop.prepared:5", "rank2:loop.voted:4", "rank0:loop.begin:5,rank2:loop.meet:1"]
)
async def test_a_killed_rank_is_replaced_and_torchrun_notices_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed()
    with torchrun(tmp_path, RANKS, LOOP, ZBMD_FAULT=fault) as running:
        code = running.end()
    assert code == 0 and "closing signal" not in running.text, running.text
    check_survived(running.text, wanted, fault)


async def test_a_rank_and_its_replacement_write_through_their_own_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the files that torchrun makes for each rank have its lines, and no others."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    options, fault = ("--redirects", "3", "--log-dir", str(tmp_path / "logs")), "rank1:loop.begin:5"
    with torchrun(tmp_path, RANKS, LOOP, options=options, ZBMD_FAULT=fault) as running:
        assert running.end() == 0, running.text
    for rank in range(RANKS):
        (out,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        text, told = out.read_text(), out.with_name("stderr.log").read_text()
        begun = re.findall(r"begun: rank (\d) is process (\d+)", text)
        assert [which for which, _ in begun] == [str(rank)] * (1 + (rank == 1)), text
        assert set(re.findall(r"step \d+ rank (\d)", text)) == {str(rank)}, text
        assert re.findall(r"told on standard error by rank (\d)", told) == [str(rank)] * len(begun), told


def test_no_line_of_another_guards_rank_is_in_the_midst_of_one(tmp_path: Path) -> None:
    """All guards of torchrun have one pipe; Python has no buffer there, so a line ends by a second write."""
    variables = {"PYTHONPATH": str(PROGRAMS.parent), "FOLDER": str(tmp_path)}
    with torchrun(tmp_path, 2, PROGRAMS / "launched/split_line.py", **variables) as running:
        running.until_shown("[rank0]: begun")
        (tmp_path / "begun").touch()
        assert running.end() == 0, running.text
    assert "[rank0]: begun and ended\n" in running.text
    assert all(f"\n[rank1]: line {number}\n" in running.text for number in range(100))


def test_torchrun_reports_the_exit_code_of_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "again").touch()
    options = ("--max-restarts", "0")
    with torchrun(
        tmp_path, RANKS, "--max-restarts", "0", WAITS, tmp_path / "again", "7", options=options
    ) as one:
        assert one.end() == 1
    cause = one.text[one.text.index("Root Cause") :]
    assert re.search(r"rank\s+: 1 \(local_rank: 1\)\n\s+exitcode\s+: 7 ", cause), one.text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_guard_that_is_killed_leaves_nothing_and_torchrun_starts_again(tmp_path: Path, victim: int) -> None:
    with torchrun(tmp_path, RANKS, WAITS, tmp_path / "again", options=("--max-restarts", "1")) as running:
        ranks = running.until(r"rank \d of 3 waits: (\d+)", RANKS)
        pidfds = [os.pidfd_open(int(found[1])) for found in ranks]
        (tmp_path / "again").touch()
        os.kill(guards_of(running.pid)[victim], signal.SIGKILL)
        running.until(r"rank \d of 3 is good", RANKS)
        gone = [bool(select.select([pidfd], [], [], TIMEOUT_S)[0]) for pidfd in pidfds]
        for pidfd in pidfds:
            os.close(pidfd)
        assert running.end() == 0 and all(gone), running.text


def test_signals_go_to_the_rank_or_end_the_run(tmp_path: Path) -> None:
    """SIGTERM to torchrun reaches each guard: the ranks are ended in order, not killed at once."""
    with torchrun(tmp_path, RANKS, WAITS, tmp_path / "never") as running:
        running.until(r"rank \d of 3 waits", RANKS)
        guards = guards_of(running.pid)
        for local_rank in (2, 0):
            os.kill(guards[local_rank], signal.SIGUSR1)
            running.until(f"rank {local_rank} has SIGUSR1")
        os.kill(running.pid, signal.SIGTERM)
        assert running.end() != 0
    assert running.text.count("has SIGUSR1") == 2 and "Signal 9" not in running.text, running.text
    assert running.text.count("SIGTERM received: ranks have 30s to end") == 1, running.text


def slurm(ranks: int) -> list[dict[str, str]]:
    """The environments of the tasks of a step on one node."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_RESV_PORTS": str(free_port()),
        "SLURM_NODEID": "0",
    }
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]


def hydra(ranks: int) -> list[dict[str, str]]:
    """The environments of processes of MPICH's mpirun."""
    size = {"PMI_SIZE": str(ranks), "MPI_LOCALNRANKS": str(ranks), "HYDRA_JOBID": str(os.getpid())}
    return [{**size, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(ranks)]


def variables_of_env(ranks: int) -> list[dict[str, str]]:
    """Those that any launcher for PyTorch sets."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    port = str(free_port())
    return [
        {**shared, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


@pytest.mark.parametrize("launcher", [slurm, hydra, variables_of_env])
async def test_a_killed_rank_is_replaced_under_other_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Callable[[int], list[dict[str, str]]]
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, fault = await undisturbed(), "rank1:loop.prepared:4"
    with by_hand(tmp_path, launcher(RANKS), LOOP, ZBMD_FAULT=fault) as guards:
        codes = [guard.end() for guard in guards]
    text = "\n".join(guard.text for guard in guards)
    assert codes == [0] * RANKS, text
    check_survived(text, wanted, fault)
    if launcher is slurm:  # each rank has the variables of its own guard
        assert set(re.findall(r"rank (\d) is process \d+, task (\d)", text)) == {(r, r) for r in "012"}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: apt-get install openmpi-bin")
async def test_a_killed_rank_is_replaced_under_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, fault = await undisturbed(), "rank0:loop.begin:3"
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS))
    with started((*mpirun, sys.executable, *GUARD, LOOP), tmp_path, {"ZBMD_FAULT": fault}) as running:
        assert running.end() == 0, running.text
    check_survived(running.text, wanted, fault)


def ended(command: tuple[str | Path, ...], directory: Path, **variables: str) -> tuple[int, str]:
    with started(command, directory, variables) as running:
        return running.end(), running.text


def test_what_a_guard_cannot_do_is_said(tmp_path: Path) -> None:
    guard = (sys.executable, *GUARD)
    code, text = ended((*guard, WAITS), tmp_path)
    assert code == 2 and "started by torchrun, srun or mpirun once for each rank" in text, text
    (first, *_) = slurm(1)
    code, text = ended((*guard, tmp_path / "none.py"), tmp_path, **first)
    assert code == 2 and "there is no script" in text, text
    (_, second) = slurm(2)
    code, text = ended((*guard, "--join-timeout", "100ms", WAITS), tmp_path, **second)
    assert code == 1 and "local rank 0 of this host has none" in text, text
