"""Trees of real supervisors and workers over several simulated processes, under crashes of both.

The process "node" grows a tree: a root supervisor over workers, here or in other processes, and over nested
supervisors of their own; strategies, restart policies and intensities are the seed's. Workers are asked to
fail or to leave while processes die, stand still and are cut off. When the root gives up, or the node dies,
a new tree is grown.

Every supervisor reports its events and actions to a `Judge`, which knows the rules on its own: the order in
which children start and stop, who is stopped with whom, who is restarted and how often. After the faults the
tree is whole, each worker replies, no earlier tree has left any, and each watcher got one notice of an end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import Deferred
from zbmd.actors.core.ref import Down, Ref
from zbmd.actors.errors import ActorError
from zbmd.actors.supervision.events import (
    Action,
    ChildExited,
    ChildStarted,
    ChildStartFailed,
    Escalate,
    Event,
    KillChild,
    LeaveDown,
    Restart,
    StartChild,
    StartRequested,
    StopChild,
    StopRequested,
    Strategy,
)
from zbmd.actors.supervision.supervisor import ChildSpec, Supervisor
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.link.interface import Link
from zbmd.transport.sim import (
    NETWORK_FAULTS,
    Crash,
    Fault,
    Options,
    Pause,
    ScenarioStage,
    SimProcess,
    Slow,
    World,
    current_process,
)

NODE = "node"
ROOT = "root"
TORMENT_NS = 10_000_000
"""The mean time between two commands to fail or leave."""
RETRY_S = 0.02
DIAL_TIMEOUT_S = 0.1
PING_TIMEOUT_S = 0.1
SHUTDOWN_S = 0.05
CHILDREN_MAX = 3
LIVENESS_NS = 25_000_000_000
"""Longer than a spawn in another process may wait for its answer, and then some."""
VIOLATIONS_MAX = 16


class Fail(Contract, id="sim.supervision.fail"):
    """Raise."""


class Leave(Contract, id="sim.supervision.leave"):
    """End normally."""


class Ping(Contract, id="sim.supervision.ping"):
    """Answer."""


class Pong(Contract, id="sim.supervision.pong"):
    """To a `Ping`."""


class ToldTo(Exception):
    """The failure of a worker."""


class Worker(Actor, remote=True):
    """Obeys commands, and sometimes takes a while to start or to stop."""

    async def started(self) -> None:
        """Take a while, or none."""
        await self._linger()

    async def stopping(self, reason: object) -> None:
        """Take a while, or none; longer than it may, now and then."""
        await self._linger()

    async def _linger(self) -> None:
        process = current_process()
        assert process is not None
        if process.rng.random() < 0.3:
            await asyncio.sleep(process.rng.expovariate(2 / SHUTDOWN_S))

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        """Raise."""
        raise ToldTo("fail")

    @on(Leave)
    async def leave(self, _: Leave) -> None:
        """End normally."""
        self.stop("on request")

    @on(Ping)
    async def ping(self, _: Ping) -> Pong:
        """Answer."""
        return Pong()


# --- the rules ------------------------------------------------------------------------------------------


class Judge:
    """Holds one incarnation of a supervisor against the rules of OTP's `supervisor`, by what is visible.

    A breach is a line in `violations`: an exception would only end the supervisor.
    """

    def __init__(
        self,
        who: str,
        children: Sequence[ChildSpec],
        strategy: Strategy,
        intensity: int,
        period_ns: int,
        violations: list[str],
    ) -> None:
        self.who, self.strategy, self.intensity, self.period_ns = who, strategy, intensity, period_ns
        self.policy = {child.name: child.restart for child in children}
        self.order = [child.name for child in children]
        self.up: set[str] = set()
        """Started, or being started, and not known to have ended."""
        self.left_down: set[str] = set()
        self.condemned: set[str] = set()
        """To end before anything starts again."""
        self.failures_ns: list[int] = []
        self.starts = dict.fromkeys(self.order, 0)
        self.ending = False
        self.gave_up = False
        """Whether it has to: one failure too many, or a child that could not be started the first time."""
        self.violations = violations

    def learn(self, event: Event, now_ns: int) -> None:
        """The supervisor is about to act on an event."""
        match event:
            case StopRequested():
                self.ending = True
            case ChildStartFailed(child=child):
                self.up.discard(child)
                if not self._was_condemned(child):
                    self._fails(child, now_ns, again=self.starts[child] > 1)
            case ChildExited(child=child, normal=normal):
                self.up.discard(child)
                if not self._was_condemned(child):
                    policy = self.policy[child]
                    if policy is Restart.PERMANENT or (policy is Restart.TRANSIENT and not normal):
                        self._fails(child, now_ns, again=True)
                    else:
                        self.left_down.add(child)
            case _:
                pass

    def see(self, action: Action, now_ns: int) -> None:
        """The supervisor does something."""
        match action:
            case StartChild(child=child):
                self._starts(child, now_ns)
            case StopChild(child=child) | KillChild(child=child):
                allowed = self.ending or child in self.condemned
                self._rule(allowed, f"{child} is stopped, and nothing asks for that: {action.reason}")
                later = self._after(child) & self.up
                self._rule(not later, f"{child} is stopped before {sorted(later)}")
            case Escalate(reason=reason):
                self._rule(self.gave_up, f"gives up although {self.intensity} are allowed: {reason}")
                self._rule(not self.up, f"gives up and leaves {sorted(self.up)}")
            case LeaveDown(child=child):
                permanent = self.policy[child] is Restart.PERMANENT
                self._rule(not permanent, f"{child} is permanent and left down: {action.reason}")
            case _:
                pass

    def whole(self) -> bool:
        """Whether everybody is up who should be."""
        return not self.ending and not self.condemned and self.up | self.left_down == set(self.order)

    def _starts(self, child: str, now_ns: int) -> None:
        self._rule(not self.ending, f"{child} is started while all are stopped")
        self._rule(child not in self.up, f"{child} is started and has not ended")
        self._rule(not self.condemned, f"{child} is started before {sorted(self.condemned)} have ended")
        later = self._after(child) & self.up
        if self.strategy is not Strategy.ONE_FOR_ONE or not self.starts[child]:
            self._rule(not later, f"{child} is started after {sorted(later)}, which come later")
        if self.starts[child]:
            temporary = self.policy[child] is Restart.TEMPORARY
            self._rule(not temporary, f"{child} is temporary and is started again")
            count = self._failures_in_period(now_ns)
            self._rule(count <= self.intensity, f"{child} is started after {count} failures")
        self.starts[child] += 1
        self.left_down.discard(child)
        self.up.add(child)

    def _fails(self, child: str, now_ns: int, *, again: bool) -> None:
        """A child ended that the supervisor did not stop; `again`: it is to be started again."""
        if self.ending:
            return
        self.failures_ns.append(now_ns)
        if not again or self._failures_in_period(now_ns) > self.intensity:
            self.ending = self.gave_up = True
            return
        match self.strategy:
            case Strategy.ONE_FOR_ONE:
                pass
            case Strategy.ONE_FOR_ALL:
                self.condemned |= self.up
            case Strategy.REST_FOR_ONE:
                self.condemned |= self._after(child) & self.up
        if self.policy[child] is Restart.TEMPORARY:
            self.left_down.add(child)

    def _was_condemned(self, child: str) -> bool:
        if child not in self.condemned:
            return self.ending
        self.condemned.discard(child)
        if self.policy[child] is Restart.TEMPORARY:
            self.left_down.add(child)
        return True

    def _after(self, child: str) -> set[str]:
        return set(self.order[self.order.index(child) + 1 :])

    def _failures_in_period(self, now_ns: int) -> int:
        return sum(now_ns - at_ns <= self.period_ns for at_ns in self.failures_ns)

    def _rule(self, holds: bool, what: str) -> None:
        if not holds and len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{self.who} ({self.strategy.value}): {what}")


# --- the world ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """A supervisor to be, and its children."""

    name: str
    strategy: Strategy
    intensity: int
    period_s: float
    children: tuple[TreePlan | ChildSpec, ...]

    def specs(self, board: Board) -> list[ChildSpec]:
        """Return the arguments of the supervisor."""
        return [child.spec(board) if isinstance(child, TreePlan) else child for child in self.children]

    def args(self, board: Board) -> tuple[object, ...]:
        """The arguments of its `NotingSupervisor`."""
        return (self.specs(board), self.strategy, self.intensity, self.period_s, board)

    def spec(self, board: Board) -> ChildSpec:
        """It as a child of another."""
        return ChildSpec(name=self.name, actor=NotingSupervisor, args=self.args(board))

    def workers(self) -> Iterator[ChildSpec]:
        """All workers below it."""
        for child in self.children:
            if isinstance(child, TreePlan):
                yield from child.workers()
            else:
                yield child

    def supervisors(self) -> set[str]:
        """Its name, and those of all supervisors below it."""
        return {self.name}.union(*(c.supervisors() for c in self.children if isinstance(c, TreePlan)))

    def standing(self, judges: Mapping[str, Judge]) -> set[str] | None:
        """Return the actors that are up in the tree, supervisors as well, if all are that should be."""
        if (judge := judges.get(self.name)) is None or not judge.whole():
            return None
        up = set(judge.up)
        for child in self.children:
            if isinstance(child, TreePlan) and child.name in up:
                if (below := child.standing(judges)) is None:
                    return None
                up |= below
        return up


@dataclass(slots=True)
class Watch:
    """One incarnation of a worker that is watched."""

    who: Ref
    told: int = 0

    def tell(self, _: Down) -> None:
        """It has ended."""
        self.told += 1


@dataclass(slots=True)
class Board:
    """The checkers' view; it outlives all processes."""

    world: World
    judges: dict[str, Judge] = field(default_factory=dict[str, Judge])
    """By name, of the tree that stands; a nested supervisor's last incarnation."""
    watches: list[tuple[SimProcess, Watch]] = field(default_factory=list[tuple[SimProcess, Watch]])
    systems: dict[str, tuple[SimProcess, ActorSystem]] = field(
        default_factory=dict[str, tuple[SimProcess, ActorSystem]]
    )
    violations: list[str] = field(default_factory=list[str])
    censuses: int = 0
    """The number of times that all workers have answered, one after the other."""

    def note(self, what: object) -> None:
        """Write into the history, as the process that runs."""
        process = current_process()
        assert isinstance(process, SimProcess)
        process.note(what)


class NotingSupervisor(Supervisor):
    """A real supervisor whose judge sees all that it learns and does."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        strategy: Strategy,
        intensity: int,
        period_s: float,
        board: Board,
    ) -> None:
        super().__init__(children, strategy, intensity, period_s)
        self._board = board
        self._judge = partial(
            Judge,
            children=children,
            strategy=strategy,
            intensity=intensity,
            period_ns=int(period_s * 1e9),
            violations=board.violations,
        )

    def _handle_one(self, event: Event, later: Deferred | None) -> None:
        board, name = self._board, self.ref.actor
        if isinstance(event, StartRequested):
            board.judges[name] = self._judge(repr(self.ref))
        board.note(f"{name} learns {event}")
        board.judges[name].learn(event, board.world.now_ns)
        if isinstance(event, ChildStarted):
            self._watch(event.child)
        super()._handle_one(event, later)

    def _perform(self, action: Action) -> None:
        self._board.note(f"{self.ref.actor} does {action}")
        self._board.judges[self.ref.actor].see(action, self._board.world.now_ns)
        super()._perform(action)

    def _watch(self, child: str) -> None:
        ref = self._running[child].ref
        process = current_process()
        assert ref is not None and isinstance(process, SimProcess)
        watch = Watch(ref)
        self._board.watches.append((process, watch))
        self.system.watch(ref, watch.tell)


class Grower:
    """The program of the node: grows the tree again and again, torments it, and counts the workers."""

    def __init__(self, board: Board, plan: TreePlan, ranks: Sequence[str], torment_until_ns: int) -> None:
        self._board, self._plan, self._ranks = board, plan, ranks
        self._torment_until_ns = torment_until_ns

    async def __call__(self, process: SimProcess) -> None:
        """The program."""
        system = ActorSystem(process.name, process.incarnation)
        self._board.systems[process.name] = (process, system)
        self._board.judges.clear()

        def accept(link: Link) -> None:
            try:
                system.attach(link)
            except LocalProtocolError:  # it dialled again, and the end of its first link is still under way
                link.close()

        process.listen(accept, contracts=fingerprints())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._grow(system))
            group.create_task(self._torment(process, system))
            group.create_task(self._count(system))

    async def _grow(self, system: ActorSystem) -> None:
        while True:
            if not set(self._ranks) <= set(system.peers):
                await asyncio.sleep(RETRY_S)
                continue
            self._board.judges.clear()
            try:
                root = await system.spawn(NotingSupervisor, *self._plan.args(self._board), name=ROOT)
            except ActorError as error:
                self._board.note(f"no tree: {type(error).__name__}")
                await asyncio.sleep(RETRY_S)
                continue
            down = await system.monitor(root).down()
            self._board.note(f"the tree is gone: {down.reason.kind.value}")

    async def _torment(self, process: SimProcess, system: ActorSystem) -> None:
        workers = list(self._plan.workers())
        while workers and process.world.now_ns < self._torment_until_ns:
            await asyncio.sleep(process.rng.expovariate(1e9 / TORMENT_NS))
            worker = process.rng.choice(workers)
            command = Leave() if process.rng.random() < 0.2 else Fail()
            process.note(f"{worker.name} receives {type(command).__name__}")
            with suppress(ActorError, PeerLost):  # it does not live just now
                await system.ref(f"{worker.process or NODE}/{worker.name}").tell(command)

    async def _count(self, system: ActorSystem) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            up = {child for judge in self._board.judges.values() for child in judge.up}
            try:
                for worker in self._plan.workers():
                    if worker.name in up:
                        ref = system.ref(f"{worker.process or NODE}/{worker.name}")
                        await ref.ask(Ping(), reply=Pong, timeout=PING_TIMEOUT_S)
            except (ActorError, PeerLost, DeadlineExceeded):
                continue
            self._board.censuses += 1


async def host(process: SimProcess, board: Board) -> None:
    """The program of a process that workers are spawned in: it stays linked with the node."""
    system = ActorSystem(process.name, process.incarnation)
    board.systems[process.name] = (process, system)
    while True:
        closed = asyncio.Event()

        def on_closed(_: ZbmdError | None, closed: asyncio.Event = closed) -> None:
            closed.set()

        try:
            link = await process.dial(NODE, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S)
            system.attach(link, on_closed=on_closed)
            await closed.wait()
        except (PeerLost, DeadlineExceeded):
            await asyncio.sleep(RETRY_S)


def draw_tree(
    rng: random.Random,
    processes: Sequence[str],
    *,
    here: str = NODE,
    actor: type[Actor] = Worker,
    prefix: str = "",
) -> TreePlan:
    """A root in `here` with up to `CHILDREN_MAX` children, workers or supervisors of workers.

    processes: where workers may live; prefix: of the names of all.
    """
    number = 0

    def worker() -> ChildSpec:
        nonlocal number
        number += 1
        process = rng.choice(processes)
        return ChildSpec(
            name=f"{prefix}w{number}",
            actor=actor,
            restart=rng.choice((Restart.PERMANENT, Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY)),
            shutdown_s=rng.choice((0.0, SHUTDOWN_S, SHUTDOWN_S)),
            process=None if process == here else process,
        )

    def supervisor(name: str, children: tuple[TreePlan | ChildSpec, ...]) -> TreePlan:
        return TreePlan(
            name=name,
            strategy=rng.choice(list(Strategy)),
            intensity=rng.randint(0, 4),
            period_s=rng.choice((0.02, 0.1, 1.0)),
            children=children,
        )

    def child(index: int) -> TreePlan | ChildSpec:
        if rng.random() < 0.7:
            return worker()
        return supervisor(f"{prefix}s{index}", tuple(worker() for _ in range(rng.randint(1, CHILDREN_MAX))))

    return supervisor(f"{prefix}{ROOT}", tuple(child(index) for index in range(rng.randint(1, CHILDREN_MAX))))


# --- what is looked for ---------------------------------------------------------------------------------


class Rules:
    """No judge has seen a breach."""

    name = "the rules of supervision"
    stride = 1

    def __init__(self, board: Board) -> None:
        self._board = board

    def check(self) -> None:
        """Raise `AssertionError` at the first breach."""
        assert not self._board.violations, self._board.violations[0]


class ToldOnce:
    """No watcher receives an end twice."""

    name = "told once"
    stride = 16

    def __init__(self, board: Board) -> None:
        self._board = board

    def check(self) -> None:
        """Look at all who watched a worker."""
        for _, watch in self._board.watches:
            assert watch.told <= 1, f"the end of {watch.who!r} was reported {watch.told} times"


class Wholeness:
    """The state that the tree must reach once all is healed."""

    def __init__(self, board: Board, plan: TreePlan) -> None:
        self._board, self._plan = board, plan
        self._censuses: int | None = None

    def reached(self, core: frozenset[str]) -> bool:
        """Whether the tree is whole, answers, is all there is, and all ends have been reported."""
        board = self._board
        if self._censuses is None:
            self._censuses = board.censuses
        if board.censuses < self._censuses + 2:  # the first may have begun before
            return False
        up = self._plan.standing(board.judges)
        return up is not None and self._nobody_else(up) and self._all_told(up)

    def _nobody_else(self, up: set[str]) -> bool:
        for name, (_, system) in self._board.systems.items():
            expected = {w.name for w in self._plan.workers() if w.name in up and (w.process or NODE) == name}
            if {actor.name for actor in system.describe() if actor.kind == Worker.__name__} != expected:
                return False
        return True

    def _all_told(self, up: set[str]) -> bool:
        """The end of each incarnation of a worker was reported, but for the last, if that is up."""
        untold = [watch.who for process, watch in self._board.watches if not process.dead and not watch.told]
        return len(untold) == len(up)


@dataclass(frozen=True)
class SupervisionScenario:
    """A tree over several processes. `length` counts, about, the commands to fail or leave."""

    name: str = "supervision"
    description: str = (
        "supervision trees over several processes, with workers that fail and processes that die"
    )
    kinds: tuple[type[Fault], ...] = (Crash, Pause, Slow, *NETWORK_FAULTS)

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        """See `zbmd.transport.sim.Scenario`. The ranks are the processes besides the node."""
        world = World(seed)
        ranks = tuple(f"rank{rank}" for rank in range(options.ranks))
        board, plan = Board(world), draw_tree(world.rng("tree"), (NODE, *ranks))
        span_ns = options.length * TORMENT_NS
        world.add(NODE, Grower(board, plan, ranks, world.now_ns + span_ns))
        for rank in ranks:
            world.add(rank, partial(host, board=board))
        return ScenarioStage(
            world=world,
            victims=(NODE, *ranks),
            converged=Wholeness(board, plan).reached,
            span_ns=span_ns,
            liveness_ns=LIVENESS_NS,
            checkers=(Rules(board), ToldOnce(board)),
        )
