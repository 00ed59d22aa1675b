"""Simulations of protocol machines: `Simulation` and what it is made of (see the package's text).

The loop in `Simulation.run` is the simulator's hot path (`python -m zbmd.tools.lab.bench.actors.sim`): events
under way are plain tuples in one heap, the history is appended to as plain tuples, and random numbers come
from `random()` alone, `randint` costing ten times as much.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Generic, assert_never, cast

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.faults import (
    Clog,
    Crash,
    CrashWithin,
    Cut,
    Fault,
    NetConditions,
    Partition,
    Pause,
    UnsupportedFault,
    kind_of,
    names_of,
)
from zbmd.transport.sim.hosts import Entry, Factory, Flying, Host, Kills, ProcessTable
from zbmd.transport.sim.model import (
    CALM,
    MAX_EVENTS_DEFAULT,
    SIM_START_NS,
    Arrived,
    CancelTimer,
    Commanded,
    Conditions,
    Effect,
    Exit,
    FailureKind,
    HistoryKind,
    Kill,
    KillPoint,
    MessageT,
    Note,
    PeerEnded,
    RunEnd,
    Send,
    SetTimer,
    SimulationFailure,
    Start,
    Started,
    Stimulus,
    TimerFired,
)
from zbmd.transport.sim.network import NetworkPath, PathFlooded

BEFORE_ALL = -1.0
"""The tie of what comes before everything else of its moment."""

MAX_PENDING = 200_000
"""Messages, timers and notices under way at once; more means that a machine floods its peers."""
PENDING_A_HOST_MAX = 200
"""The same in large worlds: when one host in a hundred dies at once, all others take notice of each."""

EVENTS_PER_COLLECTION = 1 << 16
"""Cycles among the objects made since the last collection are looked for every so many events."""


class Simulation(ProcessTable[Host[MessageT]], Generic[MessageT]):
    """A world of processes under one seed. See the package's text for how to use it.

    seed: names the history; print it first. conditions: may be replaced at any time (`sim.conditions = …`).
    """

    def __init__(self, seed: int | str, *, conditions: Conditions = CALM) -> None:
        super().__init__(seed, conditions)
        self.now_ns = SIM_START_NS
        self.events = 0
        self._queue: list[Entry[MessageT]] = []
        self._dropped: set[int] = set()
        self._sequence = 0
        self._timer_version = 0
        self._plan_version = 0
        self._kills = Kills()
        self._order = self.rng("sim/order")

    @property
    def supported(self) -> frozenset[type[Fault]]:
        """The faults that strike here. What a stopped path holds arrives later: only `loss` loses."""
        return frozenset((Crash, CrashWithin, Pause, Partition, Cut, Clog, NetConditions))

    # -- building ------------------------------------------------------------------------------------

    def add(self, name: str, factory: Factory[MessageT], *, start: bool = True) -> None:
        """Add the process `name`; `factory(incarnation)` makes it again for each incarnation, from 1 on.

        With `start` its first incarnation starts now; else a `Start` effect or `start()` does it later.
        Raises `LocalProtocolError` if the name is taken.
        """
        host = self._new_place(name, Host(name, factory))
        if start:
            self.begin(host)

    # -- the scenario --------------------------------------------------------------------------------

    def call_at(self, at_ns: int, act: Callable[[], None]) -> None:
        """Run `act()` at virtual time `at_ns`; acts of one moment run in the order they were given."""
        self._push(at_ns, 0.0, None, 0, act)

    def command(self, name: str, command: object, *, at_ns: int | None = None) -> None:
        """Deliver `Commanded(command)` to whichever incarnation of `name` lives at `at_ns` (default: now)."""
        host = self.place(name)
        commanded = Commanded(command=command)
        self.call_at(
            self.now_ns if at_ns is None else at_ns,
            lambda: self._deliver(host, host.incarnation, commanded),
        )

    def crash(self, name: str) -> None:
        """SIGKILL `name` now; nothing if it does not live. Some of what it sent last may never arrive."""
        host = self.place(name)
        if host.process is not None:
            self._end(host, clean=False)

    def crash_during(self, point: KillPoint) -> None:
        """SIGKILL a process between two of its effects."""
        self.place(point.process)
        self._kills.aim(point)

    def kill_points(self) -> tuple[KillPoint, ...]:
        """Every point at which a process could have been killed in the history so far.

        A run under the same seed with `crash_during(point)` is the same up to that point: so these, each
        in a run of its own, are all single kills of this history.
        """
        return self._kills.points()

    def kill_faults(self, victims: Collection[str]) -> list[CrashWithin]:
        """The kill points of these processes as faults of a plan, in the order of their time."""
        return self._kills.faults(victims)

    def pause(self, name: str, for_ns: int) -> None:
        """Stop `name` for a while (SIGSTOP, a long computation): what comes for it waits."""
        host = self.place(name)
        host.paused_until_ns = max(host.paused_until_ns, self.now_ns + for_ns)
        self._record(host, HistoryKind.PAUSE, f"for {for_ns} ns")

    def apply(self, fault: Fault) -> None:
        """Have `fault` strike at its time, counted from the start of virtual time.

        Raises `UnsupportedFault` for one that is not in `supported`.
        """
        for name in names_of(fault):
            self.place(name)
        end_ns = fault.at_ns + fault.for_ns
        match fault:
            case Crash(process=process):
                self._plan(fault.at_ns, fault, lambda: self.crash(process))
                if fault.for_ns:
                    self._plan(end_ns, fault, lambda: self.revive(process))
            case CrashWithin():
                self._plan(fault.at_ns, fault, partial(self._kills.arm, fault), tie=BEFORE_ALL)
            case Pause(process=process, for_ns=for_ns):
                self._plan(fault.at_ns, fault, lambda: self.pause(process, for_ns))
            case Partition() | Cut() | Clog() | NetConditions():
                self._plan(fault.at_ns, fault, lambda: self.weather.begin(fault))
                self._plan(end_ns, fault, lambda: self.weather.end(fault))
            case _:
                raise UnsupportedFault(f"machines alone have nothing for {kind_of(type(fault))} to strike")

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """No fault strikes from now on, and none of those that did lasts among `core`.

        With `revive`, what is dead of the core starts again. All others stay as they are: dead, cut off.
        """
        self._plan_version += 1
        self._kills.disarm()
        for name in sorted(core):
            host = self.place(name)
            host.paused_until_ns = min(host.paused_until_ns, self.now_ns)
            if revive:
                self.revive(name)
        self.weather.heal(core)

    # -- looking -------------------------------------------------------------------------------------

    def digest(self) -> str:
        """A digest of the whole history: equal for equal seeds (see `History.digest`)."""
        return self.history.digest()

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
        # A pass of the collector over the whole history costs more than the events between two of them; and
        # finalisers that it runs must not make one history differ from the next.
        collecting = gc.isenabled()
        gc.disable()
        try:
            end = self._run(until, end_ns, max_events)
            self._check(0)
        finally:
            if collecting:
                gc.enable()
        return end

    def _run(self, until: Callable[[], bool] | None, end_ns: int | None, max_events: int) -> RunEnd:
        queue = self._queue
        for _ in range(max_events):
            if until is not None and until():
                return RunEnd.REACHED
            if not self._pending():
                return RunEnd.QUIET
            if end_ns is not None and queue[0][0] > end_ns:
                self.now_ns = end_ns
                return RunEnd.TIME_UP
            self._take()
            if self._checkers:
                self._check(self.events)
            if not self.events % EVENTS_PER_COLLECTION:
                gc.collect(1)
        if until is not None and until():
            return RunEnd.REACHED
        raise self._no_end(max_events)

    def step(self) -> None:
        """Take the next event, perform what follows from it, and check everything."""
        if not self._pending():
            raise LocalProtocolError("the simulation is quiet: there is no next event to take")
        self._take()
        self._check(0)

    def _take(self) -> None:
        """Take the next event, of which `_pending` has said that there is one."""
        self.now_ns, _, _, host, incarnation, what, version = heapq.heappop(self._queue)
        self.events += 1
        if host is None:
            assert callable(what)
            try:
                what()
            except PathFlooded as error:
                raise self._failure(str(error), FailureKind.LIVENESS) from error
        else:
            if version:
                assert isinstance(what, TimerFired)
                del host.timers[what.name]
            self._deliver(host, incarnation, cast("Stimulus[MessageT]", what))

    def _pending(self) -> bool:
        """Whether there is a next event; forgets cancelled timers and what was sent to the dead."""
        queue = self._queue
        while queue:
            _, _, sequence, host, incarnation, what, version = queue[0]
            if host is None:
                return True
            if host.incarnation == incarnation and host.process is not None:
                if version:
                    assert isinstance(what, TimerFired)
                    if host.timers.get(what.name) == version:
                        return True
                elif not self._dropped or sequence not in self._dropped:
                    return True
            self._dropped.discard(sequence)
            heapq.heappop(queue)
        return False

    def _deliver(self, host: Host[MessageT], incarnation: int, stimulus: Stimulus[MessageT]) -> None:
        process = host.process
        if process is None:
            return
        now_ns = self.now_ns
        if now_ns < host.paused_until_ns:
            # Tie 0: ahead of whatever arrives at that very moment, so the pair's order stays.
            version = 0
            if isinstance(stimulus, TimerFired):
                version = self._new_timer(host, stimulus.name)
            self._push(host.paused_until_ns, 0.0, host, incarnation, stimulus, version)
            return
        if isinstance(stimulus, PeerEnded) and self.weather.now.notice_is_fence:
            under_way = self._under_way(stimulus.peer, stimulus.incarnation).get(host, [])
            self._drop_under_way(under_way, stimulus.peer, stimulus.incarnation, host, keep=0)
        self.history.raw.append((now_ns, host.name, incarnation, HistoryKind.DELIVER, stimulus))
        host.deliveries += 1
        try:
            effects = process.deliver(stimulus, now_ns=now_ns)
            process.check_invariants()
            self._perform_all(host, effects)
        except SimulationFailure:
            raise
        except Exception as error:
            kind = FailureKind.CRASH
            if isinstance(error, AssertionError):
                kind = FailureKind.SAFETY
            if isinstance(error, PathFlooded):
                kind = FailureKind.LIVENESS
            what = f"{host.name}#{host.incarnation} on {stimulus}: {type(error).__name__}: {error}"
            raise self._failure(what, kind) from error

    def _perform_all(self, host: Host[MessageT], effects: Sequence[Effect[MessageT]]) -> None:
        name, incarnation, delivery, kills = host.name, host.incarnation, host.deliveries, self._kills
        kills.delivered.append((name, incarnation, delivery, len(effects), self.now_ns))
        kill = kills.strikes(name, incarnation, delivery, len(effects)) if kills.armed else None
        for effect in effects if kill is None else islice(effects, kill[0]):
            if type(effect) is Send:
                self._send(host, effect)
            else:
                self._perform(host, effect)
                if host.process is None:
                    return
        if kill is not None:
            self._end(host, clean=False)
            if (fault := kill[1]) and fault.for_ns:
                self._plan(self.now_ns - SIM_START_NS + fault.for_ns, fault, lambda: self.revive(name))

    def _perform(self, host: Host[MessageT], effect: Effect[MessageT]) -> None:
        match effect:
            case Send():
                self._send(host, effect)
            case SetTimer(name=name, at_ns=at_ns):
                version = self._new_timer(host, name)
                self._record(host, HistoryKind.TIMER, f"{name} at {at_ns}")
                due_ns = max(at_ns, self.now_ns)
                if lag_ns := self.weather.now.timer_lag_ns:
                    due_ns += int(self._order.random() * (lag_ns + 1))
                fired = TimerFired(name=name)
                self._push(due_ns, self._order.random(), host, host.incarnation, fired, version)
            case CancelTimer(name=name):
                if host.timers.pop(name, None) is not None:
                    self._record(host, HistoryKind.TIMER, f"{name} cancelled")
            case Note(value=value):
                self._record(host, HistoryKind.NOTE, value)
            case Start(process=process):
                self.start(process)
            case Kill(process=process):
                self.crash(process)
            case Exit():
                self._end(host, clean=True)
            case _:
                assert_never(effect)

    def _new_timer(self, host: Host[MessageT], name: str) -> int:
        self._timer_version += 1
        host.timers[name] = self._timer_version
        return self._timer_version

    # -- network -------------------------------------------------------------------------------------

    def _send(self, host: Host[MessageT], send: Send[MessageT]) -> None:
        self.history.raw.append((self.now_ns, host.name, host.incarnation, HistoryKind.SEND, send))
        route = host.routes.get(send.to)
        if route is None:
            target = self.place(send.to)
            route = host.routes[send.to] = (target, self.weather.path(host.name, target.name))
        target, path = route
        arrived = Arrived(sender=host.name, incarnation=host.incarnation, message=send.message)
        if target is host:
            self._push(self.now_ns, self._order.random(), host, host.incarnation, arrived)
        elif target.process is None:
            self._tell(host, target, target.ended_clean)
        elif path.cut or path.clogged:
            again = partial(self._pass, host, target, target.incarnation, arrived, send, path)
            path.hold(host.incarnation, again)
        else:
            self._pass(host, target, target.incarnation, arrived, send, path)

    def _pass(
        self,
        host: Host[MessageT],
        target: Host[MessageT],
        incarnation: int,
        arrived: Arrived[MessageT],
        send: Send[MessageT],
        path: NetworkPath,
    ) -> None:
        weather = self.weather
        now, chance = weather.now, self._network.random
        copies = 2 if now.duplicate and chance() < now.duplicate else 1
        while copies:
            copies -= 1
            at_ns = weather.arrival_ns(path, now, self.now_ns, send.nbytes)
            if now.loss and chance() < now.loss:
                self._record(host, HistoryKind.LOSE, send)
            else:
                self._push(at_ns, self._order.random(), target, incarnation, arrived)

    def _under_way(self, sender: str, incarnation: int) -> dict[Host[MessageT], list[Flying[MessageT]]]:
        """Return the messages of an incarnation that have not arrived, by receiver, in one pass."""
        found: dict[Host[MessageT], list[Flying[MessageT]]] = {}
        for at_ns, tie, sequence, host, _, what, _ in self._queue:
            if host is None or not isinstance(what, Arrived) or sequence in self._dropped:
                continue
            if (what.sender, what.incarnation) == (sender, incarnation):
                found.setdefault(host, []).append((at_ns, tie, sequence, what))
        return found

    def _drop_under_way(
        self,
        under_way: list[Flying[MessageT]],
        sender: str,
        incarnation: int,
        to: Host[MessageT],
        *,
        keep: int | None,
    ) -> None:
        """Drop all but the first `keep` (None: drawn) of these, and of those that a stopped path holds."""
        path = self.weather.path(sender, to.name)
        if keep is None:
            keep = self._deaths.randint(0, len(under_way) + path.held_from(incarnation))
        for _, _, sequence, what in sorted(under_way)[keep:]:
            self._dropped.add(sequence)
            self._record(to, HistoryKind.DROP, what)
        path.drop_held(incarnation, keep=max(0, keep - len(under_way)))

    # -- life and death ------------------------------------------------------------------------------

    def begin(self, place: Host[MessageT]) -> None:
        """The next incarnation starts now."""
        place.starting = False
        place.incarnation += 1
        place.deliveries = 0
        place.paused_until_ns = 0
        place.timers.clear()
        place.noticed.clear()
        place.process = place.factory(place.incarnation)
        self._record(place, HistoryKind.START, "")
        self._push(self.now_ns, 0.0, place, place.incarnation, Started(incarnation=place.incarnation))

    def _end(self, host: Host[MessageT], *, clean: bool) -> None:
        host.process = None
        host.ended_clean = clean
        self._record(host, HistoryKind.EXIT if clean else HistoryKind.CRASH, "")
        under_way = {} if clean else self._under_way(host.name, host.incarnation)
        for peer in self._places.values():
            if peer is host:
                continue
            if not clean:
                self._drop_under_way(under_way.get(peer, []), host.name, host.incarnation, peer, keep=None)
            if peer.process is not None:
                self._tell(peer, host, clean)

    def _tell(self, witness: Host[MessageT], dead: Host[MessageT], clean: bool) -> None:
        if (dead.name, dead.incarnation) in witness.noticed:
            return
        witness.noticed.add((dead.name, dead.incarnation))
        notice = PeerEnded(peer=dead.name, incarnation=dead.incarnation, clean=clean)
        incarnation, path = witness.incarnation, self.weather.path(dead.name, witness.name)

        def tell() -> None:
            now = self.weather.now
            at_ns = self.now_ns + self._deaths.randint(now.notice_min_ns, now.notice_max_ns)
            if clean:  # the goodbye travels behind what was sent
                at_ns = max(at_ns, path.last_arrival_ns + 1)
            self._push(at_ns, self._order.random(), witness, incarnation, notice)

        if clean and path.held:
            path.hold(dead.incarnation, tell)
        else:
            tell()

    def close(self) -> None:
        """Nothing to give back: machines hold nothing."""

    # -- small parts ---------------------------------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        return self.now_ns, self.events

    def _plan(self, at_ns: int, fault: Fault, act: Callable[[], object], *, tie: float = 0.0) -> None:
        """Have a fault begin or end at `at_ns` after the start, unless the world is healed before."""
        version = self._plan_version

        def strike() -> None:
            if version == self._plan_version:
                self.history.raw.append((self.now_ns, "world", 0, HistoryKind.FAULT, fault))
                act()

        self._push(SIM_START_NS + at_ns, tie, None, 0, strike)

    def _push(
        self,
        at_ns: int,
        tie: float,
        host: Host[MessageT] | None,
        incarnation: int,
        what: Stimulus[MessageT] | Callable[[], None],
        version: int = 0,
    ) -> None:
        queue = self._queue
        if len(queue) >= MAX_PENDING and len(queue) >= PENDING_A_HOST_MAX * len(self._places):
            flood = f"{len(queue)} events are under way: a machine floods its peers"
            raise self._failure(flood, FailureKind.LIVENESS)
        self._sequence = sequence = self._sequence + 1
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        heapq.heappush(queue, (at_ns, tie, sequence, host, incarnation, what, version))

    def _record(self, host: Host[MessageT], kind: HistoryKind, detail: object) -> None:
        self.history.raw.append((self.now_ns, host.name, host.incarnation, kind, detail))
