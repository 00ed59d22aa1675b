"""A group of ranks that runs one collective operation after the other, under kills and pauses.

Every round is an operation of the catalogue, drawn by the seed, over the living ranks: its programs run in
`zbmd.collectives.programs.simulate`, with the stepper that native execution uses. A rank that has seen a
member die forms the next round's group with the others; a restarted rank joins again.

What every rank must end with is worked out from the operation's `Spec` alone: the reduction tree of each
chunk, evaluated over copies of the inputs, bit for bit.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation, Request, algorithm_of, build, spec_of
from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.programs.layout import (
    Layout,
    all_to_all_layout,
    gather_layout,
    reduce_scatter_layout,
    scatter_layout,
)
from zbmd.collectives.programs.program import IN, OUT, PUB, Operand, chunk_extent, input_buffer
from zbmd.collectives.programs.simulate import Outcome, Result, Simulation
from zbmd.collectives.programs.spec import Spec, Tree
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.scenario import EVENTS_MAX

Array = NDArray[np.float32]
Buffers = Mapping[int, Array]

STEP_NS = 1_000
"""The time of a step of a rank; half of a put, copy or reduce is one."""
ROUND_GAP_NS = 5_000
GROUP_MAX = 16
"""Ranks beyond these take no part: the programs' number grows with their square."""
COUNT_MAX = 23
SHARDS_MAX = 9
HOSTS_MAX = 3
CHUNKS_A_RANK_MAX = 2
STORY_RECORDS = 40
STEPS_A_MEMBER = 12
"""Steps of a rank of a group of two in a round, about; they grow with the group."""
LIVENESS_NS = 10_000_000_000
KINDS = tuple(sorted(ALGORITHMS, key=str))


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: the request, the caller's arrays of every rank, and what it must end with."""

    request: Request
    count: int
    layout: Layout | None
    buffers: tuple[Buffers, ...]
    expected: tuple[Array | None, ...]


def draw_case(
    rng: random.Random, n: int, *, kind: tuple[Operation, str] | None = None, count: int | None = None
) -> Case:
    """Draw an operation over `n` ranks, of any algorithm unless given, in place or not, with random inputs.

    `count`, elements a block, is drawn too unless given.
    """
    operation, algorithm = rng.choice(KINDS) if kind is None else kind
    entry = ALGORITHMS[operation, algorithm]
    blank = Request(operation=operation, algorithm=algorithm, n=n)
    chunks = blank.blocks * rng.randint(1, CHUNKS_A_RANK_MAX) if operation.blocked else rng.randint(1, 2 * n)
    shards = rng.randint(1, SHARDS_MAX) if operation is Operation.ALL_REDUCE_SHARDS else 0
    request = replace(
        blank,
        chunks=1 if operation is Operation.BARRIER else chunks,
        root=rng.randrange(n),
        shards=shards,
        assignment=assign_shards(shards, n) if shards else (),
        hosts=tuple(rng.randrange(HOSTS_MAX) for _ in range(n)) if entry.over_hosts else (),
    )
    count = rng.randint(0, COUNT_MAX) if count is None else count
    in_place = not entry.eager and rng.random() < 0.5
    values = np.random.default_rng(rng.randrange(1 << 32))
    buffers = tuple(_buffers(request, rank, count, in_place, values) for rank in range(n))
    layout = _even_layout(request, count)
    return Case(request, count, layout, buffers, _expected(request, count, layout, in_place, buffers))


def _even_layout(request: Request, count: int) -> Layout | None:
    """Return the layout of `count` elements a block, or None if the blocks are one stride apart."""
    n, counts = request.n, (count,) * request.n
    match request.operation:
        case Operation.ALL_TO_ALL:
            return all_to_all_layout((counts,) * n)
        case Operation.GATHER:
            return gather_layout(counts, request.root)
        case Operation.SCATTER:
            return scatter_layout(counts, request.root)
        case Operation.REDUCE_SCATTER if algorithm_of(request).eager:
            return reduce_scatter_layout(counts)
        case _:
            return None


def _buffers(request: Request, rank: int, count: int, in_place: bool, values: np.random.Generator) -> Buffers:
    """The arrays that a rank calls the operation with."""

    def fresh(size: int) -> Array:
        return values.standard_normal(size).astype(np.float32)

    n, eager = request.n, algorithm_of(request).eager
    at_root = rank == request.root
    own = slice(rank * count, (rank + 1) * count)
    match request.operation:
        case Operation.ALL_REDUCE:
            given = fresh(count)
            return {PUB if eager else IN: given, OUT: given if in_place else np.zeros_like(given)}
        case Operation.REDUCE_SCATTER:
            given = fresh(n * count)
            return {PUB if eager else IN: given, OUT: given[own] if in_place else np.zeros(count, np.float32)}
        case Operation.REDUCE:
            given = fresh(count)
            mine = {PUB if eager else IN: given}
            return mine | {OUT: given if in_place else np.zeros_like(given)} if at_root else mine
        case Operation.GATHER:
            given = fresh(count)
            mine = {PUB if eager else IN: given}
            return mine | {OUT: np.zeros(n * count, np.float32)} if at_root else mine
        case Operation.SCATTER:
            taken = {OUT: np.zeros(count, np.float32)}
            return taken | {PUB if eager else IN: fresh(n * count)} if at_root else taken
        case Operation.ALL_TO_ALL:
            return {PUB if eager else IN: fresh(n * count), OUT: np.zeros(n * count, np.float32)}
        case Operation.ALL_GATHER:
            out, given = np.zeros(n * count, np.float32), fresh(count)
            if in_place:
                out[own] = given
                given = out[own]
            return {PUB if eager else IN: given, OUT: out}
        case Operation.BROADCAST:
            given = fresh(count)
            return {OUT: given, PUB: given.copy()} if eager else {OUT: given}
        case Operation.ALL_REDUCE_SHARDS:
            lo, hi = request.assignment[rank]
            partials = {
                input_buffer(k): reduce_shards([fresh(count) for _ in range(*node)])
                for k, node in enumerate(shard_tree_nodes(request.shards, lo, hi))
            }
            out = partials[IN] if in_place and IN in partials else np.zeros(count, np.float32)
            return {**partials, OUT: out}
        case Operation.BARRIER:
            return {}


def _expected(
    request: Request, count: int, layout: Layout | None, in_place: bool, buffers: Sequence[Buffers]
) -> tuple[Array | None, ...]:
    """Return the content that each rank's `out` must have, by the operation's contract."""
    spec = spec_of(request, in_place=in_place)
    given = [{buffer: array.copy() for buffer, array in own.items()} for own in buffers]
    expected = [own[OUT].copy() if OUT in own else None for own in buffers]
    places = {(label, place.number): place for place, label in spec.inputs.items()}

    def evaluate(tree: Tree, chunk: int) -> Array:
        if isinstance(tree, int):
            return _chunk(spec, count, layout, given, places[tree, chunk])
        total: Array = np.add(evaluate(tree[0], chunk), evaluate(tree[1], chunk))
        return total

    for output in spec.outputs:
        out = expected[output.place.rank]
        assert out is not None
        target = _chunk(spec, count, layout, {output.place.rank: {OUT: out}}, output.place)
        target[...] = evaluate(output.tree, output.place.number)
    return tuple(expected)


def _chunk(
    spec: Spec,
    count: int,
    layout: Layout | None,
    buffers: Sequence[Buffers] | Mapping[int, Buffers],
    place: Operand,
) -> Array:
    block, first, end = chunk_extent(place.number, count=count, blocks=spec.blocks, chunks=spec.chunks)
    array = buffers[place.rank][place.buffer]
    base = block * count if array.size > count else 0
    if layout is not None:
        sides = layout.targets if place.buffer == OUT else layout.sources
        base = layout.offsets(layout.lengths, sides)[0][block]
    return array[base + first : base + end]


@dataclass(slots=True)
class Round:
    """One operation over the ranks that lived when it began."""

    number: int
    members: tuple[str, ...]
    case: Case
    simulation: Simulation
    noted: int = 0
    killed: set[str] = field(default_factory=set[str])
    results: list[Result] | None = None


@dataclass(slots=True)
class _Rank:
    alive: bool = True
    incarnation: int = 1
    paused_until_ns: int = 0


class CollectiveWorld:
    """The world of such a group: a `zbmd.transport.sim.SimulatedWorld` in which steps take the time."""

    def __init__(self, seed: int | str, ranks: int, rounds: int) -> None:
        self.seed = seed
        self.history = sim.History()
        self.now_ns = sim.SIM_START_NS
        self.events = 0
        self.ended: list[Round] = []
        self.names = tuple(f"rank{rank}" for rank in range(min(ranks, GROUP_MAX)))
        self.healed_at_round: int | None = None
        self._others = frozenset(f"rank{rank}" for rank in range(GROUP_MAX, ranks))
        self._ranks = {name: _Rank() for name in self.names}
        self._rounds_wanted = rounds
        self._round: Round | None = None
        self._waits_until_ns = 0
        self._acts: list[tuple[int, int, sim.Fault, Callable[[], None]]] = []
        self._planned = 0
        self._checkers: list[tuple[str, Callable[[], None], int]] = []

    @property
    def supported(self) -> frozenset[type[sim.Fault]]:
        """Memory is all that they share: processes can die or stand still."""
        return frozenset((sim.Crash, sim.Pause))

    def add_checker(self, name: str, check: Callable[[], None], *, stride: int = 1) -> None:
        """See `SimulatedWorld`."""
        self._checkers.append((name, check, stride))

    def apply(self, fault: sim.Fault) -> None:
        """See `SimulatedWorld`."""
        match fault:
            case sim.Crash(process=name):
                self._plan(fault.at_ns, fault, partial(self._crash, name))
                if fault.for_ns:
                    self._plan(fault.at_ns + fault.for_ns, fault, partial(self._revive, name))
            case sim.Pause(process=name):
                self._plan(fault.at_ns, fault, partial(self._pause, name, fault.for_ns))
            case _:
                raise sim.UnsupportedFault(f"a group over shared memory has nothing for {fault} to strike")
        if name not in self._ranks and name not in self._others:
            raise LocalProtocolError(f"no simulated process {name}; there are {list(self.names)}")

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """See `SimulatedWorld`. One more round, with all of the core, is asked for."""
        self._acts.clear()
        self._waits_until_ns = 0
        for name in self.names:
            if name in core:
                self._ranks[name].paused_until_ns = self.now_ns
                if revive:
                    self._revive(name)
        self.healed_at_round = len(self.ended) + (self._round is not None)
        self._rounds_wanted = self.healed_at_round + 1

    def run(
        self,
        *,
        until: Callable[[], bool] | None = None,
        for_ns: int | None = None,
        max_events: int = EVENTS_MAX,
    ) -> sim.RunEnd:
        """See `SimulatedWorld`."""
        end_ns = None if for_ns is None else self.now_ns + for_ns
        for _ in range(max_events):
            if until is not None and until():
                return sim.RunEnd.REACHED
            next_ns = self._next_ns()
            if next_ns is None:
                return sim.RunEnd.QUIET
            if end_ns is not None and next_ns > end_ns:
                self.now_ns = end_ns
                return sim.RunEnd.TIME_UP
            self.now_ns = max(self.now_ns, next_ns)
            self.events += 1
            self._take()
            for name, check, stride in self._checkers:
                if self.events % stride == 0:
                    self._check(name, check)
        raise self._failure(f"no end after {max_events} events", sim.FailureKind.LIVENESS)

    def digest(self) -> str:
        """See `SimulatedWorld`."""
        return self.history.digest()

    def close(self) -> None:
        """Nothing to give back."""

    # -- the rounds --------------------------------------------------------------------------------------

    def _next_ns(self) -> int | None:
        """When the next thing happens; None: nothing will."""
        act_ns = self._acts[0][0] if self._acts else None
        step_ns = None
        if self._round is not None:
            step_ns = max(self.now_ns + STEP_NS, self._waits_until_ns)
        elif len(self.ended) < self._rounds_wanted and any(rank.alive for rank in self._ranks.values()):
            step_ns = self.now_ns + ROUND_GAP_NS
        return min((ns for ns in (act_ns, step_ns) if ns is not None), default=None)

    def _take(self) -> None:
        if self._acts and self._acts[0][0] <= self.now_ns:
            _, _, fault, act = heapq.heappop(self._acts)
            self.history.raw.append((self.now_ns, "world", 0, sim.HistoryKind.FAULT, fault))
            act()
        elif self._round is None:
            self._begin()
        else:
            self._step(self._round)

    def _begin(self) -> None:
        number = len(self.ended)
        members = tuple(name for name in self.names if self._ranks[name].alive)
        rng = random.Random(f"{self.seed}/round {number}/{members}")
        case = draw_case(rng, len(members))
        programs = [build(case.request, rank) for rank in range(len(members))]
        simulation = Simulation(
            programs,
            case.buffers,
            case.count,
            seed=rng.randrange(1 << 32),
            layout=case.layout,
            sent=spec_of(case.request).sent,
        )
        self._round = Round(number, members, case, simulation)
        self._note(f"round {number} of {', '.join(members)}: {case.request}, {case.count} elements")

    def _step(self, current: Round) -> None:
        held = {
            index: until_ns
            for index, name in enumerate(current.members)
            if (until_ns := self._ranks[name].paused_until_ns) > self.now_ns
        }
        went_on = current.simulation.step(held)
        for line in current.simulation.history[current.noted :]:
            self._note(line)
        current.noted = len(current.simulation.history)
        current.results = current.simulation.results()
        if current.results is not None:
            self.ended.append(current)
            self._round = None
        elif not went_on and held:
            self._waits_until_ns = min(held.values())
        elif not went_on:
            what = f"round {current.number} ({current.case.request}): survivors wait for ever"
            raise self._failure(what, sim.FailureKind.LIVENESS)

    # -- life and death ----------------------------------------------------------------------------------

    def _crash(self, name: str) -> None:
        rank = self._ranks.get(name)
        if rank is None or not rank.alive:
            return
        rank.alive = False
        self._waits_until_ns = 0
        self.history.raw.append((self.now_ns, name, rank.incarnation, sim.HistoryKind.CRASH, ""))
        if self._round is not None and name in self._round.members:
            self._round.killed.add(name)
            self._round.simulation.kill(self._round.members.index(name))

    def _revive(self, name: str) -> None:
        rank = self._ranks.get(name)
        if rank is None or rank.alive:
            return
        rank.alive, rank.paused_until_ns = True, 0
        rank.incarnation += 1
        self.history.raw.append((self.now_ns, name, rank.incarnation, sim.HistoryKind.START, ""))

    def _pause(self, name: str, for_ns: int) -> None:
        if name in self._ranks:
            rank = self._ranks[name]
            rank.paused_until_ns = max(rank.paused_until_ns, self.now_ns + for_ns)

    # -- small parts -------------------------------------------------------------------------------------

    def _plan(self, at_ns: int, fault: sim.Fault, act: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._acts, (sim.SIM_START_NS + at_ns, self._planned, fault, act))

    def _note(self, line: str) -> None:
        self.history.raw.append((self.now_ns, "group", len(self.ended), sim.HistoryKind.NOTE, line))

    def _check(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise self._failure(f"checker {name}: {error}", sim.FailureKind.SAFETY) from error

    def _failure(self, what: str, kind: sim.FailureKind) -> sim.SimulationFailure:
        story = self.history[-STORY_RECORDS:]
        return sim.SimulationFailure(
            what, kind=kind, seed=self.seed, at_ns=self.now_ns, events=self.events, story=story
        )


class RightOrNothing:
    """Check that ranks that complete have the right bits; and that all complete if none was killed."""

    name = "right or nothing"
    stride = 1

    def __init__(self, world: CollectiveWorld) -> None:
        self._world = world
        self._checked = 0

    def check(self) -> None:
        """Look at the rounds that have ended since."""
        for ended in self._world.ended[self._checked :]:
            self._checked += 1
            assert ended.results is not None
            for name, result, expected in zip(ended.members, ended.results, ended.case.expected, strict=True):
                where = f"round {ended.number}, {ended.case.request}: {name}"
                if result.outcome is Outcome.COMPLETE and expected is not None:
                    assert _same_bits(result.out, expected), f"{where} completed with {result.out}"
                killed = name in ended.killed
                assert killed or result.outcome is not Outcome.KILLED, where
                assert ended.killed or result.outcome is Outcome.COMPLETE, f"{where}: {result.outcome}"


def _same_bits(a: NDArray[Any] | None, b: Array) -> bool:
    return a is not None and a.tobytes() == b.tobytes()


@dataclass(frozen=True)
class CollectivesScenario:
    """Operations of all algorithms over the living ranks. `length` counts rounds."""

    name: str = "collectives"
    description: str = "programs of every operation and algorithm, under kills and pauses, bit for bit"
    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, sim.Pause)

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        world = CollectiveWorld(seed, options.ranks, options.length)

        def converged(core: frozenset[str]) -> bool:
            after = world.healed_at_round
            last = world.ended[-1] if world.ended else None
            if after is None or last is None or last.number < after:
                return False
            return core & frozenset(world.names) <= frozenset(last.members)

        ranks = len(world.names)
        round_ns = ROUND_GAP_NS + ranks * (ranks + 1) * STEPS_A_MEMBER // 3 * STEP_NS
        return sim.ScenarioStage(
            world=world,
            victims=world.names,
            core_min=1,
            converged=converged,
            span_ns=options.length * round_ns,
            liveness_ns=LIVENESS_NS,
            checkers=(RightOrNothing(world),),
        )
