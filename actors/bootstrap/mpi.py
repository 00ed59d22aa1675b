"""Sans-I/O: the environment of MPI's launchers: Open MPI's mpirun, and Hydra (MPICH, Intel MPI).

mpirun starts one process a rank: of those on one host the first is the node and hosts as many ranks, or it is
started once a host (`--map-by ppr:1:node`, `-ppn 1`) and `--nproc-per-node` says how many. The node that has
rank 0 founds the cluster. MPI does not say where that is; see `merge` for who does.

Sources: the manual of Open MPI's mpirun ("MPI environment variables"), and the wire protocol of PMI-1. That a
process was started by PMIx says nothing of its host, so PMIX_RANK alone is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from zbmd.actors.bootstrap.readings import (
    NODES_MAX,
    PROCESSES_MAX,
    LauncherFacts,
    NodeRange,
    ProcessPlacement,
    Stated,
    number,
    stated_text,
)
from zbmd.transport.errors import UserError

RANKS_MAX = NODES_MAX * PROCESSES_MAX

OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_mpi(environment: Mapping[str, str]) -> LauncherFacts | None:
    """What mpirun says; None if it has not started us. Raises `UserError`."""
    if OPEN_MPI[0] in environment:
        job = stated_text(environment, "PMIX_NAMESPACE") or stated_text(
            environment, "OMPI_MCA_ess_base_jobid"
        )
        hosts_max = number(environment, "OMPI_MCA_orte_num_nodes", least=1, most=NODES_MAX)
        return _read(environment, "Open MPI", OPEN_MPI, job, hosts_max or NODES_MAX)
    # srun --mpi=pmi2 sets PMI_RANK too, but Slurm itself says more.
    if HYDRA[0] in environment and HYDRA[2] in environment:
        return _read(environment, "MPI", HYDRA, None, NODES_MAX)
    return None


def _read(
    environment: Mapping[str, str],
    launcher: str,
    names: tuple[str, str, str, str],
    job: Stated[str] | None,
    hosts_max: int,
) -> LauncherFacts:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank = _needed(environment, rank_name, RANKS_MAX - 1)
    size = _needed(environment, size_name, RANKS_MAX, least=1)
    place = ProcessPlacement(
        index=_needed(environment, local_rank_name, PROCESSES_MAX - 1),
        count=_needed(environment, local_size_name, PROCESSES_MAX, least=1),
    )
    if not (rank < size and place.index < place.count <= size):
        raise UserError(
            f"{rank_name}={rank} of {size_name}={size} and {local_rank_name}={place.index} of "
            f"{local_size_name}={place.count} do not fit together. Was one of them set by hand?"
        )
    hosts, rest = divmod(size, place.count)
    if rest or hosts > hosts_max:
        raise UserError(
            f"of the {size} ranks ({size_name}) {place.count} are on this host ({local_size_name}), so "
            "others have another number. Give each host the same, or one process: "
            "mpirun --map-by ppr:1:node zbmd-node run …"
        )
    return LauncherFacts(
        launcher=launcher,
        nodes=Stated(
            value=NodeRange(least=hosts, most=hosts),
            source=f"{size_name}={size} / {local_size_name}={place.count}",
        ),
        # How ranks are laid out over hosts is not said, so with several a host only the first is known.
        node=Stated(value=rank, source=rank_name) if place.count == 1 or rank == 0 else None,
        founds=Stated(value=rank == 0, source=rank_name),
        processes=None if place.count == 1 else Stated(value=place.count, source=local_size_name),
        place=Stated(value=place, source=local_rank_name),
        job=None if job is None else Stated(value=f"mpi-{job.value}", source=job.source),
    )


def _needed(environment: Mapping[str, str], name: str, most: int, *, least: int = 0) -> int:
    value = number(environment, name, least=least, most=most)
    if value is None:
        raise UserError(f"{name} is not set, but other variables of mpirun are. Was it removed by hand?")
    return value
