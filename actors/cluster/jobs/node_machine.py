"""The machine of the jobs of one node (sans-I/O): it has its processes be what the job table says.

With every view of the cluster that the node acts on, it starts the ranks that the table has given to this
node, ends those that it has taken away, and tells its ranks of their job's views.

**A job's view is entered by all of its members or overtaken on all of them.** Once all of its own members
are linked, a host promises so to the job's other hosts, and its ranks enter once all hosts have promised. A
host that has promised goes on to a later view only if that view was entered, if a member of it is gone, or if
another host says that it went on without a promise: then nobody can have entered.

**A node whose incarnation in the cluster ends kills its ranks at once**, unless it has left: then the others
have agreed to go on without it, and its ranks have the time to save that their job states. Its membership
ends an incarnation within the recovery budget after it has lost touch with a quorum, so ranks of a node that
was cut off outlive the view that gave their work to others by little more than that; they are in an older
epoch of their job, and no member of the newer one listens to them.

**Links between ranks that live can break.** A rank that lost one waits for a view. If none comes although
there was time to agree on any death, its host asks for another view of the same members, in which they link
up again.

**A process that never joins holds up nobody for ever.** The others' next view waits for it. One that has not
joined within the job's `start_timeout_ns` of its fork is killed, and reported down to the table. That holds
once the job has had a view: before the first one a rank may take its time, for nobody is at work yet.

**A run that is stopped by a signal or its user gives its ranks the time to save that the job states.** A run
that failed ends as fast as the recovery budget says: nothing of it is to be saved by ranks that wait for one
that is gone.

**A process that outlives SIGKILL holds up the end of its job for `stop_kill_ns`.** Then it is reported down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, assert_never

from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.membership.machine import LEFT
from zbmd.actors.cluster.state.job_table import (
    GRACE_OVER,
    REASON_CHARACTERS_MAX,
    STILL_RUNNING,
    Job,
    JobPhase,
    JobSpec,
    Progressed,
    RankCause,
    RankDown,
    RankEntry,
    RankUp,
    Relink,
    SlotState,
)
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.view import Outcome, View
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.clock.deadlines import Deadlines, derive, format_duration
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

STORY_EVENTS_MAX = 16
PROMISES_KEPT = 16
WORDS_MAX = 4096
"""Words of other hosts kept for one job; a host that misses one asks again."""
KILLED = "killed (its exit status is not known yet)"
NO_VIEW = View(epoch=0, members=())


class ProcessState(Enum):
    """The state of a process on this node."""

    FORKING = "forking"
    STARTED = "started"
    JOINED = "joined"


@dataclass(slots=True)
class LocalProcess:
    """A process of this node, from the decision to fork it until its exit status is known.

    told: its end was reported to the cluster, or need not be; caused: and the cause of it; asked: it was
    asked to end, so that its end is no failure; saves: its node leaves, and it has the time to save;
    kill_at_ns: when it is killed, if it was asked to end; late: it had not ended by then, although its user
    gave it the time; gone_by_ns: when it is not waited for any more, once it was killed; linked: the epoch
    of the newest view for which it is linked; hurried: others wait for its join; join_by_ns: when it is
    given up, unless it joins; given_up: why it was; early: its join, if that came before its fork was known.
    """

    key: RankKey
    state: ProcessState = ProcessState.FORKING
    told: bool = False
    caused: bool = False
    condemned: bool = False
    killed: bool = False
    asked: bool = False
    saves: bool = False
    kill_at_ns: int | None = None
    late: bool = False
    gone_by_ns: int | None = None
    linked: int = 0
    hurried: bool = False
    join_by_ns: int | None = None
    given_up: str = ""
    early: e.Joined | None = None


@dataclass(slots=True)
class LocalJob:
    """A job of which this node runs, or ran, ranks."""

    spec: JobSpec
    deadlines: Deadlines
    processes: dict[tuple[int, int], LocalProcess] = field(
        default_factory=dict[tuple[int, int], LocalProcess]
    )
    started: dict[int, int] = field(default_factory=dict[int, int])
    """By rank, the last incarnation that was started here."""
    view: View = NO_VIEW
    """The view that was sent to our ranks last."""
    hosts: frozenset[NodeKey] = frozenset()
    """The other hosts of that view."""
    entered: int = 0
    promised: deque[int] = field(default_factory=lambda: deque[int](maxlen=PROMISES_KEPT))
    words: dict[tuple[int, NodeKey], bool] = field(default_factory=dict[tuple[int, NodeKey], bool])
    """By epoch and host, whether it has promised, or has gone on without."""
    ask_at_ns: int | None = None
    relink_at_ns: int | None = None
    """When another view is asked for: a member of ours has lost a link in the one that was entered."""
    relinked: int = 0
    """The epoch of the newest view that another was asked for."""
    progressed: int = 0
    """The epoch of the newest view that progress was reported of."""

    def living(self, rank: int, incarnation: int) -> LocalProcess | None:
        """The process, if nothing speaks against its being alive."""
        process = self.processes.get((rank, incarnation))
        return process if process is not None and not process.told and not process.condemned else None

    def joined(self) -> tuple[int, ...]:
        """The ranks that can receive a message."""
        alive = [p for p in self.processes.values() if p.state is ProcessState.JOINED and not p.told]
        return tuple(sorted({process.key.rank for process in alive}))


class LocalJobs:
    """The jobs of one node, over all its incarnations. Raises `LocalProtocolError` for events out of turn."""

    def __init__(self) -> None:
        self.me: NodeKey | None = None
        self.view = ClusterView(epoch=0, nodes=())
        self.jobs: dict[int, LocalJob] = {}
        self.story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self._leaving = False
        self._timer_ns: int | None = None
        self._actions: list[e.Action] = []

    def handle(self, event: e.Event, *, now_ns: int) -> list[e.Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        self._actions = []
        told = str(event.view) if isinstance(event, e.ViewActedOn) else repr(event)  # not the whole table
        self.story.append(told[:200])
        match event:
            case e.IncarnationBegan(me=me):
                self.me = me
            case e.IncarnationEnded(reason=reason):
                self._end_incarnation(now_ns, left=reason == LEFT)
            case e.LeaveAsked():
                self._leave(now_ns)
            case e.ViewActedOn(view=view):
                self._act_on(view, now_ns)
            case e.HostReported(sender=sender, word=word):
                self._host_said(sender, word)
            case e.Forked(key=key):
                self._forked(key, now_ns)
            case e.ForkFailed(key=key, reason=reason):
                self._ended(key, None, reason)
            case e.Joined():
                self._joined(event)
            case e.Linked(key=key, epoch=epoch):
                process = self._process(key)
                if process is not None:
                    process.linked = max(process.linked, epoch)
            case e.LinkLost(key=key, epoch=epoch):
                self._link_lost(key, epoch, now_ns)
            case e.LossProven():
                self._loss_proven(event)
            case e.Exited(key=key, code=code, reason=reason, cause=cause):
                self._ended(key, code, reason, cause)
            case e.StepCommitted(job=job_id):
                self._step_committed(job_id)
            case TimerFired():
                self._timer_ns = None
                self._timer(now_ns)
            case _:
                assert_never(event)
        for local in list(self.jobs.values()):
            self._advance(local, now_ns)
        if self._leaving and self._is_missed():
            self._leaving = False
            self._do(e.LeaveCluster())
        self._set_timer()
        return self._actions

    def last_kill_ns(self) -> int | None:
        """Return when the last process that was asked to end will be killed; None if there is none."""
        processes = [p for local in self.jobs.values() for p in local.processes.values()]
        return max((p.kill_at_ns for p in processes if p.kill_at_ns is not None), default=None)

    def check_invariants(self) -> None:
        """No rank has two processes that may go on, and no view is entered that was not promised."""
        for local in self.jobs.values():
            ranks = [p.key.rank for p in local.processes.values() if not p.condemned and not p.told]
            assert len(ranks) == len(set(ranks)), f"two processes of one rank: {sorted(ranks)}"
            assert local.entered <= local.view.epoch, (local.entered, local.view.epoch)
            assert local.entered == 0 or local.entered in local.promised, (local.entered, local.promised)
            assert len(local.words) <= WORDS_MAX, len(local.words)
            for rank, incarnation in local.processes:
                assert incarnation <= local.started[rank], (rank, incarnation)

    # -- the cluster -------------------------------------------------------------------------------------

    def _act_on(self, view: ClusterView, now_ns: int) -> None:
        if self.me is None or not view.holds(self.me):
            raise LocalProtocolError(f"{self.me} is to act on {view}", story=tuple(self.story))
        before, self.view = self.view, view
        for job in view.jobs.jobs:
            if self.me in job.nodes() and job.id not in self.jobs:
                self.jobs[job.id] = LocalJob(job.spec, derive(job.spec.recovery_budget_ns))
                self._do(e.Open(spec=job.spec))
        for job_id, local in self.jobs.items():
            self._announce_others(local, before.jobs.job(job_id), view.jobs.job(job_id))
            self._bring(local, view.jobs.job(job_id), self.me, now_ns)

    def _bring(self, local: LocalJob, job: Job | None, me: NodeKey, now_ns: int) -> None:
        """End what the table has taken from this node, and start what it has given to it."""
        for process in local.processes.values():
            key = process.key
            entry = job.ranks[key.rank] if job is not None else None
            if not (entry and entry.lives and entry.node == me and entry.incarnation == key.incarnation):
                process.told = True
                self._condemn(local, process, now_ns, kill=False)
            elif job is not None and job.phase is JobPhase.STOPPING:
                self._condemn(local, process, now_ns, kill=job.kill)
        for entry in job.ranks if job is not None else ():
            starts = entry.node == me and entry.state is SlotState.STARTING
            if not starts or entry.incarnation <= local.started.get(entry.rank, 0):
                continue
            assert job is not None
            key = RankKey(job.id, entry.rank, entry.incarnation)
            if job.phase is JobPhase.RUNNING:
                local.started[entry.rank] = entry.incarnation
                local.processes[entry.rank, entry.incarnation] = LocalProcess(key, hurried=job.epoch > 0)
                self._do(e.Fork(key=key, reason=job.reason))
            elif job.phase is JobPhase.STOPPING:  # the view that gave it to us was never acted on here
                local.started[entry.rank] = entry.incarnation
                self._do(e.ProposeOrder(order=_never_started(key)))

    def _end_incarnation(self, now_ns: int, *, left: bool) -> None:
        """End everything that runs here: at once, unless the node has left and no other one misses it."""
        self.view = ClusterView(epoch=0, nodes=())
        for local in self.jobs.values():
            for process in local.processes.values():
                process.told = True
                if left:
                    self._end_in_order(local, process, now_ns)
                else:
                    self._condemn(local, process, now_ns, kill=True)
            local.view, local.hosts, local.entered, local.ask_at_ns = NO_VIEW, frozenset(), 0, None
            local.relink_at_ns = None
            local.promised.clear()
            local.words.clear()

    def _leave(self, now_ns: int) -> None:
        """Ask all ranks to end. Their job's other hosts hear of it by the view without this node."""
        self._leaving = True
        for local in self.jobs.values():
            for process in local.processes.values():
                process.told = True
                self._end_in_order(local, process, now_ns)

    def _end_in_order(self, local: LocalJob, process: LocalProcess, now_ns: int) -> None:
        """Have a process of a node that leaves end, with the time to save that its job states."""
        if process.saves:
            return
        process.saves = True
        self._condemn(local, process, now_ns, kill=False)
        if process.kill_at_ns is not None:  # also if a view had left it less
            process.kill_at_ns = now_ns + local.spec.stop_grace_ns

    def _is_missed(self) -> bool:
        """Return whether another host waits, or would soon wait, for a rank of this node."""
        for local in self.jobs.values():
            job = self.view.jobs.job(local.spec.job)
            if job is None or job.phase is not JobPhase.RUNNING or job.unsettled or job.epoch > local.entered:
                return True
            own = [entry for entry in job.ranks if entry.lives and entry.node == self.me]
            if not all(self._runs(local, entry) for entry in own):
                return True
        return not self.jobs

    def _runs(self, local: LocalJob, entry: RankEntry) -> bool:
        process = local.processes.get((entry.rank, entry.incarnation))
        return process is not None and not process.killed

    def _announce_others(self, local: LocalJob, before: Job | None, after: Job | None) -> None:
        """Tell our ranks of the ends of processes on other hosts."""
        to = local.joined()
        if before is None or not to:
            return
        for was in before.ranks:
            if was.state is not SlotState.UP or was.node is None or was.node == self.me:
                continue
            now = after.ranks[was.rank] if after is not None else None
            if now is None or not now.lives or now.incarnation != was.incarnation:
                key = RankKey(local.spec.job, was.rank, was.incarnation)
                says = "says so" if self.view.holds(was.node) else "went"
                reason = f"its host {was.node} {says}"
                self._do(e.AnnounceDown(key=key, reason=reason, confirmed=True, to=to))

    # -- processes ---------------------------------------------------------------------------------------

    def _process(self, key: RankKey) -> LocalProcess | None:
        local = self.jobs.get(key.job)
        return None if local is None else local.processes.get((key.rank, key.incarnation))

    def _forked(self, key: RankKey, now_ns: int) -> None:
        process = self._process(key)
        if process is None or process.state is not ProcessState.FORKING:
            raise LocalProtocolError(f"{key} was not to be forked", story=tuple(self.story))
        process.state = ProcessState.STARTED
        if process.hurried:
            process.join_by_ns = now_ns + self.jobs[key.job].spec.start_timeout_ns
        if process.condemned:  # the fork crossed the decision to end it
            process.condemned = False
            self._condemn(self.jobs[key.job], process, now_ns, kill=process.killed)
        elif process.early is not None:
            self._joined(process.early)

    def _joined(self, event: e.Joined) -> None:
        key, process = event.key, self._process(event.key)
        if process is None or process.state is ProcessState.JOINED or process.condemned or process.told:
            return  # a join may come after its own death, or twice: it is another process that says so
        if process.state is ProcessState.FORKING:  # it runs before its template has said that, and its pid
            process.early = event
            return
        process.state, process.early = ProcessState.JOINED, None
        process.join_by_ns = None
        up = RankUp(
            job=key.job,
            rank=key.rank,
            incarnation=key.incarnation,
            address=event.address,
            host=event.host,
            tcp_address=event.tcp_address,
        )
        self._do(e.ProposeOrder(order=up))

    def _loss_proven(self, event: e.LossProven) -> None:
        key, process = event.key, self._process(event.key)
        if process is None:
            return
        self._report_end(process, None, event.reason or KILLED, event.cause)
        process.condemned = process.killed = True  # there is nothing left to end
        process.kill_at_ns = process.gone_by_ns = None
        self._announce(key, KILLED, confirmed=False)

    def _link_lost(self, key: RankKey, epoch: int, now_ns: int) -> None:
        local = self.jobs.get(key.job)
        if local is None or local.living(key.rank, key.incarnation) is None:
            return
        if epoch == local.entered and epoch > local.relinked and local.relink_at_ns is None:
            deadlines = local.deadlines
            # The death of a process on this host is proven at once; that of another host is suspected first.
            suspicion_ns = deadlines.suspicion_ns if local.hosts else 0
            local.relink_at_ns = now_ns + suspicion_ns + deadlines.agreement_ns

    def _step_committed(self, job_id: int) -> None:
        """Report the first step after a failure, of the view that came after it: ranks can get on."""
        job, local = self.view.jobs.job(job_id), self.jobs.get(job_id)
        if job is None or local is None or job.unsettled or local.entered != job.epoch:
            return
        if local.progressed != job.epoch and any(entry.cause for entry in job.ranks):
            local.progressed = job.epoch
            self._do(e.ProposeOrder(order=Progressed(job=job_id)))

    def _ended(self, key: RankKey, code: int | None, reason: str, cause: str = "") -> None:
        process = self._process(key)
        if process is None:
            raise LocalProtocolError(f"{key} does not run", story=tuple(self.story))
        if process.told and cause and not process.caused and not process.asked:
            self._report_cause(process, cause)  # its death was proven before its template had read why
        self._report_end(process, code, reason, cause)
        del self.jobs[key.job].processes[key.rank, key.incarnation]
        self._announce(key, reason, confirmed=True)

    def _report_end(self, process: LocalProcess, code: int | None, reason: str, cause: str = "") -> None:
        if process.told:
            return
        process.told = True
        key, reason = process.key, GRACE_OVER if process.late else reason[:REASON_CHARACTERS_MAX]
        if cause:
            self._report_cause(process, cause)
        down = RankDown(job=key.job, rank=key.rank, incarnation=key.incarnation, code=code, reason=reason)
        self._do(e.ProposeOrder(order=down))

    def _report_cause(self, process: LocalProcess, cause: str) -> None:
        process.caused, key = True, process.key
        cause = cause[:REASON_CHARACTERS_MAX]
        order = RankCause(job=key.job, rank=key.rank, incarnation=key.incarnation, cause=cause)
        self._do(e.ProposeOrder(order=order))

    def _give_up(self, local: LocalJob, process: LocalProcess, now_ns: int) -> None:
        """Others wait for a process that does not come."""
        waited = format_duration(local.spec.start_timeout_ns)
        process.given_up = (
            f"it was started {waited} ago and has not joined its job, whose other ranks wait for it: call "
            "`zbmd.join` before what takes longer, or give it more time with --start-timeout"
        )
        self._report_end(process, None, process.given_up)
        self._condemn(local, process, now_ns, kill=True)
        process.asked = False  # its end is a failure: it was to join

    def _announce(self, key: RankKey, reason: str, *, confirmed: bool) -> None:
        to = tuple(rank for rank in self.jobs[key.job].joined() if rank != key.rank)
        if to:
            self._do(e.AnnounceDown(key=key, reason=reason, confirmed=confirmed, to=to))

    def _condemn(self, local: LocalJob, process: LocalProcess, now_ns: int, *, kill: bool) -> None:
        """Have a process end; with `kill`, at once."""
        exists = process.state is not ProcessState.FORKING
        process.join_by_ns = None
        if kill and not process.killed:
            process.killed = True
            ends = exists
        else:
            ends = not process.condemned and exists
        process.condemned = True
        if process.killed:
            process.kill_at_ns = None
        if not ends:
            return
        process.asked = True
        if process.killed:
            self._do(e.Kill(key=process.key))
            process.gone_by_ns = None if process.told else now_ns + local.deadlines.stop_kill_ns
        else:
            self._do(e.Terminate(key=process.key))
            process.kill_at_ns = now_ns + self._grace_ns(local, process)

    def _grace_ns(self, local: LocalJob, process: LocalProcess) -> int:
        """Return how long a process that is asked to end may take."""
        saves = process.saves or self._is_stopped(local)
        return local.spec.stop_grace_ns if saves else local.deadlines.stop_grace_ns

    def _is_stopped(self, local: LocalJob) -> bool:
        """Return whether the job is being stopped by a signal or its user, and did not fail."""
        job = self.view.jobs.job(local.spec.job)
        return job is not None and job.phase is JobPhase.STOPPING and job.outcome is Outcome.STOPPED

    # -- views of jobs -----------------------------------------------------------------------------------

    def _advance(self, local: LocalJob, now_ns: int) -> None:
        """Promise, enter, and go on to a later view, as far as that goes."""
        job = self.view.jobs.job(local.spec.job)
        if job is None or job.phase is JobPhase.ENDED or self.me is None:
            if not local.processes:
                del self.jobs[local.spec.job]
                self._do(e.Close(job=local.spec.job))
            return
        doomed = any(_is_gone(job.ranks[m.rank], m.incarnation) for m in local.view.members)
        if not doomed and local.view.epoch > local.entered:
            self._promise(local, now_ns)
            self._enter(local)
        if job.epoch > local.view.epoch and self._may_go_on(local, doomed=doomed):
            view = job.view(self.view.domains)
            if view is not None:
                self._install(local, job, view, self.me)

    def _promise(self, local: LocalJob, now_ns: int) -> None:
        epoch, own = local.view.epoch, self._own_members(local)
        if epoch in local.promised or not own or any(p is None or p.linked < epoch for p in own):
            return
        local.promised.append(epoch)
        local.ask_at_ns = now_ns + local.deadlines.agreement_ns
        for host in sorted(local.hosts):
            self._do(e.SendToHost(to=host, word=HostLinked(job=local.spec.job, epoch=epoch, linked=True)))

    def _enter(self, local: LocalJob) -> None:
        epoch = local.view.epoch
        if epoch not in local.promised or not all(local.words.get((epoch, host)) for host in local.hosts):
            return
        local.entered, local.ask_at_ns = epoch, None
        to = tuple(process.key.rank for process in self._own_members(local) if process is not None)
        self._do(e.EnterView(job=local.spec.job, epoch=epoch, to=to))

    def _may_go_on(self, local: LocalJob, *, doomed: bool) -> bool:
        epoch = local.view.epoch
        if epoch not in local.promised or epoch == local.entered or doomed:
            return True
        return any(local.words.get((epoch, host)) is False for host in local.hosts)

    def _install(self, local: LocalJob, job: Job, view: View, me: NodeKey) -> None:
        passed = local.view.epoch
        if passed not in local.promised and self._own_members(local):
            for host in sorted(local.hosts):
                self._do(e.SendToHost(to=host, word=HostLinked(job=job.id, epoch=passed, linked=False)))
        hosts = {job.ranks[member.rank].node for member in view.members}
        local.view, local.ask_at_ns, local.relink_at_ns = view, None, None
        local.hosts = frozenset(host for host in hosts if host is not None and host != me)
        local.words = {key: word for key, word in local.words.items() if key[0] >= view.epoch}
        to = tuple(process.key.rank for process in self._own_members(local) if process is not None)
        if to:
            self._do(e.InstallView(job=job.id, view=view, to=to))

    def _own_members(self, local: LocalJob) -> list[LocalProcess | None]:
        """Our processes in the view that was sent last; None for one that does not live."""
        own = [m for m in local.view.members if local.started.get(m.rank) == m.incarnation]
        return [local.living(member.rank, member.incarnation) for member in own]

    def _host_said(self, sender: NodeKey, word: HostLinked) -> None:
        if not self.view.holds(sender):
            return
        local = self.jobs.get(word.job)
        known = NO_VIEW if local is None else local.view
        if local is not None and word.epoch >= known.epoch and len(local.words) < WORDS_MAX:
            local.words[word.epoch, sender] = word.linked
        if not word.ask:
            return
        promised = local is not None and word.epoch in local.promised
        passed = word.epoch < known.epoch or (local is None and word.epoch <= self.view.epoch)
        if promised or passed:
            answer = HostLinked(job=word.job, epoch=word.epoch, linked=promised)
            self._do(e.SendToHost(to=sender, word=answer))

    # -- time --------------------------------------------------------------------------------------------

    def _timer(self, now_ns: int) -> None:
        for local in self.jobs.values():
            for process in local.processes.values():
                if process.join_by_ns is not None and process.join_by_ns <= now_ns:
                    self._give_up(local, process, now_ns)
                if process.kill_at_ns is not None and process.kill_at_ns <= now_ns:
                    process.late = self._is_stopped(local)
                    self._condemn(local, process, now_ns, kill=True)
                if process.gone_by_ns is not None and process.gone_by_ns <= now_ns:
                    process.gone_by_ns, process.late = None, False
                    self._report_end(process, None, STILL_RUNNING)
            if local.relink_at_ns is not None and local.relink_at_ns <= now_ns:
                local.relink_at_ns, local.relinked = None, local.entered
                self._do(e.ProposeOrder(order=Relink(job=local.spec.job, epoch=local.entered)))
            if local.ask_at_ns is not None and local.ask_at_ns <= now_ns:
                local.ask_at_ns = now_ns + local.deadlines.agreement_ns
                epoch = local.view.epoch
                word = HostLinked(job=local.spec.job, epoch=epoch, linked=True, ask=True)
                for host in sorted(local.hosts):
                    if (epoch, host) not in local.words:
                        self._do(e.SendToHost(to=host, word=word))

    def _set_timer(self) -> None:
        times = [local.ask_at_ns for local in self.jobs.values()]
        times += [local.relink_at_ns for local in self.jobs.values()]
        processes = [p for local in self.jobs.values() for p in local.processes.values()]
        times += [at_ns for p in processes for at_ns in (p.kill_at_ns, p.gone_by_ns, p.join_by_ns)]
        due_ns = min((at_ns for at_ns in times if at_ns is not None), default=None)
        if due_ns is not None and due_ns != self._timer_ns:
            self._do(SetTimer(at_ns=due_ns))
        self._timer_ns = due_ns

    def _do(self, action: e.Action) -> None:
        self._actions.append(action)


def _is_gone(entry: RankEntry, incarnation: int) -> bool:
    return entry.state is not SlotState.UP or entry.incarnation != incarnation


def _never_started(key: RankKey) -> RankDown:
    reason = "its job was being ended before it was started"
    return RankDown(job=key.job, rank=key.rank, incarnation=key.incarnation, code=None, reason=reason)


def _build_jobs(config: Mapping[str, Any]) -> LocalJobs:
    return LocalJobs()


LOCAL_JOBS: MachineKind[e.Event, e.Action] = register(
    "jobs", 5, _build_jobs, events=e.Event, actions=e.Action, states=(LocalJobs,)
)
"""The jobs of a node; it has no configuration."""
