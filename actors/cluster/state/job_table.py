"""The jobs of a cluster as a table that every node computes alike, and the commands that change it.

The table is part of a cluster's view: it changes with a view, by the commands that the view's members
agreed on (`job_rules`), so it is the same on all of them.

A job has `nodes_max` **slots** of `ranks_per_node` ranks each; a slot is held by one node, and a node holds
at most one slot of a job. Rank r belongs to slot r // ranks_per_node.

The table's clock, `age_ns`, is agreed on too: the node that proposes a change states how long the view
before it lasted by its own monotonic clock. Clocks of two hosts are never compared.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import msgspec

from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.process.exit import EXIT_FAILED, REQUEUE_EXIT_CODE, USAGE_EXIT_CODE
from zbmd.actors.rank.environment import ARENA_BYTES_DEFAULT, ARENA_BYTES_MAX, ARENA_BYTES_MIN
from zbmd.actors.view import RANKS_MAX, Member, OnLoss, Outcome, View
from zbmd.transport.clock.deadlines import (
    DURATION_S_MAX,
    RECOVERY_BUDGET_NS_DEFAULT,
    RECOVERY_BUDGET_NS_MAX,
    RECOVERY_BUDGET_NS_MIN,
    SECOND_NS,
)
from zbmd.transport.errors import UserError

JOBS_MAX = 64
"""Jobs in the table. Ended jobs are dropped to make room, the oldest first."""
COMMAND_BYTES_MAX = 64 * 1024
TABLE_BYTES_MAX = 1024 * 1024
"""Bound on the encoded orders of all jobs: a joining node gets the table in one message."""
TABLE_RANKS_MAX = 4096
"""Ranks of all jobs, about 900 bytes each at most; bounded for the same reason."""
REFUSALS_KEPT = 8
"""Refusals kept for each node, the newest."""
RESTARTS_MAX = 1_000
WINDOW_NS_MAX = 24 * 3600 * SECOND_NS
STOP_GRACE_NS_DEFAULT = 30 * SECOND_NS
"""torchrun's, and Kubernetes' `terminationGracePeriodSeconds`: time to write a checkpoint."""
START_TIMEOUT_NS_DEFAULT = 600 * SECOND_NS
"""An import of a few gigabytes from a slow file system is no failure."""
DURATION_NS_MAX = round(DURATION_S_MAX) * SECOND_NS
REASON_CHARACTERS_MAX = 500
MEMORY_CAUSE = "memory"
"""The cause of the end of a process that the kernel has ended for want of memory."""
MEMORY_ADVICE = (
    "Have the ranks hold less (a smaller batch, --arena), run fewer on a host (-n), or raise the limit"
)
STILL_RUNNING = "still running after SIGKILL"
"""The reason of a `RankDown` for a process that the kernel does not end in time."""
CHECK_HOLDS_NS = 3600 * SECOND_NS
"""A host that was checked longer ago is checked again before it gets ranks (`HostCheck`)."""
GRACE_OVER = "killed after --stop-grace"
"""The reason of a `RankDown` for a process that had not ended when the time for it was over."""
ADDRESS_CHARACTERS_MAX = 256
JOB_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Describes a job. `target`: a script's path, equal on every host, or with `is_module` a module's name.

    job: its id, drawn at random by whoever submits it; environment: variables for its ranks; code: the files
    that it is made of, with the digest of each; nodes_min: fewer nodes than that, and all of its ranks wait;
    restart_window_ns: the window that `max_restarts` counts in; stop_grace_ns: from SIGTERM to SIGKILL in a
    run that is stopped by a signal or its user; start_timeout_ns: from a rank's fork to its join, while
    others wait for it.
    """

    job: int
    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    ranks_per_node: int = 1
    nodes_min: int = 1
    nodes_max: int = 1
    on_loss: OnLoss = OnLoss.REPLACE
    max_restarts: int = 3
    restart_window_ns: int = 60 * SECOND_NS
    arena_bytes: int = ARENA_BYTES_DEFAULT
    recovery_budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT
    stop_grace_ns: int = STOP_GRACE_NS_DEFAULT
    start_timeout_ns: int = START_TIMEOUT_NS_DEFAULT

    @property
    def world_size(self) -> int:
        """Ranks when every slot has a node."""
        return self.ranks_per_node * self.nodes_max

    @property
    def ranks_min(self) -> int:
        """So few ranks may be left while the job goes on; 0: it never has fewer than all."""
        if self.on_loss is OnLoss.SHRINK:
            return self.nodes_min  # a rank of each
        return self.nodes_min * self.ranks_per_node if self.nodes_min < self.nodes_max else 0

    def problem(self) -> str:
        """Return why the job is invalid, for its user; empty if it is valid."""
        bounds = (
            ("a job's id", self.job, 1, JOB_ID_MAX),
            ("the ranks of a node", self.ranks_per_node, 1, RANKS_MAX),
            ("the fewest nodes", self.nodes_min, 1, RANKS_MAX),
            ("the most nodes", self.nodes_max, self.nodes_min, RANKS_MAX),
            ("the ranks of a job", self.world_size, 1, RANKS_MAX),
            ("the restarts", self.max_restarts, 0, RESTARTS_MAX),
            ("the restart window in ns", self.restart_window_ns, 1, WINDOW_NS_MAX),
            ("the bytes of an arena", self.arena_bytes, ARENA_BYTES_MIN, ARENA_BYTES_MAX),
            (
                "the recovery budget in ns",
                self.recovery_budget_ns,
                RECOVERY_BUDGET_NS_MIN,
                RECOVERY_BUDGET_NS_MAX,
            ),
            ("the stop grace in ns", self.stop_grace_ns, 0, DURATION_NS_MAX),
            ("the start timeout in ns", self.start_timeout_ns, 1, DURATION_NS_MAX),
        )
        for what, value, least, most in bounds:
            if not least <= value <= most:
                return f"{what} must be {least} to {most}, not {value}"
        return "" if self.target else "no script or module is given"


class CommandRefused(UserError):
    """The order is invalid or cannot be queued; the message says why."""


class SlotState(Enum):
    """State of a rank's current incarnation."""

    captured_as = enum.nonmember("RankState")
    VACANT = "vacant"  # no node runs it
    STARTING = "starting"  # its node is to run it; it has not joined
    UP = "up"
    FINISHED = "finished"  # ended normally
    LOST = "lost"  # ended otherwise, and will not come back


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    """A rank in the table. incarnation: of its process, 0 before the first; node: where that runs or ran.

    address, host, tcp_address: as in `zbmd.actors.view.Member`, once it is up; up_ns: the table's age when it
    came up; cause: of its last failure, no progress since, see `job_rules`; failing: of one that is reported
    next.
    """

    rank: int
    node: NodeKey | None = None
    incarnation: int = 0
    state: SlotState = SlotState.VACANT
    address: str = ""
    host: str = ""
    tcp_address: str = ""
    failing: str = ""
    cause: str = ""
    up_ns: int = 0

    @property
    def lives(self) -> bool:
        """Whether a node is to run it: it is starting or up."""
        return self.state is SlotState.UP or self.state is SlotState.STARTING


class JobPhase(Enum):
    """Phase of a job."""

    WAITING = "waiting"  # for nodes: none of its ranks runs
    RUNNING = "running"
    STOPPING = "stopping"  # asked to stop, or failed: its ranks are being ended
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """A host that was measured for a job with `preflight`. at_ns: the table's age then.

    problem: why it gets no ranks; empty: it is fit.
    """

    node: NodeKey
    at_ns: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job in the table. reason: why it is in this phase.

    epoch: of its view, that of the cluster's view in which its members last changed; 0 before the first;
    unsettled: its members have changed since, or will once the ranks that are starting are up; restarts_ns:
    the table's age at each of the restarts that its window holds; kill: end its ranks without asking;
    users_own: it failed for a reason that only its user can mend; together_ns: the table's age when its
    last rank came up; origin: whether a rank has failed since, for a reason of its own; hosts_fault: it
    failed because a host went or processes of ranks were killed there, and may succeed elsewhere;
    preflight: a host gets ranks only once it was checked; checks: of hosts that are here, in the order of
    their ids, since the ranks were last stopped together; stops: how often they were.
    """

    spec: JobSpec
    submitter: NodeKey
    ranks: tuple[RankEntry, ...]
    phase: JobPhase = JobPhase.WAITING
    reason: str = ""
    epoch: int = 0
    unsettled: bool = False
    restarts_ns: tuple[int, ...] = ()
    restarts_total: int = 0
    outcome: Outcome | None = None
    kill: bool = False
    users_own: bool = False
    together_ns: int = 0
    origin: bool = False
    hosts_fault: bool = False
    preflight: bool = False
    checks: tuple[HostCheck, ...] = ()
    stops: int = 0

    @property
    def id(self) -> int:
        """The job's id."""
        return self.spec.job

    @property
    def exit_code(self) -> int:
        """The exit code for a shell; 0 only after success."""
        if self.outcome is Outcome.SUCCEEDED:
            return 0
        if self.users_own:
            return USAGE_EXIT_CODE
        return REQUEUE_EXIT_CODE if self.hosts_fault and self.outcome is Outcome.FAILED else EXIT_FAILED

    def slot(self, number: int) -> tuple[RankEntry, ...]:
        """Return the ranks of a slot."""
        first = number * self.spec.ranks_per_node
        return self.ranks[first : first + self.spec.ranks_per_node]

    def nodes(self) -> frozenset[NodeKey]:
        """Return the nodes that are to run ranks of the job."""
        return frozenset(entry.node for entry in self.ranks if entry.lives and entry.node is not None)

    def check_of(self, node: NodeKey) -> HostCheck | None:
        """Return the check of a host, however old; None if it has none."""
        return next((check for check in self.checks if check.node == node), None)

    def fit(self, age_ns: int) -> frozenset[NodeKey]:
        """Return the hosts whose check allows ranks when the table has that age."""
        holds_ns = age_ns - CHECK_HOLDS_NS
        return frozenset(one.node for one in self.checks if not one.problem and one.at_ns >= holds_ns)

    def view(self, domains: Mapping[NodeKey, str] = MappingProxyType({})) -> View | None:
        """Return the view that the job's ranks may enter; None while there is none.

        domains: the failure domains that users have named, of nodes.
        """
        if self.phase is not JobPhase.RUNNING or self.epoch == 0 or self.unsettled:
            return None
        return View(
            epoch=self.epoch,
            members=tuple(
                Member(
                    rank=entry.rank,
                    incarnation=entry.incarnation,
                    address=entry.address,
                    host=entry.host,
                    tcp_address=entry.tcp_address,
                    domain="" if entry.node is None else domains.get(entry.node, ""),
                )
                for entry in self.ranks
                if entry.state is SlotState.UP
            ),
            finished=tuple(entry.rank for entry in self.ranks if entry.state is SlotState.FINISHED),
            lost=tuple(entry.rank for entry in self.ranks if entry.state is SlotState.LOST),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefusal:
    """A command that was refused, and why."""

    captured_as: ClassVar[str] = "Refusal"
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Progress of a node's commands. number: of the last one that was applied or refused."""

    node: NodeKey
    number: int
    refused: tuple[CommandRefusal, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobTable:
    """All jobs, in the order of their submission. `origins` is sorted; age_ns: the agreed clock."""

    jobs: tuple[Job, ...] = ()
    origins: tuple[Origin, ...] = ()
    age_ns: int = 0

    @property
    def busy(self) -> bool:
        """Whether any job has not ended."""
        return any(job.phase is not JobPhase.ENDED for job in self.jobs)

    def job(self, job_id: int) -> Job | None:
        """Return the job with that id, or None."""
        return next((job for job in self.jobs if job.id == job_id), None)

    def applied(self, node: NodeKey) -> int:
        """Return the number of the last command of `node` in the table; 0 before the first."""
        origin = next((origin for origin in self.origins if origin.node == node), None)
        return 0 if origin is None else origin.number

    def refusal(self, node: NodeKey, number: int) -> str | None:
        """Return why that command was refused; None if it was applied, is pending, or is long past."""
        for origin in self.origins:
            if origin.node == node:
                return next((r.reason for r in origin.refused if r.number == number), None)
        return None


NO_JOBS = JobTable()


# --- commands -------------------------------------------------------------------------------------------
# Structs with a tag, since they travel as a union.


class Submit(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="submit"):
    """Run a job. preflight: a host gets ranks only once it was checked (`HostsChecked`)."""

    spec: JobSpec
    preflight: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="stop"):
    """End a job; with `kill`, at once. failed: it ends as failed, not as stopped by request."""

    job: int
    reason: str
    kill: bool = False
    failed: bool = False


class RankUp(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="up"):
    """A rank that the sender runs is listening and waits for a view."""

    job: int
    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""


class RankDown(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="down"):
    """The process of a rank that the sender ran is gone, or could not be made.

    code: its exit code, or minus the signal that ended it; None if it is not known (yet). 0 is a normal end.
    """

    job: int
    rank: int
    incarnation: int
    code: int | None
    reason: str


class RankCause(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cause"):
    """The cause of a failure: what tells it from others (`job_rules`). The sender reports the failure next.

    For an incarnation that has its replacement already: the failure was reported before, without a cause.
    """

    job: int
    rank: int
    incarnation: int
    cause: str


class Relink(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="relink"):
    """Links between members of the job's view of `epoch` broke: give the job another view."""

    job: int
    epoch: int


class Progressed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="progressed"):
    """The job has committed a step that none of its ranks had committed before, after a failure."""

    job: int


class HostsChecked(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="checked"):
    """Hosts were measured for a job with `preflight`. hosts: each with why it gets no ranks; empty: fit.

    stops: of the job (`Job.stops`) when that began. It has no effect once the ranks were stopped again.
    """

    job: int
    hosts: tuple[tuple[NodeKey, str], ...]
    stops: int


Order: TypeAlias = Submit | Stop | RankUp | RankDown | RankCause | Relink | Progressed | HostsChecked


class Command(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An order of one node's incarnation. number: counts its orders from 1; each is applied once, in turn."""

    origin: NodeKey
    number: int
    order: Order


def order_bytes(order: Order) -> int:
    """Return the encoded size of an order."""
    return len(msgspec.msgpack.encode(order))


def problem_of(order: Order) -> str:
    """Return why the order is invalid, for its user; empty if it is valid."""
    match order:
        case Submit(spec=spec):
            found = spec.problem()
        case Stop(reason=reason):
            found = _too_long("its reason", reason, REASON_CHARACTERS_MAX)
        case RankUp():
            longest = max(order.address, order.host, order.tcp_address, key=len)
            found = _too_long("an address", longest, ADDRESS_CHARACTERS_MAX)
        case RankDown(reason=reason):
            found = _too_long("its reason", reason, REASON_CHARACTERS_MAX)
        case RankCause(cause=cause):
            found = _too_long("its cause", cause, REASON_CHARACTERS_MAX)
        case HostsChecked(hosts=hosts):
            longest = max((problem for _, problem in hosts), key=len, default="")
            found = _too_long("its reason", longest, REASON_CHARACTERS_MAX)
        case Relink() | Progressed():
            found = ""
    if found:
        return found
    nbytes = order_bytes(order)
    if nbytes > COMMAND_BYTES_MAX:
        return (
            f"the order takes {nbytes} bytes, more than {COMMAND_BYTES_MAX}: put long arguments into a file"
        )
    return ""


def _too_long(what: str, text: str, most: int) -> str:
    return f"{what} has {len(text)} characters, more than {most}" if len(text) > most else ""
