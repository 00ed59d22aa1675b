"""Deterministic simulation of protocol machines: one seed, one history.

The simulator is a driver like the asyncio one, with virtual time and a network that misbehaves on request:
messages are late, lost, doubled and reordered, processes are killed between any two of their effects, and
their peers learn of it later, each at its own moment. Checkers run after every event; the whole history is
kept, and the same seed gives the same history, digest included.

A simulated process is anything with `deliver(stimulus, now_ns=) -> effects`; `MachineProcess` makes one of
a machine and two small functions:

    def node(incarnation: int) -> Process[Msg]:
        return MachineProcess(CommitMachine(...), to_events=..., to_effects=...)

    sim = Simulation[Msg](seed, conditions=Conditions(loss=0.01))
    for name in names:
        sim.add(name, node)
    sim.add_checker("agreement", lambda: ...)
    sim.run(until=lambda: all(...))

After the manner of FoundationDB's simulation and TigerBeetle's VOPR: safety under faults first; then give
`sim.conditions = CALM`, stop killing, and ask for liveness.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim_model import (
    SIM_START_NS,
    Arrived,
    CancelTimer,
    Commanded,
    Conditions,
    Effect,
    Exit,
    Kill,
    KillPoint,
    Kind,
    MachineProcess,
    MessageT,
    Note,
    PeerEnded,
    Process,
    Record,
    RunEnd,
    Send,
    SetTimer,
    SimulationFailure,
    Start,
    Started,
    Stimulus,
    TimerFired,
)

__all__ = [
    "CALM",
    "SIM_START_NS",
    "Arrived",
    "CancelTimer",
    "Commanded",
    "Conditions",
    "Effect",
    "Exit",
    "Kill",
    "KillPoint",
    "Kind",
    "MachineProcess",
    "Note",
    "PeerEnded",
    "Process",
    "Record",
    "RunEnd",
    "Send",
    "SetTimer",
    "Simulation",
    "SimulationFailure",
    "Start",
    "Started",
    "Stimulus",
    "TimerFired",
]

CALM = Conditions()
"""Reliable, ordered, prompt: what liveness is asked under."""

MAX_EVENTS_DEFAULT = 200_000
"""A run that takes more events than this has not ended by itself: reported as a failure."""

MAX_PENDING = 200_000
"""Messages, timers and notices under way at once; more means that a machine floods its peers."""

STORY_RECORDS = 40
"""How many of the last records a failure quotes."""

Factory: TypeAlias = Callable[[int], Process[MessageT]]


@dataclass(slots=True)
class _Host(Generic[MessageT]):
    """A process's place: the factory outlives incarnations, the rest belongs to the current one."""

    name: str
    factory: Factory[MessageT]
    process: Process[MessageT] | None = None
    incarnation: int = 0
    starting: bool = False
    ended_clean: bool = False
    deliveries: int = 0
    paused_until_ns: int = 0
    timers: dict[str, int] = field(default_factory=dict[str, int])
    told: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


@dataclass(slots=True, eq=False)
class _Delivery(Generic[MessageT]):
    """A stimulus under way to an incarnation of `to`."""

    to: str
    to_incarnation: int
    stimulus: Stimulus[MessageT]
    timer_version: int = 0
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """An act of the scenario or of the simulator itself."""

    run: Callable[[], None]


class Simulation(Generic[MessageT]):
    """A world of processes under one seed. See the module's text for how to use it.

    seed: names the history; print it first. conditions: may be replaced at any time (`sim.conditions = …`).
    """

    def __init__(self, seed: int | str, *, conditions: Conditions = CALM) -> None:
        self.seed = seed
        self.conditions = conditions
        self.now_ns = SIM_START_NS
        self.events = 0
        self.history: list[Record] = []
        self._hosts: dict[str, _Host[MessageT]] = {}
        self._queue: list[tuple[int, float, int, _Delivery[MessageT] | _Call]] = []
        self._sequence = 0
        self._timer_version = 0
        self._last_arrival_ns: dict[tuple[str, str], int] = {}
        self._link_free_ns: dict[tuple[str, str], int] = {}
        self._checkers: list[tuple[str, Callable[[], None]]] = []
        self._delivered: list[tuple[str, int, int, int]] = []
        self._dooms: dict[tuple[str, int, int], int] = {}
        # One stream a purpose, so that a kill does not change the weather that came before it.
        self._order, self._network, self._deaths = (
            self.rng(f"sim/{use}") for use in ("order", "net", "death")
        )

    def rng(self, purpose: str) -> random.Random:
        """A random stream of this seed for one purpose of the scenario, independent of all the others."""
        return random.Random(f"{self.seed}/{purpose}")

    # -- building ------------------------------------------------------------------------------------

    def add(self, name: str, factory: Factory[MessageT], *, start: bool = True) -> None:
        """Add the process `name`; `factory(incarnation)` makes it anew for each incarnation, from 1 on.

        With `start` its first incarnation starts now; else a `Start` effect or `start()` does it later.
        Raises `LocalProtocolError` if the name is taken.
        """
        if name in self._hosts:
            raise LocalProtocolError(f"simulated process {name} exists; give each its own name")
        self._hosts[name] = _Host(name, factory)
        if start:
            self._begin(self._hosts[name])

    def add_checker(self, name: str, check: Callable[[], None]) -> None:
        """Call `check()` after every event; an `AssertionError` from it ends the run with the story."""
        self._checkers.append((name, check))

    # -- the scenario --------------------------------------------------------------------------------

    def call_at(self, at_ns: int, act: Callable[[], None]) -> None:
        """Run `act()` at virtual time `at_ns`; acts of one moment run in the order they were given."""
        self._push(at_ns, _Call(act), tie=0.0)

    def command(self, name: str, command: object, *, at_ns: int | None = None) -> None:
        """Deliver `Commanded(command)` to whichever incarnation of `name` lives at `at_ns` (default: now)."""
        self._host(name)
        self.call_at(self.now_ns if at_ns is None else at_ns, lambda: self._command(name, command))

    def start(self, name: str, *, delay_ns: int | None = None) -> None:
        """Start the next incarnation of `name` after `delay_ns` (default: drawn from the conditions).

        Raises `LocalProtocolError` if it lives or is starting already.
        """
        host = self._host(name)
        if host.process is not None or host.starting:
            raise LocalProtocolError(f"{name}#{host.incarnation} lives; kill it before its next incarnation")
        host.starting = True
        if delay_ns is None:
            delay_ns = self._deaths.randint(self.conditions.start_min_ns, self.conditions.start_max_ns)
        self.call_at(self.now_ns + delay_ns, lambda: self._begin(host))

    def crash(self, name: str) -> None:
        """SIGKILL `name` now; nothing if it does not live. Some of what it sent last may never arrive."""
        host = self._host(name)
        if host.process is not None:
            self._end(host, clean=False)

    def crash_at(self, name: str, at_ns: int) -> None:
        """SIGKILL `name` at virtual time `at_ns`."""
        self._host(name)
        self.call_at(at_ns, lambda: self.crash(name))

    def crash_during(self, point: KillPoint) -> None:
        """SIGKILL a process between two of its effects."""
        self._host(point.process)
        self._dooms[(point.process, point.incarnation, point.delivery)] = point.effects

    def kill_points(self) -> tuple[KillPoint, ...]:
        """Every point at which a process could have been killed in the history so far.

        A run under the same seed with `crash_during(point)` is the same up to that point: so these, each
        in a run of its own, are all single kills of this history.
        """
        return tuple(
            KillPoint(name, incarnation, delivery, effects)
            for name, incarnation, delivery, total in self._delivered
            for effects in range(total + 1)
        )

    def pause(self, name: str, for_ns: int) -> None:
        """Stop `name` for a while (SIGSTOP, a long computation): what comes for it waits."""
        host = self._host(name)
        host.paused_until_ns = max(host.paused_until_ns, self.now_ns + for_ns)
        self._record(host, Kind.PAUSE, f"for {for_ns} ns")

    # -- looking -------------------------------------------------------------------------------------

    def lives(self, name: str) -> bool:
        """Whether an incarnation of `name` is running."""
        return self._host(name).process is not None

    def incarnation(self, name: str) -> int:
        """The current incarnation of `name`, or the last one; 0 before the first start."""
        return self._host(name).incarnation

    def notes(self) -> Iterator[tuple[str, object]]:
        """The notes so far, as (process, value)."""
        return ((record.process, record.detail) for record in self.history if record.kind is Kind.NOTE)

    def digest(self) -> str:
        """SHA-256 of the whole history: equal for equal seeds (given reprs that hold no ids or sets)."""
        digest = hashlib.sha256()
        for record in self.history:
            digest.update(f"{record}\n".encode())
        return digest.hexdigest()

    # -- running -------------------------------------------------------------------------------------

    def run(
        self,
        *,
        until: Callable[[], bool] | None = None,
        for_ns: int | None = None,
        max_events: int = MAX_EVENTS_DEFAULT,
    ) -> RunEnd:
        """Run until `until()` holds, nothing is under way, or `for_ns` of virtual time have passed.

        Raises `SimulationFailure` when a checker, invariant or machine fails, or after `max_events`.
        """
        end_ns = None if for_ns is None else self.now_ns + for_ns
        for _ in range(max_events):
            if until is not None and until():
                return RunEnd.REACHED
            if not self._pending():
                return RunEnd.QUIET
            if end_ns is not None and self._queue[0][0] > end_ns:
                self.now_ns = end_ns
                return RunEnd.TIME_UP
            self.step()
        if until is not None and until():
            return RunEnd.REACHED
        raise self._failure(f"no end after {max_events} events: a livelock, or a bound that is too small")

    def step(self) -> None:
        """Take the next event, perform what follows from it, and check everything."""
        if not self._pending():
            raise LocalProtocolError("the simulation is quiet: there is no next event to take")
        self.now_ns, _, _, item = heapq.heappop(self._queue)
        self.events += 1
        match item:
            case _Call(run=run):
                run()
            case _Delivery():
                self._deliver(item)
            case _:
                assert_never(item)
        for name, check in self._checkers:
            try:
                check()
            except AssertionError as error:
                raise self._failure(f"checker {name}: {error}") from error

    def _pending(self) -> bool:
        """Whether there is a next event; forgets cancelled timers and what was sent to the dead."""
        while self._queue and self._is_void(self._queue[0][3]):
            heapq.heappop(self._queue)
        return bool(self._queue)

    def _is_void(self, item: _Delivery[MessageT] | _Call) -> bool:
        if isinstance(item, _Call):
            return False
        host = self._hosts[item.to]
        if item.dropped or host.process is None or host.incarnation != item.to_incarnation:
            return True
        if isinstance(item.stimulus, TimerFired):
            return host.timers.get(item.stimulus.name) != item.timer_version
        return False

    def _deliver(self, delivery: _Delivery[MessageT]) -> None:
        host = self._hosts[delivery.to]
        if host.process is None:
            return
        if self.now_ns < host.paused_until_ns:
            # Tie 0: ahead of whatever arrives at that very moment, so the pair's order stays.
            self._push(host.paused_until_ns, delivery, tie=0.0)
            return
        stimulus = delivery.stimulus
        match stimulus:
            case TimerFired(name=name):
                del host.timers[name]
            case PeerEnded(peer=peer, incarnation=incarnation):
                if self.conditions.notice_is_fence:
                    self._drop_under_way(peer, incarnation, host.name, keep=0)
            case Started() | Arrived() | Commanded():
                pass
            case _:
                assert_never(stimulus)
        self._record(host, Kind.DELIVER, stimulus)
        host.deliveries += 1
        try:
            effects = host.process.deliver(stimulus, now_ns=self.now_ns)
            host.process.check_invariants()
            self._perform_all(host, effects)
        except SimulationFailure:
            raise
        except Exception as error:
            what = f"{host.name}#{host.incarnation} on {stimulus}: {type(error).__name__}: {error}"
            raise self._failure(what) from error

    def _perform_all(self, host: _Host[MessageT], effects: Sequence[Effect[MessageT]]) -> None:
        key = (host.name, host.incarnation, host.deliveries)
        self._delivered.append((*key, len(effects)))
        doom = self._dooms.pop(key, None)
        for effect in effects if doom is None else islice(effects, doom):
            self._perform(host, effect)
            if host.process is None:
                return
        if doom is not None:
            self._end(host, clean=False)

    def _perform(self, host: _Host[MessageT], effect: Effect[MessageT]) -> None:
        match effect:
            case Send():
                self._send(host, effect)
            case SetTimer(name=name, at_ns=at_ns):
                self._timer_version += 1
                host.timers[name] = self._timer_version
                self._record(host, Kind.TIMER, f"{name} at {at_ns}")
                due_ns = max(at_ns, self.now_ns) + self._order.randint(0, self.conditions.timer_lag_ns)
                fired = _Delivery[MessageT](
                    host.name, host.incarnation, TimerFired(name=name), self._timer_version
                )
                self._push(due_ns, fired)
            case CancelTimer(name=name):
                if host.timers.pop(name, None) is not None:
                    self._record(host, Kind.TIMER, f"{name} cancelled")
            case Note(value=value):
                self._record(host, Kind.NOTE, value)
            case Start(process=process):
                self.start(process)
            case Kill(process=process):
                self.crash(process)
            case Exit():
                self._end(host, clean=True)
            case _:
                assert_never(effect)

    # -- network -------------------------------------------------------------------------------------

    def _send(self, host: _Host[MessageT], send: Send[MessageT]) -> None:
        target = self._host(send.to)
        self._record(host, Kind.SEND, send)
        arrived = Arrived(sender=host.name, incarnation=host.incarnation, message=send.message)
        if target is host:
            self._push(self.now_ns, _Delivery(host.name, host.incarnation, arrived))
            return
        if target.process is None:
            self._tell(host, target, target.ended_clean)
            return
        for _ in range(1 + (self._network.random() < self.conditions.duplicate)):
            at_ns = self._arrival_ns(host.name, target.name, send.nbytes)
            if self._network.random() < self.conditions.loss:
                self._record(host, Kind.LOSE, send)
            else:
                self._push(at_ns, _Delivery(target.name, target.incarnation, arrived))

    def _arrival_ns(self, sender: str, receiver: str, nbytes: int) -> int:
        pair, now = (sender, receiver), self.conditions
        departed_ns = max(self.now_ns, self._link_free_ns.get(pair, 0))
        departed_ns += nbytes * 1_000_000_000 // now.bandwidth_bytes_per_s
        self._link_free_ns[pair] = departed_ns
        at_ns = departed_ns + now.latency_ns + self._network.randint(0, now.jitter_ns)
        if self._network.random() < now.reorder:
            return departed_ns + self._network.randint(0, 4 * (now.latency_ns + now.jitter_ns))
        at_ns = max(at_ns, self._last_arrival_ns.get(pair, 0) + 1)
        self._last_arrival_ns[pair] = at_ns
        return at_ns

    def _drop_under_way(self, sender: str, incarnation: int, to: str, *, keep: int) -> None:
        """Drop all but the first `keep` messages under way from an incarnation of `sender` to `to`."""
        under_way = sorted(
            (at_ns, tie, sequence)
            for at_ns, tie, sequence, item in self._queue
            if _is_from(item, sender, incarnation, to)
        )
        dropped = set(under_way[keep:])
        for at_ns, tie, sequence, item in self._queue:
            if (at_ns, tie, sequence) in dropped and isinstance(item, _Delivery):
                item.dropped = True
                self._record(self._hosts[to], Kind.DROP, item.stimulus)

    # -- life and death ------------------------------------------------------------------------------

    def _begin(self, host: _Host[MessageT]) -> None:
        host.starting = False
        host.incarnation += 1
        host.deliveries = 0
        host.paused_until_ns = 0
        host.timers.clear()
        host.told.clear()
        host.process = host.factory(host.incarnation)
        self._record(host, Kind.START, "")
        started = Started(incarnation=host.incarnation)
        self._push(self.now_ns, _Delivery(host.name, host.incarnation, started), tie=0.0)

    def _end(self, host: _Host[MessageT], *, clean: bool) -> None:
        host.process = None
        host.ended_clean = clean
        self._record(host, Kind.EXIT if clean else Kind.CRASH, "")
        for peer in self._hosts.values():
            if peer is host:
                continue
            if not clean:
                under_way = sum(
                    _is_from(item, host.name, host.incarnation, peer.name) for *_, item in self._queue
                )
                keep = self._deaths.randint(0, under_way)
                self._drop_under_way(host.name, host.incarnation, peer.name, keep=keep)
            if peer.process is not None:
                self._tell(peer, host, clean)

    def _tell(self, witness: _Host[MessageT], dead: _Host[MessageT], clean: bool) -> None:
        if (dead.name, dead.incarnation) in witness.told:
            return
        witness.told.add((dead.name, dead.incarnation))
        notice = PeerEnded(peer=dead.name, incarnation=dead.incarnation, clean=clean)
        at_ns = self.now_ns + self._deaths.randint(
            self.conditions.notice_min_ns, self.conditions.notice_max_ns
        )
        if clean:  # the goodbye travels behind what was sent
            at_ns = max(at_ns, self._last_arrival_ns.get((dead.name, witness.name), 0) + 1)
        self._push(at_ns, _Delivery(witness.name, witness.incarnation, notice))

    def _command(self, name: str, command: object) -> None:
        host = self._host(name)
        if host.process is not None:
            self._deliver(_Delivery(name, host.incarnation, Commanded(command=command)))

    # -- small parts ---------------------------------------------------------------------------------

    def _host(self, name: str) -> _Host[MessageT]:
        try:
            return self._hosts[name]
        except KeyError:
            raise LocalProtocolError(
                f"no simulated process {name}; there are {sorted(self._hosts)}"
            ) from None

    def _push(self, at_ns: int, item: _Delivery[MessageT] | _Call, *, tie: float | None = None) -> None:
        if len(self._queue) >= MAX_PENDING:
            raise self._failure(f"{MAX_PENDING} events are under way: a machine floods its peers")
        self._sequence += 1
        entry = (max(at_ns, self.now_ns), self._order.random() if tie is None else tie, self._sequence, item)
        heapq.heappush(self._queue, entry)

    def _record(self, host: _Host[MessageT], kind: Kind, detail: object) -> None:
        self.history.append(Record(self.now_ns, host.name, host.incarnation, kind, detail))

    def _failure(self, what: str) -> SimulationFailure:
        story = self.history[-STORY_RECORDS:]
        return SimulationFailure(what, seed=self.seed, at_ns=self.now_ns, events=self.events, story=story)


def _is_from(item: object, sender: str, incarnation: int, to: str) -> bool:
    return (
        isinstance(item, _Delivery)
        and not item.dropped
        and item.to == to
        and isinstance(item.stimulus, Arrived)
        and (item.stimulus.sender, item.stimulus.incarnation) == (sender, incarnation)
    )
