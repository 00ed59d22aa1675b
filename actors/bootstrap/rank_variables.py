"""RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a process that mpirun or srun has started (sans-I/O).

PyTorch's `env://` reads these, and torchrun sets them; of other launchers they are derived here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zbmd.actors.bootstrap.environments import (
    HYDRA,
    OPEN_MPI,
    PROCESSES_MAX,
    RANKS_MAX,
    number,
    read_slurm,
    stated_text,
)
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError

SLURM_STEP: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
"""Of a task that srun has started; a script of sbatch has not the second one."""
LOCAL: Final = "127.0.0.1"
MPI_JOBS: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_JOBID")


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env://` that follow from the launcher's; none without a launcher.

    MASTER_ADDR is missing where mpirun has started ranks on several hosts, of which it does not name the
    first. Raises `UserError` on variables that contradict each other.
    """
    if all(name in environment for name in SLURM_STEP):
        return _of_slurm(environment)
    for names in (OPEN_MPI, HYDRA):
        if all(name in environment for name in names):
            return _of_mpi(environment, names)
    return {}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    rank, size = _rank(environment, *SLURM_STEP)
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    facts = read_slurm(environment)
    if facts is None:
        return variables
    if facts.place is not None:
        variables["LOCAL_RANK"] = str(facts.place.value.index)
        variables["LOCAL_WORLD_SIZE"] = str(facts.place.value.count)
    if facts.join_addresses is not None:
        first = facts.join_addresses.value[0]
        alone = facts.nodes is not None and facts.nodes.value.most == 1
        variables |= {"MASTER_ADDR": LOCAL if alone else first.host, "MASTER_PORT": str(first.port)}
    return variables


def _of_mpi(environment: Mapping[str, str], names: tuple[str, str, str, str]) -> dict[str, str]:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size = _rank(environment, rank_name, size_name)
    local_rank = number(environment, local_rank_name, most=PROCESSES_MAX - 1)
    local_size = number(environment, local_size_name, least=1, most=PROCESSES_MAX)
    job = next((found.value for name in MPI_JOBS if (found := stated_text(environment, name))), "")
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_PORT": str(port_of_job(f"mpi-{job}")),
    }
    if local_size == size:
        variables["MASTER_ADDR"] = LOCAL
    return variables


def _rank(environment: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank = number(environment, rank_name, most=RANKS_MAX - 1)
    size = number(environment, size_name, least=1, most=RANKS_MAX)
    if rank is None or size is None or rank >= size:
        raise UserError(
            f"{rank_name}={environment[rank_name]} and {size_name}={environment[size_name]} do not fit "
            "together. Was one of them set by hand?"
        )
    return rank, size
