"""Sans-I/O: a step of a Slurm job: `srun zbmd-node run …`.

Each task of a step finds its node's number (SLURM_NODEID), the nodes (SLURM_STEP_NODELIST) and how many tasks
each has (SLURM_STEP_TASKS_PER_NODE). Node 0 founds the cluster and all listen at the same port, one of the
step's reserved ones or one that follows from the job's id, so that every node can be joined. Source: the
manual of srun.

What is not read: SLURM_LAUNCH_NODE_IPADDR, since srun may run on a login node that has no part in the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zbmd.actors.bootstrap.hostlist import format_hostlist, parse_hostlist
from zbmd.actors.bootstrap.readings import (
    NODES_MAX,
    PROCESSES_MAX,
    LauncherFacts,
    NodeRange,
    ProcessPlacement,
    Stated,
    number,
    stated_number,
    stated_text,
)
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import PORT_MAX, TcpAddress

TASKS_MAX = NODES_MAX * PROCESSES_MAX
GROUPS_MAX = 1 << 16
GPUS_MAX = 1 << 10

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_PORTS = re.compile(r"([0-9]{1,5})(?:-[0-9]{1,5})?(?:,.*)?", re.ASCII)


def read_slurm(environment: Mapping[str, str]) -> LauncherFacts | None:
    """What the step says; None outside of one. Raises `UserError`.

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
        processes=None
        if place is None or place.value.count == 1
        else Stated(value=place.value.count, source=place.source),
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
            return _checked(place, "SLURM_LOCALID"), () if len(set(counts)) == 1 else (note,)
    each = stated_number(environment, "SLURM_NTASKS_PER_NODE", least=1, most=PROCESSES_MAX)
    if each is None:
        total = stated_number(environment, "SLURM_NTASKS", least=1, most=TASKS_MAX)
        if total is None or nodes is None or total.value % nodes.value:
            return None, ()
        each = Stated(value=total.value // nodes.value, source=total.source)
    return _checked(
        Stated(value=ProcessPlacement(index=index, count=each.value), source=each.source), "SLURM_LOCALID"
    ), ()


def _checked(place: Stated[ProcessPlacement], index_source: str) -> Stated[ProcessPlacement]:
    if place.value.index >= place.value.count:
        raise UserError(
            f"{index_source} is {place.value.index}, but {place.source} says {place.value.count} tasks here. "
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
