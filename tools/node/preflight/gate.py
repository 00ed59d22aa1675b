"""The machine of the host gate (sans-I/O): when hosts are measured for a job with `--preflight`.

Before the job begins, before its ranks are started again together, and before a host that has come (or come
back) gets ranks, the hosts concerned are measured: each by itself, then the links between them. The member
with the lowest id that is not quarantined leads; if it goes, the next one begins again. The verdict is an
order (`HostsChecked`), so all members agree on it, and the table (`job_rules`) gives ranks to fit hosts only.

A check ends within `LIMIT_NS`, whatever does not answer. Hosts that run ranks are never measured by
themselves and never quarantined; up to `HELPERS` of them (or of hosts that are fit already) are the other end
of links. A rank that is restarted where it ran waits for no check.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.actors.cluster.state.job_table import CHECK_HOLDS_NS, REASON_CHARACTERS_MAX, Job, JobPhase
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.tools.node.preflight import survey as s
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.machine import SetTimer, TimerFired

LIMIT_NS: Final = 30 * SECOND_NS
"""Of a check, from its begin to its verdict."""
HOSTS_NS: Final = 12 * SECOND_NS
"""A host that has not measured itself by then is not fit."""
LINKS_NS: Final = LIMIT_NS - HOSTS_NS - SECOND_NS
"""For the links of those that have."""
HELPERS: Final = 2
"""Two of them have a link that is known to be good, with which those of others are compared."""
RENEWS_NS: Final = CHECK_HOLDS_NS // 2
"""A host that has no ranks is checked again after so long, so that it can take a slot at once."""
ORDER_NS: Final = 10 * SECOND_NS
"""A verdict that is not in the table by then is made again."""
LATELY_NS: Final = 600 * SECOND_NS
"""A host that was measured as a whole so lately measures processors and memory only."""
KEPT_NS: Final = 60 * SECOND_NS
"""A measurement so young counts as it is, if no rank has run on the host since."""
SLOWER: Final = 0.5
"""Share of its own first speed, below which a host has become slow."""
STORY_EVENTS_MAX: Final = 16


class Depth(Enum):
    """Share of its measurements that a host makes when it is asked to."""

    KEPT = "kept"  # nothing: its last measurement counts
    QUICK = "quick"  # processors and memory
    WHOLE = "whole"


def depth_of(*, whole_ns: int | None, last_ns: int | None, ran_since: bool, now_ns: int) -> Depth:
    """Return how much a host is to measure. whole_ns, last_ns: when it has measured all, and anything, last;
    ran_since: whether ranks have run on it since."""
    if last_ns is not None and not ran_since and now_ns - last_ns < KEPT_NS:
        return Depth.KEPT
    return Depth.QUICK if whole_ns is not None and now_ns - whole_ns < LATELY_NS else Depth.WHOLE


def slower_than_before(first: s.HostSpeed, now: s.HostSpeed) -> str:
    """Return why a host is not fit any more, beside its own first measurement; empty if it is."""
    if now.flops_per_s < SLOWER * first.flops_per_s:
        before, after = first.flops_per_s / 1e9, now.flops_per_s / 1e9
        return f"its processors have {after:,.1f} GFLOP/s, where they had {before:,.1f}"
    if now.memory_per_s < SLOWER * first.memory_per_s:
        before, after = first.memory_per_s / 1e6, now.memory_per_s / 1e6
        return f"its memory has {after:,.0f} MB/s, where it had {before:,.0f}"
    return ""


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """This node acts on a view."""

    me: NodeKey
    view: ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeasured:
    """A host has answered. problem: why it is not fit; empty if it is; speed: None: it was never measured."""

    number: int
    node: NodeKey
    problem: str
    speed: s.HostSpeed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasured:
    """The link of two hosts was measured. found: its speed, or why it could not be."""

    number: int
    one: NodeKey
    other: NodeKey
    found: s.LinkSpeed | str


Event: TypeAlias = Seen | HostMeasured | LinkMeasured | TimerFired


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureHosts:
    """Ask these hosts to measure themselves, and those of `kept` for what they have measured before."""

    number: int
    hosts: tuple[NodeKey, ...]
    kept: tuple[NodeKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLinks:
    """Have these pairs measure their links at once; no host is in two of them."""

    number: int
    pairs: tuple[tuple[NodeKey, NodeKey], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Have the cluster agree on what was found: each host with why it gets no ranks; empty: it is fit.

    stops: of the job when the check began (`Job.stops`).
    """

    hosts: tuple[tuple[NodeKey, str], ...]
    stops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report to this node's user."""

    text: str


Action: TypeAlias = MeasureHosts | MeasureLinks | Judge | Report | SetTimer


class GateState(Enum):
    """The state of this node's part."""

    IDLE = "idle"  # it does not lead, or nothing is to be checked
    HOSTS = "hosts"  # hosts measure themselves
    LINKS = "links"


class HostGate:
    """See the module. job: the id of the job."""

    def __init__(self, job: int) -> None:
        self.state = GateState.IDLE
        self._job = job
        self._me: NodeKey | None = None
        self._view: ClusterView | None = None
        self._seen_ns = 0
        self._number = 0
        """Of the check under way, or the last one."""
        self._began_ns = 0
        self._again = False
        """Whether ranks of the job have run before this check."""
        self._stops = 0
        """Of the job when the check began: what was measured before a stop does not count after it."""
        self._due: tuple[Node, ...] = ()
        self._helpers: tuple[Node, ...] = ()
        self._waits: set[NodeKey] = set()
        self._problems: dict[NodeKey, str] = {}
        self._speeds: dict[NodeKey, s.HostSpeed] = {}
        self._links: s.LinkSurvey | None = None
        self._surveyed: tuple[Node, ...] = ()
        self._ordered: dict[NodeKey, int] = {}
        """Hosts of the last verdict, with the time of the check that each had before; -1: none."""
        self._ordered_until_ns = 0
        self._timer_ns: int | None = None
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._actions: list[Action] = []

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        self._actions = []
        self._story.append(repr(event)[:200])
        match event:
            case Seen(me=me, view=view):
                self._me, self._view, self._seen_ns = me, view, now_ns
                self._settle_order(view)
                if not self._leads() or self._is_outdated():
                    self._end()
                for key in [key for key in self._waits if not view.holds(key)]:
                    self._waits.discard(key)
                    self._problems[key] = "it has left"
            case HostMeasured(number=number, node=node):
                if self.state is GateState.HOSTS and number == self._number and node in self._waits:
                    self._host_measured(event)
            case LinkMeasured(number=number):
                if self.state is GateState.LINKS and number == self._number:
                    self._link_measured(event, now_ns)
            case TimerFired():
                if self._timer_ns is not None and now_ns < self._timer_ns:  # a clock was rounded
                    return [SetTimer(at_ns=self._timer_ns)]
                self._timer_ns = None
                if self.state is GateState.LINKS:
                    self._survey(event, now_ns)
            case _:
                assert_never(event)
        if self.state is GateState.HOSTS and (not self._waits or now_ns >= self._began_ns + HOSTS_NS):
            self._survey_links(now_ns)
        if self.state is GateState.IDLE:
            self._begin(now_ns)
        return self._actions

    def check_invariants(self) -> None:
        """A check has hosts and a timer, which bounds it."""
        if self.state is GateState.IDLE:
            assert not self._waits and self._links is None, self.state
            return
        assert self._due, "a check of no host"
        assert self._timer_ns is not None, f"{self.state} has no timer"
        assert self._timer_ns <= self._began_ns + LIMIT_NS, "a check takes too long"
        assert (self._links is not None) == (self.state is GateState.LINKS), self.state

    # -- who is to be checked ----------------------------------------------------------------------------

    def _wanted(self) -> Job | None:
        """Return the job if its hosts are to be checked."""
        job = None if self._view is None else self._view.jobs.job(self._job)
        if job is None or not job.preflight or job.phase not in (JobPhase.WAITING, JobPhase.RUNNING):
            return None
        return job

    def _leads(self) -> bool:
        job, view = self._wanted(), self._view
        if job is None or view is None:
            return False
        bad = {check.node for check in job.checks if check.problem}
        return next((node.key for node in view.nodes if node.key not in bad), None) == self._me

    def _is_outdated(self) -> bool:
        """Whether the ranks were stopped together since the last check began."""
        job = self._wanted()
        return job is not None and job.stops != self._stops

    def _begin(self, now_ns: int) -> None:
        job, view = self._wanted(), self._view
        if job is None or view is None or not self._leads():
            return
        if self._ordered:
            if now_ns < self._ordered_until_ns:
                self._set_timer(self._ordered_until_ns)
                return
            self._ordered = {}
        runs, checks = job.nodes(), {check.node: check for check in job.checks}
        good = [node for node in view.nodes if node.key not in checks or not checks[node.key].problem]
        if job.phase is JobPhase.WAITING and len(good) < job.spec.nodes_min:
            return  # more have to come first: a host alone has no link to measure
        age_ns = view.jobs.age_ns + now_ns - self._seen_ns
        due_ns = {
            node.key: checks[node.key].at_ns + RENEWS_NS if node.key in checks else age_ns
            for node in good
            if node.key not in runs
        }
        due = tuple(node for node in good if due_ns.get(node.key, age_ns + 1) <= age_ns)
        if not due:
            if due_ns:
                self._set_timer(now_ns + min(due_ns.values()) - age_ns)
            return
        self._due, self._again = due, any(entry.incarnation for entry in job.ranks)
        self._stops = job.stops
        self._helpers = tuple(node for node in good if node not in due)[:HELPERS]
        self._number, self._began_ns, self.state = self._number + 1, now_ns, GateState.HOSTS
        self._problems, self._speeds = {}, {}
        hosts, kept = tuple(one.key for one in due), tuple(one.key for one in self._helpers)
        self._waits = {*hosts, *kept}
        self._actions.append(MeasureHosts(number=self._number, hosts=hosts, kept=kept))
        self._set_timer(now_ns + HOSTS_NS)

    # -- a check -----------------------------------------------------------------------------------------

    def _host_measured(self, event: HostMeasured) -> None:
        self._waits.discard(event.node)
        if event.speed is not None:
            self._speeds[event.node] = event.speed
        if event.problem:
            self._problems[event.node] = event.problem

    def _survey_links(self, now_ns: int) -> None:
        silent, self._waits = self._waits, set()
        for key in silent:
            self._problems[key] = f"it has not measured itself within {HOSTS_NS // SECOND_NS} s"
        # A helper that does not answer is left out, and not judged.
        helpers = [node for node in self._helpers if node.key not in self._problems]
        here = (*helpers, *(node for node in self._due if node.key not in self._problems))
        if len(here) < 2 or len(here) == len(helpers):
            self._judge((), now_ns)
            return
        self._surveyed, self._links, self.state = here, s.LinkSurvey(), GateState.LINKS
        places = {node.key: place for place, node in enumerate(here)}
        speeds = {places[key]: speed for key, speed in self._speeds.items() if key in places}
        names = tuple(node.name or str(node.key) for node in here)
        self._survey(s.Began(hosts=names, speeds=speeds, until_ns=now_ns + LINKS_NS), now_ns)

    def _link_measured(self, event: LinkMeasured, now_ns: int) -> None:
        places = {node.key: place for place, node in enumerate(self._surveyed)}
        one, other = places.get(event.one), places.get(event.other)
        if one is not None and other is not None:
            pair = min(one, other), max(one, other)
            self._survey(s.PairMeasured(pair=pair, found=event.found), now_ns)

    def _survey(self, event: s.Event, now_ns: int) -> None:
        assert self._links is not None
        keys = [node.key for node in self._surveyed]
        for action in self._links.handle(event, now_ns=now_ns):
            match action:
                case s.MeasurePairs(pairs=pairs):
                    asked = tuple((keys[one], keys[other]) for one, other in pairs)
                    self._actions.append(MeasureLinks(number=self._number, pairs=asked))
                case SetTimer(at_ns=at_ns):
                    self._set_timer(at_ns)
                case s.Surveyed():
                    self._take(action)
                    self._judge(action.notes, now_ns)
                    return

    def _take(self, found: s.Surveyed) -> None:
        for one in found.bad:
            self._problems[self._surveyed[one.place].key] = one.reason
        if not found.usable:
            for node in self._surveyed:
                self._problems.setdefault(node.key, "no two hosts have a good link")

    def _judge(self, notes: tuple[str, ...], now_ns: int) -> None:
        for note in notes:
            self._report(note)
        for node in self._helpers:
            if problem := self._problems.get(node.key):
                self._report(f"{node.name} keeps its ranks, although {problem}")
        job = self._wanted()
        assert job is not None, "it leads"
        # A host whose links nobody could measure is judged once others are there, unless it is enough alone.
        alone = not self._surveyed and job.spec.nodes_min > 1
        hosts = tuple(
            (node.key, self._problems.get(node.key, "")[:REASON_CHARACTERS_MAX])
            for node in self._due
            if node.key in self._problems or not alone
        )
        for node in self._due:
            if problem := self._problems.get(node.key):
                self._report(f"{node.name} does not take part: {problem}")
        count, bad = len(hosts), sum(bool(problem) for _, problem in hosts)
        took_s = (now_ns - self._began_ns) / SECOND_NS
        when = "before ranks start again" if self._again else "before the job begins"
        if hosts:
            text = f"{when}: {count - bad} of {count} hosts are fit, checked in {took_s:.1f} s"
            self._report(text + self._all_hosts(job, dict(hosts)))
            self._actions.append(Judge(hosts=hosts, stops=self._stops))
        before = {check.node: check.at_ns for check in job.checks}
        self._ordered = {node.key: before.get(node.key, -1) for node in self._due}
        self._ordered_until_ns = now_ns + ORDER_NS
        self._end()

    def _all_hosts(self, job: Job, found: Mapping[NodeKey, str]) -> str:
        """Return how many hosts are fit in all if there are more than this check, which has `found`, has."""
        assert self._view is not None, "it leads"
        here = [node.key for node in self._view.nodes]
        fit = job.nodes() | {check.node for check in job.checks if not check.problem}
        count = sum(not found[key] if key in found else key in fit for key in here)
        return f" (all hosts: {count} of {len(here)})" if set(here) - found.keys() else ""

    def _settle_order(self, view: ClusterView) -> None:
        """Forget an outdated verdict, and its hosts that are gone or whose check is in the table."""
        if self._is_outdated():
            self._ordered = {}
            return
        job = view.jobs.job(self._job)
        now = {} if job is None else {check.node: check.at_ns for check in job.checks}
        self._ordered = {
            node: at_ns
            for node, at_ns in self._ordered.items()
            if view.holds(node) and now.get(node, -1) == at_ns
        }

    def _end(self) -> None:
        """End the check under way, if there is one."""
        self.state, self._links, self._surveyed = GateState.IDLE, None, ()
        self._waits = set()

    def _report(self, text: str) -> None:
        self._actions.append(Report(text=f"preflight: {text}"))

    def _set_timer(self, at_ns: int) -> None:
        if at_ns != self._timer_ns:
            self._timer_ns = at_ns
            self._actions.append(SetTimer(at_ns=at_ns))
