"""The driver of spare ranks: forks them, and does what their machine (`spare_machine`) decides."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, assert_never

import msgspec
import structlog

from zbmd.actors.cluster.jobs import spare_machine as m
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.rank_processes import ProcessKey, RankProcess, RankProcesses
from zbmd.actors.cluster.jobs.reports import HostEvent, SpareInfo, SpareLost, SpareReady
from zbmd.actors.cluster.state.job_table import JobPhase, JobSpec
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.process import spare
from zbmd.actors.process.exit import describe_exit
from zbmd.actors.process.template import ForkRequest
from zbmd.actors.rank.environment import spare_ranks
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.deadlines import SECOND_NS, derive
from zbmd.transport.errors import RemoteProtocolError, ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired

log: Final = structlog.stdlib.get_logger("zbmd.cluster.job")

WORD_BYTES_MAX: Final = 64
WORDS_PER_WAKE_MAX: Final = 4
SETTLE_NS_MAX: Final = SECOND_NS
"""From a view to the start of spares, which would take the processors from the first steps after a loss."""
NUMBERS_OF_A_JOB: Final = 1 << 32
"""Spares that a job may have in an incarnation of this node, before their numbers repeat."""


class SpareOwner(Protocol):
    """Has ranks, of which some were spares. Called on the loop; must not block."""

    recorder: Recorder

    def request(self, key: RankKey) -> ForkRequest:
        """Return what a rank is forked from. Raises `ZbmdError`."""
        ...

    def rank_processes(self) -> RankProcesses:
        """Return the processes of this node. Raises `ZbmdError` without a template."""
        ...

    def kept_fd(self, key: RankKey) -> int | None:
        """Return the memory that outlives a rank's processes. Raises OSError."""
        ...

    def fork_rank(self, key: RankKey) -> None:
        """Fork a rank."""
        ...

    def forked(self, process: RankProcess) -> None:
        """The process of a rank exists."""
        ...

    def tell(self, job: int, event: HostEvent) -> None:
        """Report an event."""
        ...


class _JobSpares:
    """The spares of one job, while it is open here."""

    def __init__(self, spec: JobSpec, wanted: int, owner: SpareOwner, *, first: int) -> None:
        config = {
            "wanted": wanted,
            "first": first,
            "restarts_max": spec.max_restarts,
            "window_ns": spec.restart_window_ns,
            "answer_ns": spec.recovery_budget_ns,
            "settle_ns": min(spec.recovery_budget_ns, SETTLE_NS_MAX),
            "start_ns": spec.start_timeout_ns,
            "grace_ns": derive(spec.recovery_budget_ns).stop_grace_ns,
        }
        self.pool = m.SparePool(**config)
        self._job, self._owner = spec.job, owner
        self._tap = Tap(owner.recorder, m.SPARES, f"spares of job {spec.job:x}", self.pool, config)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._lost: dict[int, m.NotifyLost] = {}
        """Of those whose last lines are still being read."""
        self._events: deque[m.Event] = deque()
        self._busy = False

    def put(self, event: m.Event) -> None:
        """Put an event to the machine, and then those that follow from its actions."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                actions = self._tap.handle(self._events.popleft(), now_ns=time.monotonic_ns())
                self._tap.check_invariants()
                for action in actions:
                    self._perform(action)
        finally:
            self._busy = False

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """A spare is reaped. Returns a function to call once its last line is delivered."""
        number = process.incarnation
        reason = process.killed_by or (
            "ended before its script asked for a rank" if code == 0 else describe_exit(code)
        )
        self._disconnect(number)
        self.put(m.SpareEnded(number=number, reason=reason))
        return lambda: self._tell_lost(number, process)

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """A spare could not be forked."""
        self._disconnect(process.incarnation)
        self.put(m.SpareEnded(number=process.incarnation, reason=reason))
        self._tell_lost(process.incarnation, process)

    def close(self) -> None:
        """Release what belongs to no process."""
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._sockets):
            self._disconnect(number)
        self._tap.close("the job is closed")

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.ForkSpare(number=number):
                self._fork(number)
            case m.AssignRank(number=number, key=key):
                self._assign(number, key)
            case m.Proceed(number=number, key=key):
                self._proceed(number, key)
            case m.ForkRank(key=key):
                self._owner.fork_rank(key)
            case m.EndSpare(number=number, kill=kill):
                self._signal(number, signal.SIGKILL if kill else signal.SIGTERM)
            case m.NotifyLost(number=number):
                self._lost[number] = action
            case SetTimer(at_ns=at_ns):
                self._set_timer(at_ns)
            case _:
                assert_never(action)

    def _fork(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._sockets[number] = ours
        self._loop.add_reader(ours.fileno(), self._readable, number)
        try:
            rank = self._owner.request(RankKey(self._job, 0, 1))
            of_all = {name: v for name, v in rank.environment.items() if name not in spare.RANK_VARIABLES}
            request = msgspec.structs.replace(
                rank, rank=spare.SPARE_RANK, incarnation=number, waits=True, environment=of_all
            )
            self._owner.rank_processes().fork(request, spare_fd=theirs.fileno())
        except (ZbmdError, OSError) as error:
            self._disconnect(number)
            self.put(m.SpareEnded(number=number, reason=str(error)))
            log.warning("a spare rank could not be started", job=self._job, reason=str(error))
        finally:
            theirs.close()

    def _assign(self, number: int, key: RankKey) -> None:
        try:
            processes, request = self._owner.rank_processes(), self._owner.request(key)
            stdin_fd = processes.stdin_fd(key.rank)
            kept_fds = processes.kept_fds(key.job, key.rank, self._owner.kept_fd(key)) or ()
            assigned = spare.Assign(key.rank, key.incarnation, request.environment, len(kept_fds))
            fds = [*([] if stdin_fd is None else [stdin_fd]), *kept_fds]
            socket.send_fds(self._sockets[number], [spare.encode(assigned)], fds)
        except (ZbmdError, OSError) as error:
            log.warning("a spare rank could not be used", rank=key.rank, reason=str(error))
            self._signal(number, signal.SIGKILL)  # its end follows, and what the machine does then

    def _proceed(self, number: int, key: RankKey) -> None:
        process = self._owner.rank_processes().rename(
            (self._job, spare.SPARE_RANK, number), (key.job, key.rank, key.incarnation)
        )
        self._owner.forked(process)
        try:
            self._sockets[number].send(spare.encode(spare.Proceed()))
        except OSError as error:
            log.info("a spare ended as it became a rank", rank=key.rank, reason=str(error))
        self._disconnect(number)

    def _signal(self, number: int, what: signal.Signals) -> None:
        key: ProcessKey = (self._job, spare.SPARE_RANK, number)
        try:
            self._owner.rank_processes().signal(key, what)
        except ZbmdError:
            return  # its template is gone, and it with that

    def _readable(self, number: int) -> None:
        for _ in range(WORDS_PER_WAKE_MAX):
            if number not in self._sockets:
                return
            try:
                packet = self._sockets[number].recv(WORD_BYTES_MAX)
                if not packet:
                    raise ConnectionResetError
                message = spare.decode_of_spare(packet)
            except BlockingIOError:
                return
            except OSError:
                self._loop.remove_reader(self._sockets[number].fileno())  # its end is reported, too
                return
            except RemoteProtocolError as error:
                log.warning("a spare rank is ended", number=number, reason=str(error))
                self._signal(number, signal.SIGKILL)
                return
            match message:
                case spare.Waiting():
                    self.put(m.SpareWaits(number=number))
                    self._owner.tell(self._job, SpareReady(pid=self._pid(number)))
                case spare.Accepted():
                    self.put(m.RankAccepted(number=number))
                case _:
                    assert_never(message)

    def _pid(self, number: int) -> int:
        process = self._owner.rank_processes().find((self._job, spare.SPARE_RANK, number))
        return 0 if process is None else process.pid

    def infos(self) -> list[SpareInfo]:
        """Return its spares."""
        return [SpareInfo(pid=self._pid(n), state=one.state.value) for n, one in self.pool.spares.items()]

    def _disconnect(self, number: int) -> None:
        if (connection := self._sockets.pop(number, None)) is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def _tell_lost(self, number: int, process: RankProcess) -> None:
        if (lost := self._lost.pop(number, None)) is not None:
            self._owner.tell(
                self._job,
                SpareLost(
                    number=number,
                    pid=process.pid,
                    reason=lost.reason,
                    tail=process.tail,
                    is_last=lost.is_last,
                ),
            )

    def _set_timer(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._timer_fired, at_ns)

    def _timer_fired(self, due_ns: int) -> None:
        self._owner.recorder.timer("spares", due_ns, stream=self._tap.stream)
        self.put(TimerFired())


class SpareRanks:
    """The spares of all jobs of a node. A job has some if its environment says so."""

    def __init__(self, owner: SpareOwner) -> None:
        self._owner = owner
        self._open: dict[int, _JobSpares] = {}
        self._closing: list[_JobSpares] = []
        self._opened = 0

    def open(self, spec: JobSpec) -> None:
        """A job is opened on this node. Raises `UserError` for a number that cannot be."""
        wanted = spare_ranks(dict(spec.environment))
        if wanted:
            first = 1 + self._opened * NUMBERS_OF_A_JOB
            self._opened += 1
            self._open[spec.job] = _JobSpares(spec, wanted, self._owner, first=first)

    def close(self, job: int) -> None:
        """A job is closed on this node."""
        if (spares := self._open.pop(job, None)) is not None:
            spares.put(m.EndAsked())
            self._closing.append(spares)
            self._forget()

    def wants(self, key: RankKey) -> bool:
        """A rank is to be started; return whether that is seen to here."""
        spares = self._open.get(key.job)
        if spares is not None:
            spares.put(m.RankWanted(key=key))
        return spares is not None

    def entered(self, job: int) -> None:
        """A view of a job is entered."""
        if (spares := self._open.get(job)) is not None:
            spares.put(m.ViewEntered())

    def acts_on(self, view: ClusterView | None, me: NodeKey | None) -> None:
        """The node acts on a view; None: it has ended its part of the cluster."""
        for number, spares in self._open.items():
            job = None if view is None else view.jobs.job(number)
            ends = job is None or job.phase in (JobPhase.STOPPING, JobPhase.ENDED) or me not in job.nodes()
            if ends:
                spares.put(m.EndAsked())

    def infos(self, job: int) -> list[SpareInfo]:
        """Return the spares of a job."""
        spares = self._open.get(job)
        return [] if spares is None else spares.infos()

    def forked(self, process: RankProcess) -> None:
        """See `ProcessHandler`."""
        self._of(process).put(m.SpareForked(number=process.incarnation))

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """See `ProcessHandler`."""
        self._of(process).fork_failed(process, reason)
        self._forget()

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """See `ProcessHandler`."""
        told = self._of(process).exited(process, code)
        self._forget()
        return told

    def stop(self) -> None:
        """Release everything but the processes."""
        for spares in [*self._open.values(), *self._closing]:
            spares.close()

    def _of(self, process: RankProcess) -> _JobSpares:
        every = [*self._open.values(), *self._closing]
        return next(spares for spares in every if process.incarnation in spares.pool.spares)

    def _forget(self) -> None:
        for spares in [one for one in self._closing if not one.pool.spares]:
            spares.close()
            self._closing.remove(spares)
