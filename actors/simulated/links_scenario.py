"""Actor systems that tell and ask each other over simulated links, while links and processes misbehave.

Every process has a sink, supervised, and talks to the sink of every other: numbered tells in bursts, then an
ask, now and then a message that makes the sink fail. Each pair of incarnations has its own numbers, from 1
on.

What must hold: numbers arrive in order, none twice, none missing; an incarnation gets only what was sent to
it; of two incarnations of a sender the older is never heard after the younger; every ask ends in its answer
or a typed error by its deadline; queues stay within their bounds. Once healed, the core's asks are answered
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import ActorError
from zbmd.actors.supervision.machine import INTENSITY_MAX
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.link.interface import RING_BYTES_MIN, Link, LinkLimits
from zbmd.transport.sim import (
    NETWORK_FAULTS,
    PROCESS_FAULTS,
    Fault,
    Options,
    ScenarioStage,
    SimProcess,
    World,
)

SINK = "sink"
ASK_TIMEOUT_S = 0.010
DIAL_TIMEOUT_S = 0.050
ROUND_NS = 5_000_000
"""About what a round of one pair takes when all is well."""
BURST_MAX = 6
POISON_SHARE = 0.05
LATE_NS_MAX = 20_000_000
"""The longest delay of an ask beyond its deadline: the wheel's quantum, and a busy process's turns."""
LIVENESS_NS = 20_000_000_000
WAITING_MAX = 1 << 16
"""Room for all that can come while a process is stopped: no number is refused for want of it."""
VIOLATIONS_MAX = 16


class Who(Contract, id="sim.links.who"):
    """Asks a sink which incarnation it is."""


class Here(Contract, id="sim.links.here"):
    """The sink's own reference."""

    sink: Ref


class Number(Contract, id="sim.links.number"):
    """The `number`-th message from that incarnation of `sender` to the incarnation `sink_life` of a sink.

    `sure`: the last of those before it that was sent for certain; an ask that timed out may not have been.
    """

    sender: str
    sender_life: int
    process_life: int
    sink_life: int
    number: int
    sure: int


class Question(Contract, id="sim.links.question"):
    """A `Number` that wants an answer."""

    told: Number


class Answer(Contract, id="sim.links.answer"):
    """To a `Question`."""

    number: int


class Poison(Contract, id="sim.links.poison"):
    """Makes the sink fail, and its supervisor start another."""

    told: Number


AnswerT = TypeVar("AnswerT", bound=Contract)


class Poisoned(Exception):
    """The failure of a sink."""


@dataclass(slots=True)
class Board:
    """The checkers' view of all processes; it outlives them."""

    heard: dict[tuple[str, int, str, int, int], int] = field(
        default_factory=dict[tuple[str, int, str, int, int], int]
    )
    """By sender, its incarnation, receiver, its incarnation and the sink's: the last number."""
    sender_lives: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    asks: dict[int, tuple[SimProcess, int, str]] = field(
        default_factory=dict[int, tuple[SimProcess, int, str]]
    )
    """Under way: whose, its deadline on the world's clock, and whom it asks."""
    answered: dict[tuple[str, int, str, int], int] = field(
        default_factory=dict[tuple[str, int, str, int], int]
    )
    """Answers by asker, its incarnation, whom it asked, and that one's life."""
    systems: dict[str, tuple[SimProcess, ActorSystem]] = field(
        default_factory=dict[str, tuple[SimProcess, ActorSystem]]
    )
    violations: list[str] = field(default_factory=list[str])
    next_ask: int = 0

    def hear(self, process: SimProcess, told: Number, sink_life: int) -> None:
        """A sink got a message."""
        to = f"{process.name}#{process.incarnation}.{sink_life}"
        if (told.process_life, told.sink_life) != (process.incarnation, sink_life):
            self.violate(f"{to} got what was sent to #{told.process_life}.{told.sink_life}: {told}")
        pair = (told.sender, process.name)
        if told.sender_life < self.sender_lives.get(pair, 0):
            self.violate(f"{to} hears {told.sender}#{told.sender_life} after a younger life of it")
        self.sender_lives[pair] = told.sender_life
        key = (told.sender, told.sender_life, process.name, process.incarnation, sink_life)
        last = self.heard.get(key, 0)
        if not told.sure <= last < told.number:
            self.violate(f"{to} got {told} after number {last}")
        self.heard[key] = told.number

    def violate(self, what: str) -> None:
        """Something happened that must not. An exception would only end the actor that sees it."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(what)


class Sink(Actor):
    """Hears numbers, answers questions, dies of poison."""

    mailbox = MailboxSpec(capacity=WAITING_MAX)

    def __init__(self, board: Board, process: SimProcess) -> None:
        self._board, self._process = board, process

    @on(Who)
    async def who(self, _: Who) -> Here:
        """Say which incarnation this is."""
        return Here(self.ref)

    @on(Number)
    async def number(self, told: Number) -> None:
        """Take a number."""
        self._board.hear(self._process, told, self.ref.incarnation)

    @on(Question)
    async def question(self, question: Question) -> Answer:
        """Take a number, and answer after a while."""
        self._board.hear(self._process, question.told, self.ref.incarnation)
        if self._process.rng.random() < 0.3:
            await asyncio.sleep(self._process.rng.expovariate(2 / ASK_TIMEOUT_S))
        return Answer(question.told.number)

    @on(Poison)
    async def poison(self, poison: Poison) -> None:
        """Fail."""
        self._board.hear(self._process, poison.told, self.ref.incarnation)
        raise Poisoned("on request")


class Talker:
    """One process's talk with the sink of one other."""

    def __init__(self, board: Board, process: SimProcess, system: ActorSystem, peer: str) -> None:
        self._board, self._process, self._system, self._peer = board, process, system, peer
        self._number = 0
        self._sure = 0

    async def talk(self) -> None:
        """Talk to whichever life of the sink there is, for ever."""
        rng = self._process.rng
        while True:
            try:
                sink = (await self._ask(self._system.ref(f"{self._peer}/{SINK}"), Who(), Here)).sink
                self._number = self._sure = 0
                while True:
                    await self._round(sink)
            except DeadlineExceeded:
                pass
            except (PeerLost, ActorError) as error:
                self._process.note(f"{self._peer}: {type(error).__name__}")
            await asyncio.sleep(rng.expovariate(1e9 / ROUND_NS))

    async def _round(self, sink: Ref) -> None:
        rng = self._process.rng
        for _ in range(rng.randint(0, BURST_MAX)):
            await self._tell(sink, self._next(sink))
        question = Question(self._next(sink))
        try:
            answer = await self._ask(sink, question, Answer)
        except DeadlineExceeded:
            return  # it may have been heard: the numbers go on
        if answer.number != question.told.number:
            self._board.violate(f"{self._process}: {question} was answered with {answer}")
        self._sure = self._number
        key = (self._process.name, self._process.incarnation, sink.process, sink.process_incarnation)
        self._board.answered[key] = self._board.answered.get(key, 0) + 1
        if rng.random() < POISON_SHARE:
            await self._tell(sink, Poison(self._next(sink)))
        await asyncio.sleep(rng.expovariate(2e9 / ROUND_NS))

    async def _tell(self, sink: Ref, message: Contract) -> None:
        await sink.tell(message)
        self._sure = self._number

    def _next(self, sink: Ref) -> Number:
        self._number += 1
        return Number(
            sender=self._process.name,
            sender_life=self._process.incarnation,
            process_life=sink.process_incarnation,
            sink_life=sink.incarnation,
            number=self._number,
            sure=self._sure,
        )

    async def _ask(self, sink: Ref, message: Contract, reply: type[AnswerT]) -> AnswerT:
        board, process = self._board, self._process
        board.next_ask += 1
        ask = board.next_ask
        deadline_ns = process.world.now_ns + int(ASK_TIMEOUT_S * 1e9)
        board.asks[ask] = (process, deadline_ns, repr(sink))
        try:
            return await sink.ask(message, reply=reply, timeout=ASK_TIMEOUT_S)
        finally:
            board.asks.pop(ask, None)


class Member:
    """One process: its sink, a link to every other, and a talk with each."""

    def __init__(self, board: Board, names: tuple[str, ...], limits: LinkLimits) -> None:
        self._board, self._names, self._limits = board, names, limits

    async def __call__(self, process: SimProcess) -> None:
        """The program of the process."""
        system = ActorSystem(process.name, process.incarnation)
        self._board.systems[process.name] = (process, system)
        sink = ChildSpec(name=SINK, actor=Sink, args=(self._board, process))
        await system.supervise([sink], intensity=INTENSITY_MAX, name="tree")
        process.listen(self._accept(system), contracts=fingerprints(), limits=self._limits)
        others = [name for name in self._names if name != process.name]
        async with asyncio.TaskGroup() as group:
            for name in others:
                group.create_task(Talker(self._board, process, system, name).talk())
                if name < process.name:
                    group.create_task(self._stay_linked(process, system, name))
            await asyncio.Event().wait()

    def _accept(self, system: ActorSystem) -> Callable[[Link], None]:
        def accept(link: Link) -> None:
            try:
                system.attach(link)
            except LocalProtocolError:  # it dialled again, and the end of its first link is still under way
                link.close()

        return accept

    async def _stay_linked(self, process: SimProcess, system: ActorSystem, peer: str) -> None:
        while True:
            closed = asyncio.Event()

            def on_closed(_: ZbmdError | None, closed: asyncio.Event = closed) -> None:
                closed.set()

            try:
                link = await process.dial(
                    peer, contracts=fingerprints(), limits=self._limits, timeout_s=DIAL_TIMEOUT_S
                )
                try:
                    system.attach(link, on_closed=on_closed)
                except LocalProtocolError:
                    link.close()
                    raise
                await closed.wait()
            except (PeerLost, DeadlineExceeded, LocalProtocolError):
                await asyncio.sleep(process.rng.expovariate(1e9 / ROUND_NS))


class Promises:
    """The guarantees of messages between actors: see the module's text."""

    name = "order, at most once, to that life only"
    stride = 1

    def __init__(self, board: Board) -> None:
        self._board = board

    def check(self) -> None:
        """Raise `AssertionError` at the first breach."""
        assert not self._board.violations, self._board.violations[0]


class HasAsks(Protocol):
    """The asks under way: whose, the deadline on the world's clock, and whom it asks."""

    @property
    def asks(self) -> dict[int, tuple[SimProcess, int, str]]:
        """By any number."""
        ...


class InTime:
    """Every ask ends by its deadline, unless its process cannot run."""

    name = "asks end"
    stride = 64

    def __init__(self, board: HasAsks, world: World) -> None:
        self._board, self._world = board, world

    def check(self) -> None:
        """Look at the asks under way."""
        now_ns = self._world.now_ns
        for ask, (process, deadline_ns, whom) in list(self._board.asks.items()):
            if process.dead:
                del self._board.asks[ask]
            elif process.slowness == 1.0:
                late_ns = now_ns - max(deadline_ns, process.free_at_ns)
                assert late_ns < LATE_NS_MAX, f"{process}: an ask of {whom} is {late_ns / 1e6:.1f} ms late"


class Bounds:
    """The messages that wait for a process stay within their bounds."""

    name = "bounded queues"
    stride = 16

    def __init__(self, board: Board) -> None:
        self._board = board

    def check(self) -> None:
        """Look at the mailboxes."""
        for process, system in self._board.systems.values():
            for actor in system.describe():
                assert actor.waiting <= WAITING_MAX, f"{process}: {actor}"


@dataclass(frozen=True)
class LinksScenario:
    """Every process talks to every other. `length` counts the rounds that fit into the time of the faults."""

    name: str = "links"
    description: str = "tells and asks over links that are late, cut and clogged, between processes that die"
    kinds: tuple[type[Fault], ...] = (*PROCESS_FAULTS, *NETWORK_FAULTS)

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        world, board = World(seed), Board()
        names = tuple(f"rank{rank}" for rank in range(options.ranks))
        narrow = world.rng("limits").random() < 0.5
        limits = LinkLimits(ring_bytes=RING_BYTES_MIN, queue_frames_max=4) if narrow else LinkLimits()
        for name in names:
            world.add(name, Member(board, names, limits))
        counted: dict[tuple[str, int, str, int], int] = {}

        def converged(core: frozenset[str]) -> bool:
            """Every incarnation of the core has had an answer from every other since the first look."""
            if not counted:
                counted.update(board.answered)
                counted["", 0, "", 0] = 0
            pairs = ((a, b) for a in core for b in core if a != b)
            keys = ((a, world.incarnation(a), b, world.incarnation(b)) for a, b in pairs)
            return all(board.answered.get(key, 0) > counted.get(key, 0) for key in keys)

        return ScenarioStage(
            world=world,
            victims=names,
            core_min=min(2, len(names)),
            converged=converged,
            span_ns=options.length * ROUND_NS,
            liveness_ns=LIVENESS_NS,
            checkers=(Promises(board), InTime(board, world), Bounds(board)),
        )
