"""The backend `zbmd` under other launchers and over any store. Real processes and kills; none may be left.

That no process and no shared memory is left is checked by `conftest.py` after each test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from zbmd.transport.tcp.sockets import free_port

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.optional, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
PROGRAMS = TESTS / "programs" / "torch"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "3")
LIMIT_S = 300


def start(
    *arguments: str | Path, by: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Python. by: a command before its own; variables: more of its environment."""
    # Without a buffer a line and its end are two writes, and another rank's may come between.
    own = {"PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*by, sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **own, **(variables or {})},
    )


def ended(*processes: subprocess.Popen[str], codes: tuple[int, ...] | None = None) -> list[str]:
    """Wait for the processes; return the lines that they wrote. codes: those that they end with, else 0."""
    lines: list[str] = []
    errors: list[str] = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=LIMIT_S)
            lines += output.splitlines()
            errors.append(error)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = tuple(process.returncode for process in processes)
    assert found == (codes or (0,) * len(processes)), "\n".join(errors)
    return sorted(lines)


GOOD = [f"rank {rank} of 3 is good" for rank in range(3)]


@pytest.mark.parametrize(
    "rendezvous",
    [("--master-port",), ("--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint")],
    ids=["static", "c10d"],
)
def test_torchrun_restarts_its_workers_after_a_kill(rendezvous: tuple[str, ...]) -> None:
    port = str(free_port())
    address = port if rendezvous[0] == "--master-port" else f"127.0.0.1:{port}"
    restarts = ("--max-restarts", "1", "--monitor-interval", "0.1")
    lines = ended(start(*TORCHRUN, *restarts, *rendezvous, address, PROGRAMS / "restarted.py"))
    assert [line for line in lines if "good" in line] == [f"{line} in attempt 1" for line in GOOD]
    saw = [line for line in lines if "saw" in line]
    # torchrun ends the others once it has seen the death, which they may see later than it.
    assert all("rank1 lost" in line for line in saw), lines


@pytest.mark.parametrize(("how", "scheme"), [("spawn", "tcp"), ("fork", "file"), ("os.fork", "tcp")])
def test_processes_that_one_makes_are_ranks(how: str, scheme: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert ended(start(PROGRAMS / "spawned.py", how, method)) == GOOD


def test_processes_with_the_variables_of_env_are_ranks() -> None:
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        start(PROGRAMS / "launched.py", variables={**variables, "RANK": str(rank)}) for rank in range(3)
    ]
    assert ended(*programs) == GOOD


def test_tasks_of_srun_are_ranks() -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_STEP_RESV_PORTS": str(free_port()),
        "SLURM_NODEID": "0",
    }
    tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
    assert ended(*(start(PROGRAMS / "launched.py", variables=task) for task in tasks)) == GOOD


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun: apt-get install openmpi-bin")
def test_processes_of_mpirun_are_ranks() -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3")
    assert ended(start(PROGRAMS / "launched.py", by=mpirun)) == GOOD


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a namespace")
def test_hosts_that_do_not_reach_each_other_are_told_so(tmp_path: Path) -> None:
    """They meet in a file that both have; the supervisor of the second one has no way to the first one's."""
    ranks = [
        start(
            PROGRAMS / "launched.py",
            f"file://{tmp_path / 'store'}?rank={rank}&world_size=2",
            by=("unshare", "--net") if rank else (),
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 1 and "UserError: rank 1: no member of a cluster has let this" in errors, (
            errors
        )
        assert "it cannot be reached" in errors and "MASTER_ADDR" in errors


def test_groups_come_and_go_over_stores_of_the_user(tmp_path: Path) -> None:
    port, path = str(free_port()), tmp_path / "store"
    lines = ended(*(start(PROGRAMS / "again.py", str(rank), port, path) for rank in range(3)))
    assert lines == [f"rank {rank} is good" for rank in range(3)]


def test_a_death_is_a_typed_error_and_the_others_meet_again(tmp_path: Path) -> None:
    ranks = [start(PROGRAMS / "lost.py", str(rank), tmp_path / "store") for rank in range(3)]
    assert ended(*ranks, codes=(-9, 0, 0)) == ["rank 1 is good", "rank 2 is good"]
