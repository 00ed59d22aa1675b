"""Sans-I/O: all sources together: how many nodes, which one this is, whom to ask, and who says so.

The order, first come first served: what the user set (flags, ZBMD_* and PET_* variables, the settings file);
then the innermost launcher, which is the first of torchrun's worker, MPI, a Slurm step, Kubernetes that has
started this process; then MASTER_ADDR and NODE_RANK. Numbers that two of the first two sources state must
agree; join addresses and names need not, and the first source has its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zbmd.actors.bootstrap.environments import (
    LauncherFacts,
    NodeRange,
    Pod,
    Stated,
    host_names,
    read_env,
    read_kubernetes,
    read_mpi,
    read_slurm,
    read_torchrun,
)
from zbmd.actors.bootstrap.hostlist import format_hostlist
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress

IN_A_RANK = "ZBMD_NODE"
"""Set in the ranks of a run: what their other variables say is about that run, not about one inside it."""
SHOWN_MAX = 120


class Role(Enum):
    """The task of this process."""

    ALONE = "alone"
    """The job has one node: no cluster is needed."""
    FOUND = "found"
    """Found the cluster, unless a join address that is another node's lets it in."""
    JOIN = "join"
    """Ask at the join addresses until one lets it in."""
    HOLDER = "holder"
    """Found if the first join address is on this host and its port is free, else join."""
    STORE = "store"
    """Found if the store has it so, else join at a join address that the store knows."""
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
    """The way in which this process finds its cluster.

    launcher: who has started it; nodes: how many the job may have; node: this one's number, if it is known;
    processes: ranks on this node, None if nobody has said; join_addresses: where to ask, the founder's first;
    port: what to listen on, 0 for any; job: tells jobs apart, empty if nobody has named it; name: what people
    call this node, empty if nobody has said; local: the address under which others reach this node, empty if
    nobody has said; store: an etcd address, or empty; facts: each of these with its source; notes: what else
    its user should know.
    """

    launcher: str
    role: Role
    nodes: NodeRange
    node: int | None
    processes: int | None
    join_addresses: tuple[TcpAddress, ...] = ()
    port: int = 0
    job: str
    name: str = ""
    local: str = ""
    store: str = ""
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]

    def explain(self) -> list[str]:
        """Return what was decided and why, by lines; `notes` are shown beside it."""
        names = max((len(fact.name) for fact in self.facts), default=0)
        values = max((len(fact.value) for fact in self.facts), default=0)
        lines = [f"started by: {self.launcher}"]
        return lines + [f"{f.name:<{names}}  {f.value:<{values}}  {f.source}".rstrip() for f in self.facts]


def bootstrap_of(
    environment: Mapping[str, str],
    stated: LauncherFacts,
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
        return _alone(LauncherFacts(launcher=why, processes=stated.processes))
    launcher, fallback, notes = _launcher(environment, pod or Pod(), service)
    if launcher.place is not None and launcher.place.value.index > 0:
        return _extra(launcher)
    processes = _agreed("processes a node", stated.launcher, stated.processes, launcher.processes)
    merged = LauncherFacts(
        launcher=launcher.launcher,
        nodes=_nodes(stated.nodes, launcher.nodes),
        node=_agreed("node number", stated.launcher, stated.node, launcher.node) or fallback.node,
        founds=launcher.founds if stated.node is None else None,
        processes=processes or launcher.processes_hint,
        place=launcher.place,
        join_addresses=stated.join_addresses or launcher.join_addresses or fallback.join_addresses,
        every_node_is_joinable=stated.join_addresses is None and launcher.every_node_is_joinable,
        port=stated.port,
        holder_founds=stated.join_addresses is not None and stated.holder_founds,
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
) -> tuple[LauncherFacts, LauncherFacts, tuple[str, ...]]:
    """The innermost launcher, what is read where it says nothing, and notes."""
    torchrun, mpi, slurm = read_torchrun(environment), read_mpi(environment), None
    if torchrun is None and mpi is None:  # a launcher inside of a step inherits its variables
        slurm = read_slurm(environment)
    kubernetes = read_kubernetes(environment, pod, service)
    found = [reading for reading in (torchrun, mpi, slurm, kubernetes) if reading is not None]
    notes = tuple(note for reading in found for note in reading.notes)
    placed = [reading for reading in found if reading.place or reading.node or reading.join_addresses]
    first = placed[0] if placed else LauncherFacts(launcher="nobody")
    notes += tuple(f"{other.launcher} is there too: {first.launcher} comes before it" for other in placed[1:])
    env = read_env(environment) or LauncherFacts(launcher="")
    join_addresses = env.join_addresses if first is not torchrun else None
    if join_addresses is None and kubernetes is not None:
        join_addresses = kubernetes.join_addresses
    if join_addresses is None and first is mpi:
        join_addresses = _slurm_addresses(environment, first)
    return first, LauncherFacts(launcher=env.launcher, node=env.node, join_addresses=join_addresses), notes


def _slurm_addresses(
    environment: Mapping[str, str], mpi: LauncherFacts
) -> Stated[tuple[TcpAddress, ...]] | None:
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


def _nodes(stated: Stated[NodeRange] | None, launched: Stated[NodeRange] | None) -> Stated[NodeRange] | None:
    if stated is None or launched is None:
        return stated or launched
    if not stated.value.least <= launched.value.most <= stated.value.most:
        raise UserError(
            f"the number of nodes: {stated.source} says {stated.value}, but {launched.source} says "
            f"{launched.value}. Leave out {stated.source}, or give --standalone to run on this host alone."
        )
    return stated


def _alone(reading: LauncherFacts) -> Bootstrap:
    facts = [_fact("nodes", "1", reading.nodes or "nobody says that there are more")]
    if reading.processes is not None:
        facts.append(_fact("processes", str(reading.processes.value), reading.processes))
    notes = list(reading.notes)
    if reading.join_addresses is not None:
        notes.append(f"{reading.join_addresses.source} is not used: there is one node (--nnodes)")
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


def _extra(launcher: LauncherFacts) -> Bootstrap:
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


def _of_many(merged: LauncherFacts, nodes: NodeRange) -> Bootstrap:
    if merged.node is not None and merged.node.value >= nodes.most:
        raise UserError(
            f"{merged.node.source} is {merged.node.value}, but there are at most {nodes.most} nodes, counted "
            "from 0."
        )
    role, why = _role(merged)
    join_addresses = () if merged.join_addresses is None else merged.join_addresses.value
    if merged.port is not None and merged.every_node_is_joinable:
        join_addresses = tuple(
            TcpAddress(host=join_address.host, port=merged.port.value) for join_address in join_addresses
        )
    if not join_addresses and role is not Role.STORE:
        raise UserError(
            f"the job has {nodes} nodes, and nothing says how they find each other. Give all of them the "
            "first one's address: --rdzv-endpoint HOST:PORT (or MASTER_ADDR), or an etcd: --store etcd://HOST:2379/NAME."
        )
    if any(join_address.port == 0 for join_address in join_addresses):
        raise UserError("with several nodes --rdzv-endpoint needs a port that they can dial, not 0.")
    listen = merged.port.value if merged.port is not None else 0
    if join_addresses and not listen and (merged.every_node_is_joinable or role in (Role.FOUND, Role.HOLDER)):
        listen = join_addresses[0].port
    return Bootstrap(
        launcher=merged.launcher,
        role=role,
        nodes=nodes,
        node=None if merged.node is None else merged.node.value,
        processes=None if merged.processes is None else merged.processes.value,
        join_addresses=join_addresses,
        port=listen,
        job="" if merged.job is None else merged.job.value,
        name="" if merged.name is None else merged.name.value,
        local="" if merged.local is None else merged.local.value,
        store="" if merged.store is None else merged.store.value,
        facts=(*_facts(merged, join_addresses, listen), Fact(name="role", value=role.value, source=why)),
        notes=merged.notes,
    )


def _role(merged: LauncherFacts) -> tuple[Role, str]:
    if merged.store is not None:
        return Role.STORE, "the store says who founds the cluster"
    if merged.holder_founds:
        return Role.HOLDER, "the host that has the first join address founds the cluster"
    if merged.node is not None:
        number = merged.node.value
        return (Role.FOUND, "node 0 founds the cluster") if number == 0 else (Role.JOIN, "it is not node 0")
    if merged.founds is not None:
        founds = merged.founds.value
        why = f"{merged.founds.source} is {'' if founds else 'not '}0"
        return (Role.FOUND if founds else Role.JOIN), why
    return Role.HOLDER, "no number is known: the host that has the first join address founds the cluster"


def _facts(merged: LauncherFacts, join_addresses: tuple[TcpAddress, ...], listen: int) -> list[Fact]:
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
    if merged.join_addresses is not None:
        facts.append(_fact("join addresses", _shown(join_addresses), merged.join_addresses))
    facts.append(_fact("listens on", f"port {listen}" if listen else "any port", merged.port or ""))
    return facts


def _shown(join_addresses: tuple[TcpAddress, ...]) -> str:
    """Join addresses at one port as a list of hosts."""
    ports = {join_address.port for join_address in join_addresses}
    if (
        len(join_addresses) == 1
        or len(ports) > 1
        or any(":" in join_address.host for join_address in join_addresses)
    ):
        text = ", ".join(str(join_address) for join_address in join_addresses)
    else:
        hosts = format_hostlist([join_address.host for join_address in join_addresses])
        text = f"{hosts} port {join_addresses[0].port}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _fact(name: str, value: str, source: Stated[int] | Stated[NodeRange] | object) -> Fact:
    return Fact(name=name, value=value, source=source.source if isinstance(source, Stated) else str(source))
