"""The job that a cluster was made for, as one of its nodes sees it (sans-I/O).

`zbmd-node run` on several hosts makes a cluster for one job, which ends with it. No node is the one that
counts: once enough are there, the lowest of the view gives the job to the cluster. If it dies before that is
agreed on, the next lowest does; they all name the job alike, and of two orders for one job the second is
refused. A node that comes later finds the job in the view; when it has ended there, every node leaves.

A founder that has left and comes back founds again: it knows nobody. Nodes that wait for more of them look
for it, and move to its cluster; of two parts, the one without the lowest id moves. Beside a part in which the
job runs, the founder moves: a member of that part contacts it, in the time for which a job that could begin
waits for more nodes (its last call).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeAlias, assert_never

from zbmd.actors.cluster.state.job_table import Job, JobPhase, SlotState
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.process.exit import EXIT_FAILED
from zbmd.actors.view import Outcome
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

STORY_EVENTS_MAX = 16
MOVES = -1
"""In the place of an exit code: this node goes on in another cluster of its run."""


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationBegan:
    """This node begins an incarnation."""

    captured_as: ClassVar[str] = "LifeBegan"
    me: NodeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewActedOn:
    """It acts on a view that it is in."""

    view: ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationEnded:
    """That incarnation is over. Unless it has left, the node tries to come back."""

    captured_as: ClassVar[str] = "LifeEnded"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    """Its user wants an end: of the whole job, or with `leave` of this node's part. The second time, at once.

    exit_code: what this process then ends with.
    """

    reason: str
    exit_code: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPartFound:
    """A node of the same run answers at one of the join addresses. lowest: the lowest id of its view."""

    node: Node
    lowest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPartFound:
    """A member of a part of this run in which the job runs has come here. age_ns: of its cluster."""

    node: Node
    age_ns: int


Event: TypeAlias = (
    IncarnationBegan
    | ViewActedOn
    | IncarnationEnded
    | EndAsked
    | OtherPartFound
    | RunningPartFound
    | TimerFired
)


# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveJob:
    """Give the job to the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """Have the cluster stop the job."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveCluster:
    """Leave the cluster in order."""

    captured_as: ClassVar[str] = "Leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyUser:
    """Inform this node's user."""

    captured_as: ClassVar[str] = "Say"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End this process with that code. The last action, but for another one with `kill`.

    kill: at once; ranks of a node that has left may still be saving.
    """

    exit_code: int
    kill: bool = False


Action: TypeAlias = GiveJob | StopJob | LeaveCluster | NotifyUser | SetTimer | End


class SingleJobState(Enum):
    """The state of this node."""

    SEEKING = "seeking"  # it is in no view
    GATHERING = "gathering"  # in a cluster that has no job yet
    UNDERWAY = "underway"  # the job is in the view
    LEAVING = "leaving"
    OVER = "over"


class SingleJob:
    """See the module. Raises `LocalProtocolError` for events out of turn.

    job: its id; nodes_min, nodes_max: of the job; patience_ns: how long enough nodes may be missing, and how
    long a node that was cut off tries to come back; leave_ns: how long leaving in order may take; grace_ns:
    and its ranks, to save before it leaves; last_call_ns: how long enough nodes wait for further ones before
    the job begins.
    """

    def __init__(
        self,
        job: int,
        *,
        nodes_min: int,
        nodes_max: int,
        patience_ns: int,
        leave_ns: int,
        grace_ns: int = 0,
        last_call_ns: int = 0,
    ) -> None:
        self.state = SingleJobState.SEEKING
        self.job: Job | None = None
        """As this node has seen it last."""
        self.exit_code: int | None = None
        """Once it is known what this process ends with."""
        self.moves_to: Node | None = None
        """The member of the part that this node joins, if that is not where the run's nodes meet."""
        self._id = job
        self._nodes_min = nodes_min
        self._nodes_max = nodes_max
        self._patience_ns = patience_ns
        self._leave_ns = leave_ns
        self._grace_ns = grace_ns
        self._last_call_ns = last_call_ns
        self._begins_ns: int | None = None  # since enough nodes are here
        self._me: NodeKey | None = None
        self._view: ClusterView | None = None
        self._asked: EndAsked | None = None
        self._gave = self._stopped = (
            False  # in this incarnation: an order ends with the incarnation that gave it
        )
        self._waits: tuple[int, str] | None = None  # until when, and for what
        self._timer_ns: int | None = None
        self._said = ""
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._actions: list[Action] = []

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        self._actions = []
        if self.state is SingleJobState.OVER:
            return [End(exit_code=event.exit_code, kill=True)] if isinstance(event, EndAsked) else []
        self._story.append(repr(event)[:200])
        match event:
            case IncarnationBegan(me=me):
                self._me, self._gave, self._stopped, self._begins_ns = me, False, False, None
            case ViewActedOn(view=view):
                self._acts_on(view, now_ns)
            case IncarnationEnded(reason=reason):
                self._incarnation_ended(reason, now_ns)
            case EndAsked():
                self._end_asked(event, now_ns)
            case OtherPartFound():
                self._other_part_found(event, now_ns)
            case RunningPartFound():
                self._running_part_found(event, now_ns)
            case TimerFired():
                self._timer_ns = None
                self._timer(now_ns)
            case _:
                assert_never(event)
        self._set_timer()
        return self._actions

    @property
    def misses_nodes(self) -> bool:
        """Whether this node is in a cluster that has too few nodes for the job."""
        waits = self.job is not None and self.job.phase is JobPhase.WAITING
        return self.state is SingleJobState.GATHERING or (self.state is SingleJobState.UNDERWAY and waits)

    @property
    def age_to_tell_ns(self) -> int | None:
        """The age of the cluster if this node is to look for a founder that is back: the job runs, and misses
        a node; None if it is not."""
        job, view = self.job, self._view
        if job is None or view is None or self.state is not SingleJobState.UNDERWAY:
            return None
        misses = job.phase is JobPhase.RUNNING and len(job.nodes()) < self._nodes_max
        return view.jobs.age_ns if misses and view.nodes[0].key == self._me else None

    def check_invariants(self) -> None:
        """A node that leaves knows its exit code, within a bound."""
        assert (self.exit_code is not None) == (
            self.state in (SingleJobState.LEAVING, SingleJobState.OVER)
        ), self.state
        assert self.state is not SingleJobState.LEAVING or self._waits is not None, "leaving has no bound"
        assert self.state is not SingleJobState.UNDERWAY or self.job is not None, "there is no job"

    # -- what happens ------------------------------------------------------------------------------------

    def _acts_on(self, view: ClusterView, now_ns: int) -> None:
        if self._me is None or not view.holds(self._me):
            raise LocalProtocolError(f"{self._me} is to act on {view}", story=tuple(self._story))
        job, self._view = view.jobs.job(self._id), view
        if job is not None:
            self.job = job
        if self.state is SingleJobState.LEAVING:
            return
        if job is None:
            self._gather(view, now_ns)
        elif job.phase is JobPhase.ENDED:
            asked = self._asked if job.outcome is Outcome.STOPPED else None
            self._leave(job.exit_code if asked is None else asked.exit_code, now_ns)
        else:
            self.state = SingleJobState.UNDERWAY
            self._follow(job, now_ns)

    def _gather(self, view: ClusterView, now_ns: int) -> None:
        self.state = SingleJobState.GATHERING
        here = len(view.nodes)
        if here < self._nodes_min:
            least, most = self._nodes_min, self._nodes_max
            needed = "" if least == most else f", and {least} are needed to begin"
            self._wait(f"{here} of {self._count()} nodes are here{needed}", now_ns)
            return
        self._waits = None
        if self._begins_ns is None:
            self._begins_ns = now_ns + self._last_call_ns
        called = here >= self._nodes_max or now_ns >= self._begins_ns
        if called and view.nodes[0].key == self._me and not self._gave:
            self._gave = True
            self._actions.append(GiveJob())

    def _follow(self, job: Job, now_ns: int) -> None:
        if self._asked is not None and job.phase is not JobPhase.STOPPING and not self._stopped:
            self._stopped = True
            self._actions.append(StopJob(reason=self._asked.reason))
        if job.phase is JobPhase.WAITING:
            self._wait(job.reason, now_ns)
            return
        self._waits = None
        nodes = len(job.nodes())
        finished = any(entry.state is SlotState.FINISHED for entry in job.ranks)
        if job.phase is JobPhase.RUNNING and nodes and not finished:
            self._say(f"the job runs on {nodes} of {self._nodes_max} nodes")

    def _incarnation_ended(self, reason: str, now_ns: int) -> None:
        if self.exit_code is not None:
            self._end(self.exit_code)
            return
        if self._asked is not None:
            self._end(self._asked.exit_code)
            return
        self.state = SingleJobState.SEEKING
        self._me, self._waits = None, None
        self._wait(f"this node has ended its part of the cluster ({reason}) and is not back in it", now_ns)

    def _end_asked(self, event: EndAsked, now_ns: int) -> None:
        again, self._asked = self._asked is not None, event
        if again or self.state is SingleJobState.SEEKING:
            self._end(event.exit_code, kill=again)
        elif self.state is SingleJobState.LEAVING:
            return
        elif event.leave or self.state is SingleJobState.GATHERING:
            grace = format_duration(self._grace_ns)
            self._say(
                f"{event.reason}: this node leaves the job; its ranks have {grace} to end (--stop-grace); "
                "once more to end at once"
            )
            self._leave(event.exit_code, now_ns, grace_ns=self._grace_ns)
        else:
            assert self.job is not None
            self._say(f"{event.reason}: the job is being stopped on all nodes; once more to end here at once")
            self._follow(self.job, now_ns)

    def _other_part_found(self, event: OtherPartFound, now_ns: int) -> None:
        view = self._view
        if not self.misses_nodes or self._asked is not None or view is None or not event.lowest:
            return
        if not any(node.id == event.node.id for node in view.nodes) and event.lowest < view.nodes[0].id:
            self._say(
                f"the run has begun again at {event.node.name or event.node.key}: this node joins it there"
            )
            self._leave(MOVES, now_ns)

    def _running_part_found(self, event: RunningPartFound, now_ns: int) -> None:
        view = self._view
        if view is None or self._asked is not None or any(node.id == event.node.id for node in view.nodes):
            return
        begun = self.state is SingleJobState.UNDERWAY and view.jobs.age_ns >= event.age_ns
        if not begun and self.state in (SingleJobState.GATHERING, SingleJobState.UNDERWAY):
            self._say(
                f"the run is under way at {event.node.name or event.node.key}: this node joins it there"
            )
            self.moves_to = event.node
            self._leave(MOVES, now_ns)

    def _timer(self, now_ns: int) -> None:
        if self.state is SingleJobState.GATHERING and self._waits is None and self._view is not None:
            self._gather(self._view, now_ns)  # the last call is over
        if self._waits is None or self._waits[0] > now_ns:
            return
        waited, what = self._waits[1], format_duration(self._patience_ns)
        if self.state is SingleJobState.LEAVING:
            assert self.exit_code is not None
            self._end(self.exit_code)
        elif self.state is SingleJobState.SEEKING:
            self._say(f"given up after {what}: {waited}. Look at what the other nodes say")
            self._end(EXIT_FAILED)
        else:
            self._say(
                f"given up after {what}: {waited}. Start zbmd-node run on the others too, or give "
                "--join-timeout more time"
            )
            self._leave(EXIT_FAILED, now_ns)

    # -- what follows ------------------------------------------------------------------------------------

    def _leave(self, exit_code: int, now_ns: int, *, grace_ns: int = 0) -> None:
        self.state, self.exit_code = SingleJobState.LEAVING, exit_code
        self._waits = (now_ns + grace_ns + self._leave_ns, "leaving")
        self._actions.append(LeaveCluster())

    def _end(self, exit_code: int, *, kill: bool = False) -> None:
        self.state, self.exit_code, self._waits = SingleJobState.OVER, exit_code, None
        self._actions.append(End(exit_code=exit_code, kill=kill))

    def _wait(self, what: str, now_ns: int) -> None:
        """Wait for something, from the first time on; nobody waits for ever."""
        until_ns = now_ns + self._patience_ns if self._waits is None else self._waits[0]
        self._waits = (until_ns, what)
        if self.state is not SingleJobState.SEEKING:
            self._say(f"{what}; waiting for at most {format_duration(self._patience_ns)}")

    def _count(self) -> str:
        least, most = self._nodes_min, self._nodes_max
        return str(most) if least == most else f"{least} to {most}"

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._actions.append(NotifyUser(text=text))

    def _set_timer(self) -> None:
        due_ns = None if self._waits is None else self._waits[0]
        if self.state is SingleJobState.GATHERING and due_ns is None and not self._gave:
            due_ns = self._begins_ns
        if due_ns is not None and due_ns != self._timer_ns:
            self._actions.append(SetTimer(at_ns=due_ns))
            self._timer_ns = due_ns


def _build_one_job(config: Mapping[str, Any]) -> SingleJob:
    return SingleJob(
        config["job"],
        nodes_min=config["nodes_min"],
        nodes_max=config["nodes_max"],
        patience_ns=config["patience_ns"],
        leave_ns=config["leave_ns"],
        grace_ns=config.get("grace_ns", 0),
        last_call_ns=config.get("last_call_ns", 0),
    )


ONE_JOB: MachineKind[Event, Action] = register(
    "one_job", 3, _build_one_job, events=Event, actions=Action, states=(SingleJob,)
)
"""A node that was started for one job; its configuration: the arguments of `SingleJob`."""
