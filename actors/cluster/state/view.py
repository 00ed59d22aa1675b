"""Views of a cluster and the changes between them, and the quorum rule: which part of a view may go on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import msgspec

from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import NO_JOBS, Command, JobSpec, JobTable
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.rank.environment import DOMAINS_VARIABLE, domains_text
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.tcp.address import parse_address

MEMBERS_MAX = 1 << 17
OBSERVERS_MAX = 10
"""Members that observe one member, and that it observes."""
EPOCH_MAX = (1 << 32) - 1
"""As of the ranks' views, whose epochs are taken from these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChange:
    """The step from one view to the view of `epoch`. `removed` and `added` are sorted.

    commands: in the order in which they are applied; elapsed_ns: how long the view before has lasted.
    """

    captured_as: ClassVar[str] = "Change"
    epoch: int
    removed: tuple[NodeKey, ...] = ()
    added: tuple[Node, ...] = ()
    commands: tuple[Command, ...] = ()
    elapsed_ns: int = 0

    def __str__(self) -> str:
        parts = [f"-{key}" for key in self.removed] + [f"+{node.key}" for node in self.added]
        parts += [f"{len(self.commands)} commands"] if self.commands else []
        return f"view {self.epoch} ({' '.join(parts) or 'the same members'})"


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The members of an epoch, sorted by id, at most one incarnation of each node, and the cluster's jobs."""

    epoch: int
    nodes: tuple[Node, ...]
    jobs: JobTable = NO_JOBS

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if ids != sorted(set(ids)) or len(ids) > MEMBERS_MAX or not 0 <= self.epoch <= EPOCH_MAX:
            raise LocalProtocolError(f"view {self.epoch}: members must be sorted, and each node in it once")

    def __str__(self) -> str:
        shown = ", ".join(str(node.key) for node in self.nodes[:8])
        more = f" and {len(self.nodes) - 8} more" if len(self.nodes) > 8 else ""
        return f"view {self.epoch} of {len(self.nodes)}: {shown}{more}"

    @cached_property
    def by_id(self) -> dict[int, Node]:
        """The members by id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def domains(self) -> dict[NodeKey, str]:
        """The failure domains of those members whose user has named one."""
        return {node.key: node.domain for node in self.nodes if node.domain}

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The members' ids, ascending."""
        return tuple(node.id for node in self.nodes)

    @cached_property
    def digest(self) -> bytes:
        """A digest that is equal only for equal views."""
        encoded = msgspec.msgpack.encode((self.epoch, self.nodes, self.jobs))
        return hashlib.blake2b(encoded, digest_size=16).digest()

    def holds(self, key: NodeKey) -> bool:
        """Whether this incarnation of the node is a member."""
        node = self.by_id.get(key.id)
        return node is not None and node.key.incarnation == key.incarnation

    def after(self, change: ViewChange) -> ClusterView:
        """Return the next view. Raises `LocalProtocolError` if the change does not follow from this one."""
        return _after(_Shared(self), change)


def host_of_first_rank(view: ClusterView, job_id: int) -> str:
    """Return the host of the job's lowest rank whose node is a member: MASTER_ADDR of all its hosts."""
    job = view.jobs.job(job_id)
    for entry in job.ranks if job is not None else ():
        node = view.by_id.get(entry.node.id) if entry.node is not None else None
        if node is not None and node.address:
            return parse_address(node.address).host
    return "127.0.0.1"


def with_domains(spec: JobSpec, nodes: Sequence[Node]) -> JobSpec:
    """Return the job with the failure domains of the nodes that are here, if a user has named any.

    They are set once, for all ranks of the job: what is decided by them is decided alike.
    """
    if not any(node.domain for node in nodes):
        return spec
    text = domains_text(node.domain for node in nodes)
    environment = {**dict(spec.environment), DOMAINS_VARIABLE: text}
    return dataclasses.replace(spec, environment=tuple(sorted(environment.items())))


class _Shared:
    """A view as a cache key, hashed by its digest."""

    __slots__ = ("view",)

    def __init__(self, view: ClusterView) -> None:
        self.view = view

    def __hash__(self) -> int:
        return hash(self.view.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and self.view.digest == other.view.digest


@lru_cache(maxsize=64)
def _after(shared: _Shared, change: ViewChange) -> ClusterView:
    view = shared.view
    nodes = dict(view.by_id)
    if change.epoch != view.epoch + 1:
        raise LocalProtocolError(f"{change} does not follow {view}")
    for key in change.removed:
        if not view.holds(key):
            raise LocalProtocolError(f"{change} removes {key}, who is not in {view}")
        del nodes[key.id]
    for node in change.added:
        if node.id in nodes:
            raise LocalProtocolError(f"{change} adds {node.key} beside {nodes[node.id].key}")
        nodes[node.id] = node
    after = (
        tuple(nodes[node_id] for node_id in sorted(nodes)) if change.removed or change.added else view.nodes
    )
    jobs = after_change(
        view.jobs,
        epoch=change.epoch,
        members=[node.key for node in after],
        removed=frozenset(change.removed),
        commands=change.commands,
        elapsed_ns=change.elapsed_ns,
    )
    return ClusterView(epoch=change.epoch, nodes=after, jobs=jobs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and its reason. `tied`: it would hold if the witness named a member that is present."""

    holds: bool
    reason: str
    tied: bool = False


LOWEST_ID = -1
"""The tie-breaker of a view without a witness: its lowest id."""


def quorum(
    view: ClusterView,
    present: Collection[int],
    proven: Collection[int] = (),
    *,
    tie_breaker: int | None = LOWEST_ID,
) -> Verdict:
    """Whether the members with ids `present` may decide for `view`.

    A majority may; exactly half may with the tie-breaker among them, which is the lowest id of the view, or
    whom the witness has named, or None while it has named nobody. So any two such parts share a member, who
    knows what the other decided. All members but those who are proven dead may too: together they know
    whatever anybody who lives knows, and no other part of the view is left.
    """
    size, here = len(view.nodes), sum(1 for node_id in view.ids if node_id in present)
    if 2 * here > size:
        return Verdict(True, f"{here} of {size} are a majority of view {view.epoch}")
    by_lowest = tie_breaker == LOWEST_ID
    breaker = view.ids[0] if by_lowest and size else tie_breaker
    half = size > 0 and 2 * here == size
    if half and breaker in present:
        why = f"its lowest, {breaker}" if by_lowest else f"{breaker}, whom the witness named"
        return Verdict(True, f"{here} of {size} are half of view {view.epoch}, with {why}")
    if here and all(node_id in present or node_id in proven for node_id in view.ids):
        return Verdict(True, f"all others of view {view.epoch} are proven dead")
    if half and not by_lowest:
        named = "has named nobody" if breaker is None else f"named {breaker}"
        return Verdict(
            False, f"{here} of {size} are half of view {view.epoch}, and the witness {named}", True
        )
    needed = size // 2 + (1 if size % 2 or (size and breaker not in present) else 0)
    return Verdict(False, f"{here} of the {size} members of view {view.epoch} are here, {needed} are needed")
