"""Sans-I/O: what the environment of each launcher says: MPI, torchrun, Slurm, Kubernetes.

One function a launcher returns its `LauncherFacts`, or None if the launcher has not started this process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from zbmd.actors.bootstrap.hostlist import format_hostlist, parse_hostlist
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import PORT_MAX, TcpAddress, parse_address

# --- the facts that one source states, and the numbers and addresses in them ----------------------------


NODES_MAX = 1 << 16
PROCESSES_MAX = 1 << 12
DIGITS_MAX = 18
TEXT_CHARACTERS_MAX = 256
"""Of a name, a job's or a node's, that is shown and handed on."""

STATIC_PORT = 29_500
"""torchrun's `--master-port`."""
ENDPOINT_PORT = 29_400
"""torchrun's `--rdzv-endpoint` without a port."""

T = TypeVar("T")

_HOST = re.compile(r"[A-Za-z0-9._:%\-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated(Generic[T]):
    """One fact, and the flag or variable that states it."""

    value: T
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """The number of nodes that the job may have."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """This process among those that a launcher has started on this host: `index` of `count`."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFacts:
    """The facts that one source states. None: it does not state it.

    nodes: how many; node: this one's number; founds: whether it is the one to found the cluster, which else
    follows from its number, 0; processes: ranks on this node; processes_hint: the same where nobody says it;
    place: see `ProcessPlacement`; join_addresses: where to ask to be let in, the founder's first;
    every_node_is_joinable: all nodes listen at the join addresses' port; port: that port, where it is not the
    join addresses' own; holder_founds: whoever has the first join address founds, whatever its number; job:
    tells jobs apart; name: what people call this node; local: the address of this node; store: see `store`;
    notes: what else its reader should know.
    """

    launcher: str
    nodes: Stated[NodeRange] | None = None
    node: Stated[int] | None = None
    founds: Stated[bool] | None = None
    processes: Stated[int] | None = None
    processes_hint: Stated[int] | None = None
    place: Stated[ProcessPlacement] | None = None
    join_addresses: Stated[tuple[TcpAddress, ...]] | None = None
    every_node_is_joinable: bool = False
    port: Stated[int] | None = None
    holder_founds: bool = False
    job: Stated[str] | None = None
    name: Stated[str] | None = None
    local: Stated[str] | None = None
    store: Stated[str] | None = None
    notes: tuple[str, ...] = ()


def number(environment: Mapping[str, str], name: str, *, least: int = 0, most: int) -> int | None:
    """The number that a variable holds; None if it is not set. Raises `UserError` on anything else."""
    text = environment.get(name)
    if text is None or text == "":
        return None
    return as_number(text, name, least=least, most=most)


def as_number(text: str, source: str, *, least: int = 0, most: int) -> int:
    """A number in decimal digits. Raises `UserError`, which names the source."""
    if not (text.isascii() and text.isdecimal()) or len(text) > DIGITS_MAX or not least <= int(text) <= most:
        raise UserError(f"{source} is {text[:64]!r}, which is no number from {least} to {most}.")
    return int(text)


def stated_number(
    environment: Mapping[str, str], name: str, *, least: int = 0, most: int
) -> Stated[int] | None:
    """`number` with its source."""
    value = number(environment, name, least=least, most=most)
    return None if value is None else Stated(value=value, source=name)


def stated_text(environment: Mapping[str, str], name: str) -> Stated[str] | None:
    """A name that is printable and not too long; None if it is not set. Raises `UserError`."""
    text = environment.get(name, "")
    if not text:
        return None
    if len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
        raise UserError(
            f"{name} is {text[:64]!r}: it must be printable, and of at most {TEXT_CHARACTERS_MAX} characters."
        )
    return Stated(value=text, source=name)


def parse_node_range(text: str, source: str) -> NodeRange:
    """`4` or `2:4`. Raises `UserError`."""
    if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text, re.ASCII) is None:
        raise UserError(f"{source} is {text[:64]!r}. Give a number of nodes, or a range such as 2:4.")
    first, _, last = text.partition(":")
    least = as_number(first, source, least=1, most=NODES_MAX)
    most = as_number(last or first, source, least=1, most=NODES_MAX)
    if least > most:
        raise UserError(f"{source} is {text}: at least {least} nodes and at most {most}. Swap the two.")
    return NodeRange(least=least, most=most)


def parse_join_address(text: str, source: str, *, port: int | None = None) -> TcpAddress:
    """An address to ask at: `host:port`, or a host alone where there is a default `port`.

    An IPv6 address may stand without brackets where it has no port. Raises `UserError`.
    """
    given, text = text, text.strip()
    if port is not None:
        if text.count(":") > 1 and "[" not in text:
            text = f"[{text}]"
        if ":" not in text or text.endswith("]"):
            text = f"{text}:{port}"
    try:
        join_address = parse_address(text)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if _HOST.fullmatch(join_address.host) is None:
        raise UserError(
            f"{source} is {given[:64]!r}, which is no address to ask at. Give the first host's name and its "
            "port, such as node1:29400."
        )
    return join_address


RANKS_MAX = NODES_MAX * PROCESSES_MAX


# --- MPI: Open MPI's mpirun, and Hydra (MPICH, Intel MPI) -----------------------------------------------
#
# mpirun starts one process a rank: of those on one host the first is the node and hosts as many ranks, or
# it is started once a host (`--map-by ppr:1:node`, `-ppn 1`) and `--nproc-per-node` says how many. The node
# that has rank 0 founds the cluster. MPI does not say where that is; see `merge` for who does.
#
# Sources: the manual of Open MPI's mpirun ("MPI environment variables"), and the wire protocol of PMI-1.
# That a process was started by PMIx says nothing of its host, so PMIX_RANK alone is not read.


OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_mpi(environment: Mapping[str, str]) -> LauncherFacts | None:
    """Return what mpirun says; None if it has not started this process. Raises `UserError`."""
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
        processes=_several(place.count, local_size_name),
        place=Stated(value=place, source=local_rank_name),
        job=None if job is None else Stated(value=f"mpi-{job.value}", source=job.source),
    )


def _several(count: int, source: str) -> Stated[int] | None:
    """Return how many ranks the node hosts; None if the launcher started it once, so that others decide."""
    return None if count == 1 else Stated(value=count, source=source)


def _needed(environment: Mapping[str, str], name: str, most: int, *, least: int = 0) -> int:
    value = number(environment, name, least=least, most=most)
    if value is None:
        raise UserError(f"{name} is not set, but the launcher's other variables are. Was it removed by hand?")
    return value


# --- torchrun: `torchrun --no-python zbmd-node run`, and MASTER_ADDR ------------------------------------
#
# torchrun starts one process a rank; the first of each host is the node. Its flags, and the PET_* variables
# that stand for them, are settings of `zbmd-node run` itself. Of the variables that PyTorch's `env://`
# reads, MASTER_ADDR, MASTER_PORT, NODE_RANK and GROUP_RANK are read where nobody says better; RANK and
# WORLD_SIZE alone are not, as launchers do not agree on whether they count hosts or processes. Source:
# torch/distributed/run.py and elastic/agent/server/local_elastic_agent.py.


WORKER = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
"""All of them together mean that torchrun has started this process."""


def read_torchrun(environment: Mapping[str, str]) -> LauncherFacts | None:
    """Return what torchrun says to its worker; None if this process is none. Raises `UserError`."""
    if not all(environment.get(name) for name in WORKER):
        return None
    run_id = stated_text(environment, "TORCHELASTIC_RUN_ID")
    node = stated_number(environment, "GROUP_RANK", most=NODES_MAX - 1)
    assert run_id is not None and node is not None
    index = _needed(environment, "LOCAL_RANK", PROCESSES_MAX - 1)
    count = _needed(environment, "LOCAL_WORLD_SIZE", PROCESSES_MAX, least=1)
    size = _needed(environment, "WORLD_SIZE", RANKS_MAX, least=1)
    hosts, rest = divmod(size, count)
    if rest or index >= count or node.value >= hosts:
        raise UserError(
            f"torchrun says rank {index} of {count} (LOCAL_RANK, LOCAL_WORLD_SIZE) on host {node.value} "
            f"(GROUP_RANK), and {size} ranks in all (WORLD_SIZE), which do not fit together. Give each host "
            "the same --nproc-per-node."
        )
    job = f"torchrun-{run_id.value}"
    return LauncherFacts(
        launcher="torchrun",
        nodes=Stated(value=NodeRange(least=hosts, most=hosts), source="WORLD_SIZE / LOCAL_WORLD_SIZE"),
        node=node,
        processes=_several(count, "LOCAL_WORLD_SIZE"),
        place=Stated(value=ProcessPlacement(index=index, count=count), source="LOCAL_RANK"),
        # The port is torchrun's own store's, which has it open.
        join_addresses=master(environment, port=port_of_job(job)),
        job=Stated(value=job, source="TORCHELASTIC_RUN_ID"),
    )


def read_env(environment: Mapping[str, str]) -> LauncherFacts | None:
    """MASTER_ADDR and its like, set by hand or by a platform; None if none is set. Raises `UserError`."""
    join_addresses = master(environment, port=None)
    node = None
    for name in ("NODE_RANK", "GROUP_RANK"):
        node = node or stated_number(environment, name, most=NODES_MAX - 1)
    if join_addresses is None and node is None:
        return None
    return LauncherFacts(launcher="the environment of PyTorch", node=node, join_addresses=join_addresses)


def master(environment: Mapping[str, str], *, port: int | None) -> Stated[tuple[TcpAddress, ...]] | None:
    """The first host, by MASTER_ADDR, at MASTER_PORT or at `port`. Raises `UserError`."""
    host = stated_text(environment, "MASTER_ADDR")
    if host is None:
        return None
    source = "MASTER_ADDR" if port is not None else "MASTER_ADDR and MASTER_PORT"
    if port is None:
        port = number(environment, "MASTER_PORT", least=1, most=PORT_MAX) or STATIC_PORT
    return Stated(value=(parse_join_address(host.value, "MASTER_ADDR", port=port),), source=source)


# --- Slurm: a step of a job, `srun zbmd-node run …` -----------------------------------------------------
#
# Each task of a step finds its node's number (SLURM_NODEID), the nodes (SLURM_STEP_NODELIST) and how many
# tasks each has (SLURM_STEP_TASKS_PER_NODE). Node 0 founds the cluster and all listen at the same port, one
# of the step's reserved ones or one that follows from the job's id, so that every node can be joined.
# Source: the manual of srun.
#
# What is not read: SLURM_LAUNCH_NODE_IPADDR, since srun may run on a login node that has no part in the
# job.


GROUPS_MAX = 1 << 16
GPUS_MAX = 1 << 10

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_PORTS = re.compile(r"([0-9]{1,5})(?:-[0-9]{1,5})?(?:,.*)?", re.ASCII)


def read_slurm(environment: Mapping[str, str]) -> LauncherFacts | None:
    """Return what the step says; None outside of one. Raises `UserError`.

    Inside of an allocation (sbatch, salloc), but not started by srun, it says nothing but a note.
    """
    job = stated_text(environment, "SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_STEP_ID" not in environment or "SLURM_NODEID" not in environment:
        return LauncherFacts(launcher="Slurm", notes=_not_in_a_step(environment))
    step = f"{job.value}.{environment['SLURM_STEP_ID'][:20]}"
    nodes = stated_number(
        environment,
        "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environment else "SLURM_NNODES",
        least=1,
        most=NODES_MAX,
    )
    join_addresses = _join_addresses(environment, step)
    place, notes = _place(environment, nodes)
    return LauncherFacts(
        launcher="Slurm",
        nodes=_range(nodes, join_addresses),
        node=stated_number(environment, "SLURM_NODEID", most=NODES_MAX - 1),
        processes=None if place is None else _several(place.value.count, place.source),
        processes_hint=_gpus(environment),
        place=place,
        join_addresses=join_addresses,
        every_node_is_joinable=True,
        job=Stated(value=f"slurm-{step}", source="SLURM_JOB_ID"),
        name=stated_text(environment, "SLURMD_NODENAME"),
        notes=notes,
    )


def host_names(environment: Mapping[str, str]) -> Stated[tuple[str, ...]] | None:
    """The hosts of the step, or of the job where there is no step. Raises `UserError`."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := environment.get(name):
            try:
                hosts = parse_hostlist(text, hosts_max=NODES_MAX)
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
            if hosts:
                return Stated(value=hosts, source=name)
    return None


def parse_tasks_per_node(text: str, source: str, *, nodes_max: int = NODES_MAX) -> tuple[int, ...]:
    """Tasks of each node, from Slurm's `2(x3),1`. Raises `UserError`."""
    counts: list[int] = []
    for group in text.split(",", GROUPS_MAX):
        found = _TASKS.fullmatch(group)
        times = int(found[2] or 1) if found is not None else 0
        if found is None or len(counts) + times > nodes_max or int(found[1]) > PROCESSES_MAX:
            raise UserError(f"{source} is {text[:64]!r}, which is not of the form 2(x3),1.")
        counts += [int(found[1])] * times
    return tuple(counts)


def _not_in_a_step(environment: Mapping[str, str]) -> tuple[str, ...]:
    count = number(environment, "SLURM_NNODES", least=1, most=NODES_MAX) or 1
    if count == 1:
        return ()
    return (
        f"this is a Slurm allocation of {count} nodes, but srun has not started this process: it stands for "
        "one node. To use all of them, write: srun --ntasks-per-node=1 zbmd-node run …",
    )


def _range(
    nodes: Stated[int] | None, join_addresses: Stated[tuple[TcpAddress, ...]] | None
) -> Stated[NodeRange] | None:
    if nodes is None:
        return None
    if join_addresses is not None and len(join_addresses.value) != nodes.value:
        raise UserError(
            f"{nodes.source} says {nodes.value} nodes, but {join_addresses.source} lists "
            f"{len(join_addresses.value)}: {_hosts(join_addresses.value)}. Was one of them set by hand?"
        )
    return Stated(value=NodeRange(least=nodes.value, most=nodes.value), source=nodes.source)


def _hosts(join_addresses: tuple[TcpAddress, ...]) -> str:
    text = format_hostlist([join_address.host for join_address in join_addresses])
    return text if len(text) <= 80 else f"{text[:80]}…"


def _join_addresses(environment: Mapping[str, str], step: str) -> Stated[tuple[TcpAddress, ...]] | None:
    hosts = host_names(environment)
    if hosts is None:
        return None
    port, source = _port(environment, step)
    join_addresses = tuple(TcpAddress(host=host, port=port) for host in hosts.value)
    return Stated(value=join_addresses, source=f"{hosts.source} and {source}")


def _port(environment: Mapping[str, str], step: str) -> tuple[int, str]:
    name = "SLURM_STEP_RESV_PORTS"
    if text := environment.get(name):
        found = _PORTS.fullmatch(text)
        if found is None or not 1 <= int(found[1]) <= PORT_MAX:
            raise UserError(f"{name} is {text[:64]!r}, which is no range of ports.")
        return int(found[1]), name
    return port_of_job(step), "the step's id"


def _place(
    environment: Mapping[str, str], nodes: Stated[int] | None
) -> tuple[Stated[ProcessPlacement] | None, tuple[str, ...]]:
    """This task among those of its node, and a note if nodes have unlike numbers of tasks."""
    index = number(environment, "SLURM_LOCALID", most=PROCESSES_MAX - 1)
    node = number(environment, "SLURM_NODEID", most=NODES_MAX - 1)
    if index is None or node is None:
        return None, ()
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if text := environment.get(name):
            counts = parse_tasks_per_node(text, name)
            if node >= len(counts):
                raise UserError(f"{name} is {text[:64]!r}, for {len(counts)} nodes, but this is node {node}.")
            note = f"{name} is {text}: nodes have unlike numbers of tasks"
            place = Stated(value=ProcessPlacement(index=index, count=counts[node]), source=name)
            return _checked(place), () if len(set(counts)) == 1 else (note,)
    each = stated_number(environment, "SLURM_NTASKS_PER_NODE", least=1, most=PROCESSES_MAX)
    if each is None:
        total = stated_number(environment, "SLURM_NTASKS", least=1, most=RANKS_MAX)
        if total is None or nodes is None or total.value % nodes.value:
            return None, ()
        each = Stated(value=total.value // nodes.value, source=total.source)
    return _checked(Stated(value=ProcessPlacement(index=index, count=each.value), source=each.source)), ()


def _checked(place: Stated[ProcessPlacement]) -> Stated[ProcessPlacement]:
    if place.value.index >= place.value.count:
        raise UserError(
            f"SLURM_LOCALID is {place.value.index}, but {place.source} says {place.value.count} tasks here. "
            "Was one of them set by hand?"
        )
    return place


def _gpus(environment: Mapping[str, str]) -> Stated[int] | None:
    """GPUs of the step on this node: their number, or a list of them."""
    count = stated_number(environment, "SLURM_GPUS_ON_NODE", most=GPUS_MAX)
    if count is not None and count.value > 0:
        return count
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        listed = [gpu for gpu in environment.get(name, "").split(",", GPUS_MAX) if gpu]
        if listed:
            return Stated(value=min(len(listed), GPUS_MAX), source=name)
    return None


# --- Kubernetes: a pod of a StatefulSet or of an indexed Job, with a headless service -------------------
#
# The service's name comes from `--service` or ZBMD_SERVICE, as the manifests in deploy/kubernetes do; its
# DNS record lists every pod (with `publishNotReadyAddresses` from the start). The pod's number is its
# completion index or the ordinal at the end of its name; pod 0 founds the cluster. How many pods there are
# is not in a pod's environment: `--nnodes`, ZBMD_NNODES or PET_NNODES says it.
#
# Sources: Kubernetes' documentation on "DNS for Services and Pods", "StatefulSets" and "Indexed Job".


POD_PORT = 29_400
"""Of a pod, which has its own address: all pods may have the same."""
COMPLETIONS_MAX = 10**9
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_ORDINAL = re.compile(r"(?P<set>[a-z0-9][a-z0-9.-]*)-(?P<ordinal>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Facts of a pod beside its environment. namespace: from `NAMESPACE_FILE`; host: its name."""

    host: str = ""
    namespace: str = ""


def read_kubernetes(
    environment: Mapping[str, str], pod: Pod, service: Stated[str] | None = None
) -> LauncherFacts | None:
    """Return what the pod's environment says; None outside of one. Raises `UserError`.

    service: from a flag; else ZBMD_SERVICE is read.
    """
    index = stated_number(environment, "JOB_COMPLETION_INDEX", most=COMPLETIONS_MAX)
    service = service or stated_text(environment, "ZBMD_SERVICE")
    if index is None and service is None:
        return None
    # The host name of an indexed Job's pod ends in its index; the pod's own name goes on at random.
    host = pod.host.partition(".")[0] or environment.get("POD_NAME", "")
    ordinal = _ORDINAL.fullmatch(host)
    if index is None and ordinal is not None:
        index = Stated(value=int(ordinal["ordinal"]), source="the pod's name")
    elif index is not None and ordinal is not None and int(ordinal["ordinal"]) != index.value:
        ordinal = None
    notes: tuple[str, ...] = ()
    if index is None:
        notes = (f"the pod {host!r} has no number: it is in no StatefulSet, and in no indexed Job",)
    return LauncherFacts(
        launcher="Kubernetes",
        node=index,
        join_addresses=None if service is None else _pod_addresses(environment, pod, service, ordinal),
        every_node_is_joinable=service is not None,
        job=_pod_job(environment, pod, ordinal),
        name=Stated(value=host, source="the pod's name") if host else None,
        local=stated_text(environment, "POD_IP"),
        notes=notes,
    )


def _pod_addresses(
    environment: Mapping[str, str], pod: Pod, service: Stated[str], ordinal: re.Match[str] | None
) -> Stated[tuple[TcpAddress, ...]]:
    """Pod 0 by its own name, then all pods by the service's."""
    labels = service.value.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise UserError(f"{service.source} is {service.value!r}, which is no name of a Kubernetes service.")
    namespace = environment.get("POD_NAMESPACE") or pod.namespace
    domain = service.value
    if len(labels) == 1 and _LABEL.fullmatch(namespace):
        domain = f"{service.value}.{namespace}.svc"
    names = [domain] if ordinal is None else [f"{ordinal['set']}-0.{domain}", domain]
    return Stated(
        value=tuple(parse_join_address(name, service.source, port=POD_PORT) for name in names),
        source=service.source,
    )


def _pod_job(environment: Mapping[str, str], pod: Pod, ordinal: re.Match[str] | None) -> Stated[str] | None:
    if ordinal is None:
        return None
    namespace = environment.get("POD_NAMESPACE") or pod.namespace or "default"
    return Stated(value=f"kubernetes-{namespace[:63]}-{ordinal['set']}", source="the pod's name")
