"""What PyTorch's `env://` needs, from the environments of mpirun and srun."""

from __future__ import annotations

import pytest

from zbmd.actors.bootstrap.rank_variables import rank_variables
from zbmd.transport.errors import UserError

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_RESV_PORTS": "7000-7001",
}


def open_mpi(rank: int, size: int, local: int, of: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(of),
        "PMIX_NAMESPACE": "prterun-1",
    }


def test_a_task_of_slurm() -> None:
    assert rank_variables(SLURM) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n08",
        "MASTER_PORT": "7000",
    }
    one = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n08", "SLURM_NODEID": "0"}
    assert rank_variables({**one, "SLURM_STEP_TASKS_PER_NODE": "4"})["MASTER_ADDR"] == "127.0.0.1"


def test_a_script_of_sbatch_is_no_rank() -> None:
    assert rank_variables({n: v for n, v in SLURM.items() if n != "SLURM_STEP_NUM_TASKS"}) == {}


def test_a_process_of_mpirun() -> None:
    found = rank_variables(open_mpi(1, 3, 1, 3))
    port = int(found.pop("MASTER_PORT"))
    assert 20_000 <= port < 30_000
    rank = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert found == {**rank, "MASTER_ADDR": "127.0.0.1"}
    assert "MASTER_ADDR" not in rank_variables(open_mpi(1, 4, 1, 2))
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert rank_variables(hydra)["WORLD_SIZE"] == "2"


def test_without_a_launcher_there_is_nothing() -> None:
    assert rank_variables({"HOME": "/root"}) == {}


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_RANK=5 and OMPI_COMM_WORLD_SIZE=2 do not fit"):
        rank_variables(open_mpi(5, 2, 0, 2))
