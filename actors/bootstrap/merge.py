"""Sans-I/O: all sources together: how many nodes, which one this is, whom to ask, and who says so.

The order, first come first served: what the user set (flags, ZBMD_* and PET_* variables, the settings file);
then the innermost launcher, which is the first of torchrun's worker, MPI, a Slurm step, Kubernetes that has
started this process; then MASTER_ADDR and NODE_RANK. Numbers that two of the first two sources state must
agree; doors and names need not, and the first source has its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zbmd.actors.bootstrap.hostlist import format_hostlist
from zbmd.actors.bootstrap.kubernetes import Pod, read_kubernetes
from zbmd.actors.bootstrap.mpi import read_mpi
from zbmd.actors.bootstrap.readings import NodeRange, Reading, Stated, port_of_job
from zbmd.actors.bootstrap.slurm import host_names, read_slurm
from zbmd.actors.bootstrap.torchrun import read_env, read_torchrun
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress

IN_A_RANK = "ZBMD_NODE"
"""Set in the ranks of a run: what their other variables say is about that run, not about one inside it."""
SHOWN_MAX = 120


class Role(Enum):
    """What this process is to do."""

    ALONE = "alone"
    """The job has one node: no cluster is needed."""
    FOUND = "found"
    """Found the cluster, unless a door that is another node's lets it in."""
    JOIN = "join"
    """Ask at the doors until one lets it in."""
    HOLDER = "holder"
    """Found if the first door's address is this host's and its port is free, else join."""
    STORE = "store"
    """Found if the store has it so, else join at a door that the store knows."""
    EXTRA = "extra"
    """Nothing: another process of this host is its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the explanation."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """How this process finds its cluster.

    launcher: who has started it; nodes: how many the job may have; node: this one's number, if it is known;
    processes: ranks on this node, None if nobody has said; doors: where to ask, the founder's first; port:
    what to listen on, 0 for any; job: tells jobs apart, empty if nobody has named it; name: what
    people call this node, empty if nobody has said; local: the address
    under which others reach this node, empty if nobody has said; store: an etcd address, or empty; facts:
    each of these with its source; notes: what else its user should know.
    """

    launcher: str
    role: Role
    nodes: NodeRange
    node: int | None
    processes: int | None
    doors: tuple[TcpAddress, ...] = ()
    port: int = 0
    job: str
    name: str = ""
    local: str = ""
    store: str = ""
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]

    def explain(self) -> list[str]:
        """What was decided and why, by lines; `notes` are told beside it."""
        names = max((len(fact.name) for fact in self.facts), default=0)
        values = max((len(fact.value) for fact in self.facts), default=0)
        lines = [f"started by: {self.launcher}"]
        return lines + [f"{f.name:<{names}}  {f.value:<{values}}  {f.source}".rstrip() for f in self.facts]


def bootstrap_of(
    environment: Mapping[str, str],
    stated: Reading,
    *,
    pod: Pod | None = None,
    service: Stated[str] | None = None,
    standalone: bool = False,
) -> Bootstrap:
    """Read all sources in the stated order.

    stated: what the user set; pod: what a pod's files tell; service: a headless service that the user set;
    standalone: this host alone, whatever the environment says. Raises `UserError` where sources disagree, or
    where several nodes are wanted and nothing says how they find each other.
    """
    nested = IN_A_RANK in environment
    if standalone or nested:
        why = "--standalone" if standalone else "started by a rank of another run"
        return _alone(Reading(launcher=why, processes=stated.processes))
    launcher, fallback, notes = _launcher(environment, pod or Pod(), service)
    if launcher.place is not None and launcher.place.value.index > 0:
        return _extra(launcher)
    processes = _agreed("processes a node", stated.launcher, stated.processes, launcher.processes)
    merged = Reading(
        launcher=launcher.launcher,
        nodes=_nodes(stated.nodes, launcher.nodes),
        node=_agreed("node number", stated.launcher, stated.node, launcher.node) or fallback.node,
        founds=launcher.founds if stated.node is None else None,
        processes=processes or launcher.processes_hint,
        place=launcher.place,
        doors=stated.doors or launcher.doors or fallback.doors,
        every_node_is_a_door=stated.doors is None and launcher.every_node_is_a_door,
        port=stated.port,
        holder_founds=stated.doors is not None and stated.holder_founds,
        job=stated.job or launcher.job,
        name=stated.name or launcher.name,
        local=stated.local or launcher.local,
        store=stated.store,
        notes=(*stated.notes, *notes),
    )
    if merged.nodes is None and service is not None:
        raise UserError(
            f"{service.source} names a service, but nobody says how many pods there are. Give --nnodes, or "
            "set ZBMD_NNODES to the number of replicas."
        )
    if merged.nodes is None or merged.nodes.value.most == 1:
        return _alone(merged)
    return _of_many(merged, merged.nodes.value)


def _launcher(
    environment: Mapping[str, str], pod: Pod, service: Stated[str] | None
) -> tuple[Reading, Reading, tuple[str, ...]]:
    """The innermost launcher, what is read where it says nothing, and notes."""
    torchrun, mpi, slurm = read_torchrun(environment), read_mpi(environment), None
    if torchrun is None and mpi is None:  # a launcher inside of a step inherits its variables
        slurm = read_slurm(environment)
    kubernetes = read_kubernetes(environment, pod, service)
    found = [reading for reading in (torchrun, mpi, slurm, kubernetes) if reading is not None]
    notes = tuple(note for reading in found for note in reading.notes)
    told = [reading for reading in found if reading.place or reading.node or reading.doors]
    first = told[0] if told else Reading(launcher="nobody")
    notes += tuple(f"{other.launcher} is there too: {first.launcher} comes before it" for other in told[1:])
    env = read_env(environment) or Reading(launcher="")
    doors = env.doors if first is not torchrun else None
    if doors is None and kubernetes is not None:
        doors = kubernetes.doors
    if doors is None and first is mpi:
        doors = _slurm_doors(environment, first)
    return first, Reading(launcher=env.launcher, node=env.node, doors=doors), notes


def _slurm_doors(environment: Mapping[str, str], mpi: Reading) -> Stated[tuple[TcpAddress, ...]] | None:
    """mpirun in a Slurm job has its hosts from there, and rank 0 on the first."""
    hosts = host_names({k: v for k, v in environment.items() if k != "SLURM_STEP_NODELIST"})
    if hosts is None:
        return None
    port = port_of_job(environment.get("SLURM_JOB_ID", "") if mpi.job is None else mpi.job.value)
    return Stated(value=(TcpAddress(host=hosts.value[0], port=port),), source=hosts.source)


def _agreed(
    what: str, first_launcher: str, first: Stated[int] | None, second: Stated[int] | None
) -> Stated[int] | None:
    if first is not None and second is not None and first.value != second.value:
        raise UserError(
            f"the {what}: {first.source} says {first.value}, but {second.source} says {second.value}. Leave "
            f"out {first.source}, or give --standalone to run on this host alone."
        )
    return first or second


def _nodes(stated: Stated[NodeRange] | None, told: Stated[NodeRange] | None) -> Stated[NodeRange] | None:
    if stated is None or told is None:
        return stated or told
    if not stated.value.least <= told.value.most <= stated.value.most:
        raise UserError(
            f"the number of nodes: {stated.source} says {stated.value}, but {told.source} says {told.value}. "
            f"Leave out {stated.source}, or give --standalone to run on this host alone."
        )
    return stated


def _alone(reading: Reading) -> Bootstrap:
    facts = [_fact("nodes", "1", reading.nodes or "nobody says that there are more")]
    if reading.processes is not None:
        facts.append(_fact("processes", str(reading.processes.value), reading.processes))
    notes = list(reading.notes)
    if reading.doors is not None:
        notes.append(f"{reading.doors.source} is not used: there is one node (--nnodes)")
    return Bootstrap(
        launcher=reading.launcher,
        role=Role.ALONE,
        nodes=NodeRange(least=1, most=1),
        node=0,
        processes=None if reading.processes is None else reading.processes.value,
        job="" if reading.job is None else reading.job.value,
        facts=(*facts, Fact(name="role", value="alone", source="it needs no cluster")),
        notes=tuple(notes),
    )


def _extra(launcher: Reading) -> Bootstrap:
    assert launcher.place is not None
    place = launcher.place.value
    source = f"it is process {place.index} of {place.count} on this host, and process 0 is its node"
    return Bootstrap(
        launcher=launcher.launcher,
        role=Role.EXTRA,
        nodes=NodeRange(least=1, most=1) if launcher.nodes is None else launcher.nodes.value,
        node=None,
        processes=0,
        job="" if launcher.job is None else launcher.job.value,
        facts=(Fact(name="role", value="extra", source=source),),
        notes=launcher.notes,
    )


def _of_many(merged: Reading, nodes: NodeRange) -> Bootstrap:
    if merged.node is not None and merged.node.value >= nodes.most:
        raise UserError(
            f"{merged.node.source} is {merged.node.value}, but there are at most {nodes.most} nodes, counted "
            "from 0."
        )
    role, why = _role(merged)
    doors = () if merged.doors is None else merged.doors.value
    if merged.port is not None and merged.every_node_is_a_door:
        doors = tuple(TcpAddress(host=door.host, port=merged.port.value) for door in doors)
    if not doors and role is not Role.STORE:
        raise UserError(
            f"the job has {nodes} nodes, and nothing says how they find each other. Give all of them the "
            "first one's address: --rdzv-endpoint HOST:PORT (or MASTER_ADDR), or an etcd: --store etcd://HOST:2379/NAME."
        )
    if any(door.port == 0 for door in doors):
        raise UserError("with several nodes --rdzv-endpoint needs a port that they can dial, not 0.")
    listen = merged.port.value if merged.port is not None else 0
    if doors and not listen and (merged.every_node_is_a_door or role in (Role.FOUND, Role.HOLDER)):
        listen = doors[0].port
    return Bootstrap(
        launcher=merged.launcher,
        role=role,
        nodes=nodes,
        node=None if merged.node is None else merged.node.value,
        processes=None if merged.processes is None else merged.processes.value,
        doors=doors,
        port=listen,
        job="" if merged.job is None else merged.job.value,
        name="" if merged.name is None else merged.name.value,
        local="" if merged.local is None else merged.local.value,
        store="" if merged.store is None else merged.store.value,
        facts=(*_facts(merged, doors, listen), Fact(name="role", value=role.value, source=why)),
        notes=merged.notes,
    )


def _role(merged: Reading) -> tuple[Role, str]:
    if merged.store is not None:
        return Role.STORE, "the store says who founds the cluster"
    if merged.holder_founds:
        return Role.HOLDER, "the host that has the first door's address founds the cluster"
    if merged.node is not None:
        number = merged.node.value
        return (Role.FOUND, "node 0 founds the cluster") if number == 0 else (Role.JOIN, "it is not node 0")
    if merged.founds is not None:
        founds = merged.founds.value
        why = f"{merged.founds.source} is {'' if founds else 'not '}0"
        return (Role.FOUND if founds else Role.JOIN), why
    return Role.HOLDER, "no number is known: the host that has the first door's address founds the cluster"


def _facts(merged: Reading, doors: tuple[TcpAddress, ...], listen: int) -> list[Fact]:
    facts: list[Fact] = []
    for name, stated in (
        ("nodes", merged.nodes),
        ("this node", merged.node),
        ("processes", merged.processes),
        ("job", merged.job),
        ("name", merged.name),
        ("address", merged.local),
        ("store", merged.store),
    ):
        if stated is not None:
            facts.append(_fact(name, str(stated.value), stated))
    if merged.doors is not None:
        facts.append(_fact("doors", _shown(doors), merged.doors))
    facts.append(_fact("listens on", f"port {listen}" if listen else "any port", merged.port or ""))
    return facts


def _shown(doors: tuple[TcpAddress, ...]) -> str:
    """Doors at one port as a list of hosts."""
    ports = {door.port for door in doors}
    if len(doors) == 1 or len(ports) > 1 or any(":" in door.host for door in doors):
        text = ", ".join(str(door) for door in doors)
    else:
        text = f"{format_hostlist([door.host for door in doors])} port {doors[0].port}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _fact(name: str, value: str, source: Stated[int] | Stated[NodeRange] | object) -> Fact:
    return Fact(name=name, value=value, source=source.source if isinstance(source, Stated) else str(source))
