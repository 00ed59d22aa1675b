"""The simulated nodes, what outlives them all, and the actors of their trees, which report to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import msgspec

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.contracts import decode
from zbmd.actors.cluster.heartbeats import detector as d
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.port import ClusterListener
from zbmd.actors.cluster.state.job_table import Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.ref import Ref, external_name, owned_name
from zbmd.actors.directory.events import GroupNews
from zbmd.actors.routing.contracts import Route
from zbmd.actors.simulated.ledgers import (
    Groups,
    Incarnations,
    Names,
    Nodes,
    ProcessKey,
    Talks,
    Ties,
    Upgrades,
)
from zbmd.actors.simulated.membership_scenario import Cluster, name_of
from zbmd.actors.simulated.supervision_scenario import Board, TreePlan
from zbmd.transport.link.interface import Link
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.sim import SimProcess, World, current_process

# --- a node: membership over datagrams, and the address where actors reach other nodes ------------------


DIAL_TIMEOUT_S: Final = 0.2
NO_VIEW: Final = ClusterView(epoch=0, nodes=())


class Packet(Contract, id="sim.cluster.packet"):
    """A message of one node's life to another's. `to` of incarnation 0: whichever lives."""

    sender: Node
    to: NodeKey
    body: bytes


async def dial_client(process: SimProcess, route: Route, name: str) -> Link:
    """A link to a process, as its guest. name: what all call us. Raises as `SimProcess.dial`."""
    return await process.dial(
        route.far, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S, hello=external_name(name, "")
    )


def accept_clients(process: SimProcess, accept: Callable[[Link], None]) -> None:
    """Take links of all, as a guest does."""
    process.listen(accept, contracts=fingerprints(), hello=external_name(process.name, ""))


class SimActorEndpoint:
    """An `ActorEndpoint` by the world's links."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process

    async def listen(self, accept: Callable[[Link], None]) -> str:
        """See `ActorEndpoint`."""
        self._process.listen(accept, contracts=fingerprints())
        return self._process.name

    async def dial(self, address: str) -> Link:
        """See `ActorEndpoint`."""
        return await self._process.dial(address, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S)

    async def dial_route(self, route: Route) -> Link:
        """See `ActorEndpoint`."""
        return await dial_client(self._process, route, self._process.name)

    async def close(self) -> None:
        """See `ActorEndpoint`: the process ends."""


class SimNode:
    """One incarnation of a node, that of its process: a `ClusterPort` that drives machine and detector.

    `over` is done with the reason once this incarnation is.
    """

    def __init__(self, process: SimProcess, cluster: Cluster, node_id: int) -> None:
        self.me = Node(NodeKey(node_id, process.incarnation), process.name)
        self.view = NO_VIEW
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.machine = ClusterMachine(self.me, cluster.deadlines)
        self._process = process
        self._cluster = cluster
        self._detector = d.Detector(cluster.deadlines)
        self._beat_ns = cluster.deadlines.heartbeat_ns
        self._observers: tuple[Node, ...] = ()
        self._listener: ClusterListener | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, contacts: Sequence[Node]) -> None:
        """Found the cluster, or join it at one of these nodes; then hear what comes, until it is over."""
        beating = asyncio.create_task(self._beat())
        try:
            self.feed(m.JoinCluster(doors=tuple(contacts)) if contacts else m.FoundCluster())
            while not self.over.done():
                self._arrived((await self._process.receive_datagram()).data)
        finally:
            beating.cancel()

    # -- `ClusterPort` -----------------------------------------------------------------------------------

    def command(self, order: Order) -> int:
        """See `ClusterPort`."""
        self.feed(m.Ordered(order=order))
        return self.machine.ordered

    def send(self, to: NodeKey, message: Contract) -> None:
        """See `ClusterPort`."""
        packet = Packet(self.me, to, msgspec.msgpack.encode(message))
        self._process.send_datagram(name_of(to.id), msgspec.msgpack.encode(packet))

    def leave(self) -> None:
        """See `ClusterPort`."""
        self.feed(m.LeaveRequested())

    def listen(self, listener: ClusterListener) -> None:
        """See `ClusterPort`."""
        self._listener = listener
        listener.began(self.me)

    # -- the machine and the detector --------------------------------------------------------------------

    def feed(self, event: m.Event) -> None:
        """Put an event to the machine, and do as it says."""
        machine, known = self.machine, self.machine.view.epoch
        actions = machine.handle(event, now_ns=time.monotonic_ns())
        machine.check_invariants()
        if machine.view.epoch != known:
            self._cluster.learnt(self.me.key, machine.view)
        for action in actions:
            self._perform(action)

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                self.send(to.key, message)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0, at_ns - time.monotonic_ns()) / 1e9
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(delay_s, self.feed, TimerFired())
            case m.WatchMembers(subjects=subjects, observers=observers):
                self._beat_ns = d.beat_ns(self._cluster.deadlines, busy=self.machine.view.jobs.busy)
                keys = tuple(node.key for node in subjects)
                self._detect(d.Observe(subjects=keys, beat_ns=self._beat_ns))
                self._observers = observers
            case m.Installed(view=view, reason=reason):
                self._cluster.acts(self.me.key, view)
                self.view = view
                self._process.note(f"acts on {view}: {reason}")
                if self._listener is not None:
                    self._listener.acts_on(view, reason)
            case m.AskWitness():
                raise AssertionError("there is no witness")
            case m.Stopped(reason=reason):
                self._stopped(reason)
            case _:
                assert_never(action)

    def _stopped(self, reason: str) -> None:
        assert self._process.name not in self._cluster.protected, f"{self.me.key} stops: {reason}"
        self._process.note(f"stops: {reason}")
        self.view = NO_VIEW
        if not self.over.done():
            self.over.set_result(reason)
        if self._listener is not None:
            self._listener.stopped(reason)

    def _arrived(self, data: bytes) -> None:
        packet = decode(data)
        assert isinstance(packet, Packet)
        if packet.to not in (self.me.key, NodeKey(self.me.id, 0)):
            return
        self._detect(d.Beats(key=packet.sender.key, arrivals_ns=(time.monotonic_ns(),)))
        message = decode(packet.body)
        if isinstance(message, m.Message):
            self.feed(m.Received(sender=packet.sender, message=message))
        elif self._listener is not None:
            self._listener.received(packet.sender.key, message)

    async def _beat(self) -> None:
        while not self.over.done():
            beat = m.Beat(known=self.machine.view.epoch, entered=self.machine.entered)
            for observer in self._observers:
                self.send(observer.key, beat)
            self._detect(d.Looked())
            await asyncio.sleep(self._beat_ns / 1e9)

    def _detect(self, event: d.Event) -> None:
        """A beat looks at all, so nobody has to look earlier for a limit."""
        for action in self._detector.handle(event, now_ns=time.monotonic_ns()):
            match action:
                case d.Silent(key=key, reason=reason):
                    self.feed(m.Suspected(key=key, reason=reason))
                case d.Audible(key=key):
                    self.feed(m.Trusted(key=key))
                case d.Limit():
                    pass
                case _:
                    assert_never(action)
        self._detector.check_invariants()


HOST: Final = "node1"
"""The node that all sessions are in by, which founds the cluster and is never lost."""
SESSIONS: Final = tuple(owned_name(f"session-{number}", HOST) for number in (1, 2))
ERRAND: Final = "errand"
"""The worker of each session."""


@dataclass(slots=True)
class Testbed(Board):
    """World, cluster, ledgers. plans: the tree of each node; torment_until_ns: when faults end."""

    cluster: Cluster = field(kw_only=True)
    plans: dict[str, TreePlan] = field(default_factory=dict[str, TreePlan])
    torment_until_ns: int = 0
    ports: dict[str, SimNode] = field(default_factory=dict[str, SimNode])
    asks: dict[int, tuple[SimProcess, int, str]] = field(
        default_factory=dict[int, tuple[SimProcess, int, str]]
    )
    next_ask: int = 0
    answered: dict[tuple[ProcessKey, ProcessKey], int] = field(
        default_factory=dict[tuple[ProcessKey, ProcessKey], int]
    )
    """When one node had its last answer from another, ns."""
    sessions: dict[str, int] = field(default_factory=dict[str, int])
    """Sessions that have got in, and which incarnation of each."""
    nodes: Nodes = field(init=False)
    lives: Incarnations = field(init=False)
    talks: Talks = field(init=False)
    names: Names = field(init=False)
    groups: Groups = field(init=False)
    ties: Ties = field(init=False)
    upgrades: Upgrades = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.world)
        self.lives = Incarnations(self.nodes)
        self.talks = Talks(self.lives)
        self.names = Names(self.nodes, self.lives)
        self.groups = Groups(self.nodes, self.lives)
        self.ties = Ties(self.lives)
        self.upgrades = Upgrades(self.nodes)

    def sessions_in(self) -> list[ProcessKey]:
        """The sessions that live, and have got in."""
        return [incarnation for incarnation in self.sessions.items() if self.nodes.lives(incarnation)]

    @property
    def tormented(self) -> bool:
        """Whether faults strike, and anybody changes anything."""
        return self.world.now_ns < self.torment_until_ns


class TestbedWorld(World):
    """A world in which actors find the testbed; their arguments may have come over a link."""

    testbed: Testbed


def here() -> tuple[SimProcess, Testbed]:
    """The process that runs, and the testbed of its world."""
    process = current_process()
    assert isinstance(process, SimProcess) and isinstance(process.world, TestbedWorld)
    return process, process.world.testbed


LINGER_S: Final = 0.02
ANSWER_S: Final = 0.005
CRASHES: Final = 0.2
UNFIT: Final = 0.3
WAITING_MAX: Final = 1 << 16


class Who(Contract, id="sim.actors.who"):
    """Asks an actor which incarnation it is."""


class Here(Contract, id="sim.actors.here"):
    """The actor's own reference."""

    ref: Ref


class SessionMessage(Contract, id="sim.actors.told"):
    """The `number`-th message of a session. sure: the last of those before that was sent for certain."""

    session: int
    number: int
    sure: int


class Question(Contract, id="sim.actors.question"):
    """A `SessionMessage` that wants an answer."""

    told: SessionMessage


class Answer(Contract, id="sim.actors.answer"):
    """To a `Question`. count: how many messages of its session the actor has handled."""

    number: int
    count: int


class Fresh(Contract, id="sim.actors.fresh"):
    """The `number`-th broadcast of a source."""

    source: int
    number: int


class Fail(Contract, id="sim.actors.fail"):
    """Raise."""


class Leave(Contract, id="sim.actors.leave"):
    """End normally."""


class Failure(Exception):
    """The failure of a worker."""


class Worker(Actor, remote=True, version=1):
    """Remembers what it has handled, and obeys commands."""

    mailbox = MailboxSpec(capacity=WAITING_MAX)

    def __init__(self) -> None:
        self.handled: dict[int, list[int]] = {}

    def memory(self, session: int) -> list[int]:
        """The last number of a session, and how many there were."""
        return self.handled.setdefault(session, [0, 0])

    async def started(self) -> None:
        """Be born, and take a while to start, or none."""
        _, testbed = here()
        testbed.lives.born(self.ref)
        self.system.watch(self.ref, testbed.lives.ended)
        await _linger()

    async def stopping(self, reason: object) -> None:
        """Take a while, or none; longer than it may, now and then."""
        await _linger()

    @on(Who)
    async def who(self, _: Who) -> Here:
        """Say which incarnation this is."""
        return Here(self.ref)

    @on(SessionMessage)
    async def told(self, told: SessionMessage) -> None:
        """Handle a message."""
        self._handle(told)

    @on(Question)
    async def question(self, question: Question) -> Answer:
        """Handle a message, and answer after a while."""
        process, _ = here()
        count = self._handle(question.told)
        if process.rng.random() < 0.3:
            await asyncio.sleep(process.rng.expovariate(1 / ANSWER_S))
        return Answer(question.told.number, count)

    @on(Fresh)
    async def fresh(self, fresh: Fresh) -> None:
        """Hear a broadcast."""
        here()[1].talks.heard_news(self.ref, fresh.source, fresh.number)

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        """Raise."""
        raise Failure("on request")

    @on(Leave)
    async def leave(self, _: Leave) -> None:
        """End normally."""
        self.stop("on request")

    def _handle(self, told: SessionMessage) -> int:
        memory = self.memory(told.session)
        here()[1].talks.handled(self.ref, told.session, told.number, told.sure, memory[0])
        memory[:] = [told.number, memory[1] + 1]
        return memory[1]


class Worker2(Worker, remote=True, version=2):
    """Keeps its memory elsewhere."""

    numbers: dict[int, list[int]]

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        """See `Actor`."""
        return {"numbers": state["handled"]} if from_version == 1 else state

    @classmethod
    def code_change_back(cls, state: dict[str, Any], to_version: int) -> dict[str, Any]:
        """See `Actor`."""
        return {"handled": state["numbers"]} if to_version == 1 else state

    def __init__(self) -> None:
        self.numbers = {}

    def memory(self, session: int) -> list[int]:
        """See `Worker`."""
        return self.numbers.setdefault(session, [0, 0])


class Worker3(Worker2, remote=True, version=3):
    """Another that is right."""


class Broken(Worker2, remote=True, version=4):
    """Crashes in a message now and then, after it has spoilt what it remembers."""

    def _handle(self, told: SessionMessage) -> int:
        if here()[0].rng.random() < CRASHES:
            self.memory(told.session)[:] = [told.number, -1]
            self.numbers[-1] = [0, 0]
            raise Failure("a bug of the new version")
        return super()._handle(told)


class Unfit(Worker2, remote=True, version=5):
    """Cannot take over what some actors remember."""

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        """See `Actor`."""
        if here()[0].rng.random() < UNFIT:
            raise Failure("this cannot be taken over")
        return super().code_change(state, from_version)


LATER: Final[dict[type[Actor], tuple[type[Actor], ...]]] = {
    Worker: (Worker2, Worker2, Broken, Broken, Unfit),
    Worker2: (Worker3, Broken),
    Broken: (Worker3,),
    Unfit: (Worker3, Broken),
}
"""The versions that each version may become."""


class Watcher(Actor):
    """Receives the changes of a group."""

    def __init__(self, testbed: Testbed, group: str) -> None:
        self._testbed, self._group = testbed, group

    @on(GroupNews)
    async def news(self, news: GroupNews) -> None:
        """Note who has joined and left."""
        incarnation = (self.system.name, self.system.incarnation)
        self._testbed.groups.changed(incarnation, self._group, "news", tuple(news.joined), tuple(news.left))


async def _linger() -> None:
    process, _ = here()
    if process.rng.random() < 0.3:
        await asyncio.sleep(process.rng.expovariate(1 / LINGER_S))
