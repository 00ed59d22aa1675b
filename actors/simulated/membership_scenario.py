"""A simulated cluster of nodes that run the view-change machine and the detector.

A part of the nodes is **protected**: a majority, connected among itself and alive throughout. The others are
killed, paused, cut off, deaf or mute. Checked after every event:

- no two nodes know different views of one epoch;
- a node acts on newer and newer views, each of which holds it;
- when the first one acts on a view, every member of it knows it (or did when it died);
- a protected node never stops.

The others are not started before all the protected are in: so these are a quorum of every view.

Once the faults have ended, all must act on the one view that holds them all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol, TypeAlias, assert_never

from zbmd.actors.cluster import messages
from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.heartbeats import detector as d
from zbmd.actors.cluster.heartbeats.detector import Detector
from zbmd.actors.cluster.membership import witness
from zbmd.actors.cluster.membership.machine import LEFT, ClusterMachine, MemberState
from zbmd.actors.cluster.state.job_table import Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.transport import sim
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

Packet: TypeAlias = tuple[Node, NodeKey, messages.Message | HostLinked]
"""The sender, the incarnation that it is for, and the message."""

AGAIN_NS = 300_000_000
"""After its incarnation has ended, a node tries again so much later."""
WITNESS_NS = 1_000_000
"""From a question to the witness to its answer."""
LIVES_MAX = 1_000
"""Incarnations of one process; each tries to join again."""
SECOND_NS = 1_000_000_000
FAULT_NS_MIN, FAULT_NS_MAX = 20_000_000, 3_000_000_000
SHORT_NS_MAX = 90_000_000
"""A pause of a protected node: shorter than any suspicion."""
EVERYBODY_OBSERVES_MAX = 11
"""Up to this many nodes, a minority of deaf ones can never make up most of a member's observers."""
DOORS_MAX = 32
LIVENESS_NS = 30 * SECOND_NS


@dataclass(slots=True)
class WitnessStore:
    """A witness: one record, changed by compare-and-swap. deaf: names of those that do not reach it."""

    record: witness.TieBreakRecord = field(
        default_factory=lambda: witness.TieBreakRecord(epoch=0, holder=None, revision=0)
    )
    deaf: frozenset[str] = frozenset()

    def do(self, request: witness.Read | witness.Swap) -> witness.TieBreakRecord:
        """Serve a request, and tell what the record is then."""
        if isinstance(request, witness.Swap) and request.revision == self.record.revision:
            assert request.epoch > self.record.epoch, f"{request} goes back from {self.record}"
            self.record = witness.TieBreakRecord(
                epoch=request.epoch, holder=request.holder, revision=self.record.revision + 1
            )
        return self.record


@dataclass(slots=True)
class Cluster:
    """The cluster as seen from outside of it."""

    size: int
    protected: frozenset[str]
    first: int = 0
    """The lowest id of a node."""
    deadlines: Deadlines = field(default_factory=derive)
    nodes: dict[str, SimulatedNode] = field(default_factory=dict[str, "SimulatedNode"])
    """By name, the process that lives, or lived last."""
    turns: int = 0
    """The number of times that a node has begun or ceased to act on a view."""
    known: dict[int, ClusterView] = field(default_factory=dict[int, ClusterView])
    witness: WitnessStore | None = None
    knows: dict[NodeKey, int] = field(default_factory=dict[NodeKey, int])
    """The newest epoch that each incarnation has known."""
    begun: bool = False
    """Whether all the protected are members."""
    acted_on: int = 0
    """The newest epoch that anybody has acted on."""
    stops: list[tuple[NodeKey, str]] = field(default_factory=list[tuple[NodeKey, str]])
    sent: Counter[type[Contract]] = field(default_factory=Counter[type[Contract]])
    """Messages by their kind."""

    def contacts(self, node_id: int, lives: int) -> tuple[Node, ...]:
        """Return the nodes to ask for admission, in order: some others, and later others."""
        start = node_id - self.first + lives
        steps = range(min(self.size, DOORS_MAX + 1))
        ids = [self.first + (start + step) % self.size for step in steps]
        return tuple(node_at(door, 0) for door in ids if door != node_id)[:DOORS_MAX]

    def learnt(self, key: NodeKey, view: ClusterView) -> None:
        """A node knows a view."""
        other = self.known.setdefault(view.epoch, view)
        assert other.digest == view.digest, f"two views of one epoch: {view} and {other}"
        assert self.knows.get(key, 0) <= view.epoch, f"{key} has unlearnt view {self.knows[key]}"
        self.knows[key] = view.epoch
        self.begun = self.begun or self.protected <= {name_of(node_id) for node_id in view.ids}

    def acts(self, key: NodeKey, view: ClusterView) -> None:
        """A node acts on a view."""
        assert view.holds(key), f"{key} acts on {view}"
        if view.epoch > self.acted_on:
            self.acted_on = view.epoch
            ignorant = [str(node.key) for node in view.nodes if self.knows.get(node.key, 0) < view.epoch]
            assert not ignorant, f"{key} acts on {view}, of which {', '.join(ignorant)} know nothing"


@lru_cache(maxsize=1 << 14)
def name_of(node_id: int) -> str:
    """The simulated process of a node."""
    return f"node{node_id}"


def node_at(node_id: int, incarnation: int) -> Node:
    """A node of the simulation."""
    return Node(NodeKey(node_id, incarnation), name_of(node_id))


class SimulatedNode:
    """The driver of one node: machine, detector, heartbeats. Decides nothing."""

    def __init__(self, cluster: Cluster, node_id: int, incarnation: int, *, founds: bool) -> None:
        self.cluster = cluster
        self._id, self._base = node_id, incarnation * LIVES_MAX
        self._lives = 0
        self._founds = founds
        self._effects: list[sim.Effect[Packet]] = []
        self._new_life()
        cluster.nodes[name_of(node_id)] = self

    def _new_life(self) -> None:
        self._lives += 1
        assert self._lives < LIVES_MAX
        self.me = node_at(self._id, self._base + self._lives)
        witnessed = self.cluster.witness is not None
        self.machine = ClusterMachine(self.me, self.cluster.deadlines, witnessed=witnessed)
        self._asking = witness.WitnessMachine(self.me.key, retry_ns=self.machine.waits.retry_ns)
        self._asked: witness.Read | witness.Swap | None = None
        self.detector = Detector(self.cluster.deadlines)
        self._beat_ns = self.cluster.deadlines.heartbeat_ns
        self._subjects: tuple[NodeKey, ...] = ()
        self._observers: tuple[Node, ...] = ()
        self._act_on(None)

    def _act_on(self, view: ClusterView | None) -> None:
        self.acts_on = view
        self.cluster.turns += 1

    def check_invariants(self) -> None:
        """The machine's own."""
        self.machine.check_invariants()

    def deliver(self, stimulus: sim.Stimulus[Packet], *, now_ns: int) -> Sequence[sim.Effect[Packet]]:
        """Take a stimulus; a message names its sender's life and the incarnation that it is for."""
        self._effects = []
        match stimulus:
            case sim.Arrived(message=(sender, to, message)):
                me = self.me.key
                if to is me or to == me or to.incarnation == 0:  # it mostly is, and to compare takes longer
                    self._arrived(sender, message, now_ns)
            case sim.Started():
                self._start(now_ns)
            case sim.TimerFired(name="machine"):
                self._feed(TimerFired(), now_ns)
            case sim.TimerFired(name="beat"):
                self._beat(now_ns)
            case sim.TimerFired(name="look"):
                if self.machine.state is not MemberState.STOPPED:
                    self._detect(d.Looked(), now_ns)
            case sim.TimerFired(name="witness"):
                self._hear_witness(now_ns)
            case sim.TimerFired(name="witness again"):
                self._ask_witness(TimerFired(), now_ns)
            case sim.TimerFired(name="again"):
                self._new_life()
                self._start(now_ns)
            case sim.Commanded(command="leave"):
                self._feed(messages.LeaveRequested(), now_ns)
            case sim.Commanded(command=Submit() as order):
                self._feed(messages.Ordered(order=order), now_ns)
            case sim.PeerEnded():
                pass  # a closed connection proves nothing across hosts
            case _:
                raise LocalProtocolError(f"{stimulus} means nothing to a node")
        return self._effects

    def _start(self, now_ns: int) -> None:
        if self._founds:
            self._founds = False
            self._feed(messages.FoundCluster(), now_ns)
        elif not self.cluster.begun and name_of(self._id) not in self.cluster.protected:
            self._effects.append(sim.SetTimer(name="again", at_ns=now_ns + AGAIN_NS))
            return
        else:
            contacts = self.cluster.contacts(self._id, self._lives)
            self._feed(messages.JoinCluster(doors=contacts), now_ns)
        self._beat(now_ns)

    def _arrived(self, sender: Node, message: messages.Message | HostLinked, now_ns: int) -> None:
        self._detect(d.Beats(key=sender.key, arrivals_ns=(now_ns,)), now_ns)
        self.detector.check_heard(sender.key)
        if not isinstance(message, HostLinked):
            self._feed(messages.Received(sender=sender, message=message), now_ns)

    def _beat(self, now_ns: int) -> None:
        if self.machine.state is MemberState.STOPPED:
            return
        beat = messages.Beat(known=self.machine.view.epoch, entered=self.machine.entered)
        for observer in self._observers:
            self._send(observer, beat)
        self._detect(d.Looked(), now_ns)
        self.detector.check_invariants()
        self._effects.append(sim.SetTimer(name="beat", at_ns=now_ns + self._beat_ns))
        # A member that reaches the limit before the next beat is judged then, as the native thread does.
        silences = [self.detector.silence(key, now_ns) for key in self._subjects]
        left_ns = [limit_ns - (silence_ns or 0) for silence_ns, limit_ns in silences]
        due_ns = min((ns for ns in left_ns if ns > 0), default=self._beat_ns)
        if due_ns < self._beat_ns:
            self._effects.append(sim.SetTimer(name="look", at_ns=now_ns + due_ns))

    def _detect(self, event: d.Event, now_ns: int) -> None:
        for action in self.detector.handle(event, now_ns=now_ns):
            match action:
                case d.Limit():
                    pass
                case d.Silent(key=key, reason=reason):
                    self._feed(messages.Suspected(key=key, reason=reason), now_ns)
                case d.Audible(key=key):
                    self._feed(messages.Trusted(key=key), now_ns)
                case _:
                    assert_never(action)

    def _feed(self, event: messages.Event, now_ns: int) -> None:
        machine = self.machine
        known = machine.view.epoch
        actions = machine.handle(event, now_ns=now_ns)
        if machine.view.epoch != known:
            self.cluster.learnt(self.me.key, machine.view)
        for action in actions:
            self._perform(action, now_ns)

    def _perform(self, action: messages.Action, now_ns: int) -> None:
        match action:
            case messages.Send(to=to, message=message):
                self._send(to, message)
            case SetTimer(at_ns=at_ns):
                self._effects.append(sim.SetTimer(name="machine", at_ns=at_ns))
            case messages.WatchMembers(subjects=subjects, observers=observers):
                self._beat_ns = d.beat_ns(self.cluster.deadlines, busy=self.machine.view.jobs.busy)
                self._subjects = tuple(node.key for node in subjects)
                self._detect(d.Observe(subjects=self._subjects, beat_ns=self._beat_ns), now_ns)
                self.detector.check_invariants()
                self._observers = observers
            case messages.Installed(view=view, reason=reason):
                self.cluster.acts(self.me.key, view)
                self._act_on(view)
                self._effects.append(sim.Note(value=f"acts on {view}: {reason}"))
            case messages.AskWitness(epoch=epoch):
                self._ask_witness(witness.EpochWanted(epoch=epoch), now_ns)
            case messages.Stopped(reason=reason):
                self._stopped(reason, now_ns)
            case _:
                assert_never(action)

    def _ask_witness(self, event: witness.Event, now_ns: int) -> None:
        for action in self._asking.handle(event, now_ns=now_ns):
            match action:
                case witness.Read() | witness.Swap():
                    self._asked = action
                    self._effects.append(sim.SetTimer(name="witness", at_ns=now_ns + WITNESS_NS))
                case SetTimer(at_ns=at_ns):
                    self._effects.append(sim.SetTimer(name="witness again", at_ns=at_ns))
                case witness.TieBreakerNamed(epoch=epoch, holder=holder, reason=reason):
                    self._feed(messages.WitnessGave(epoch=epoch, holder=holder, reason=reason), now_ns)
                case _:
                    assert_never(action)

    def _hear_witness(self, now_ns: int) -> None:
        store, asked, self._asked = self.cluster.witness, self._asked, None
        if store is None or asked is None:
            return
        if name_of(self._id) in store.deaf:
            self._ask_witness(witness.RequestFailed(number=asked.number, reason="no answer"), now_ns)
        else:
            self._ask_witness(witness.RecordRead(number=asked.number, record=store.do(asked)), now_ns)

    def _stopped(self, reason: str, now_ns: int) -> None:
        self._effects.append(sim.Note(value=f"stops: {reason}"))
        self.cluster.stops.append((self.me.key, reason))
        self._act_on(None)
        if reason == LEFT:
            self._effects.append(sim.Exit())
            return
        assert name_of(self._id) not in self.cluster.protected, f"{self.me.key} stops: {reason}"
        self._effects.append(sim.SetTimer(name="again", at_ns=now_ns + AGAIN_NS))

    def _send(self, to: Node, message: messages.Message | HostLinked) -> None:
        self.cluster.sent[type(message)] += 1
        nbytes = 64 if isinstance(message, messages.Beat) else 512
        self._effects.append(sim.Send(to=name_of(to.id), message=(self.me, to.key, message), nbytes=nbytes))


def protected_of(rng: random.Random, size: int, *, first: int = 0) -> frozenset[str]:
    """A part of the nodes that may go on whatever happens to the others, with the founder, `first`, in it."""
    if size == 2:
        return frozenset((name_of(first),))
    others = rng.sample(range(1, size), size // 2)
    return frozenset(name_of(first + node_id) for node_id in (0, *others))


def build(
    seed: int | str, size: int, store: WitnessStore | None = None, *, spare: int = 0
) -> tuple[sim.Simulation[Packet], Cluster]:
    """A cluster at its start: node 0 founds it, the others knock; `spare` more are not started.

    store: its witness, if it has one.
    """
    simulation = sim.Simulation[Packet](seed)
    protected = protected_of(simulation.rng("protected"), size)
    cluster = Cluster(size=size, protected=protected, witness=store)
    populate(simulation, size, partial(SimulatedNode, cluster), spare=spare)
    return simulation, cluster


class MakesNode(Protocol):
    """Makes the process of a node."""

    def __call__(self, node_id: int, incarnation: int, *, founds: bool) -> SimulatedNode:
        """The process of that incarnation; the first of node 0 founds the cluster."""
        ...


def populate(simulation: sim.Simulation[Packet], size: int, make: MakesNode, *, spare: int = 0) -> None:
    """Add the processes of all nodes, and of `spare` more that are not started."""

    def factory(node_id: int) -> Callable[[int], SimulatedNode]:
        return lambda incarnation: make(node_id, incarnation, founds=node_id == 0 and incarnation == 1)

    for node_id in range(size + spare):
        simulation.add(name_of(node_id), factory(node_id), start=node_id < size)


def in_one_view(cluster: Cluster, names: frozenset[str]) -> bool:
    """Whether these nodes, and no others, are in the one view that all of them act on."""
    views = [cluster.nodes[name].acts_on for name in names]
    first = views[0]
    if first is None or names != frozenset(map(name_of, first.ids)):
        return False
    return all(view is not None and view.digest == first.digest for view in views)


def agreement(cluster: Cluster, names: frozenset[str]) -> Callable[[], bool]:
    """`in_one_view` of these, for every event: it looks again when a node acts on another view."""
    seen, agreed = -1, False

    def agree() -> bool:
        nonlocal seen, agreed
        if seen != cluster.turns:
            seen, agreed = cluster.turns, in_one_view(cluster, names)
        return agreed

    return agree


@dataclass(frozen=True)
class MembershipScenario:
    """The view-change machine. `length` counts seconds under faults."""

    name: str = "membership"
    description: str = "cluster views without a coordinator: nodes killed, paused, cut off, deaf and mute"
    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, sim.Pause, sim.Partition, sim.Cut, sim.Clog)

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        simulation, cluster = build(seed, options.ranks)
        names = tuple(name_of(node_id) for node_id in range(options.ranks))
        agreed = agreement(cluster, frozenset(names))
        return sim.ScenarioStage(
            world=simulation,
            victims=names,
            converged=lambda core: agreed(),
            span_ns=options.length * SECOND_NS,
            liveness_ns=LIVENESS_NS,
        )

    def draw_plan(self, seed: int | str, options: sim.Options) -> sim.FaultPlan:
        """Faults that leave the protected nodes alive and connected among each other."""
        size, span_ns = options.ranks, options.length * SECOND_NS
        rng = random.Random(f"{seed}/plan")
        protected = protected_of(random.Random(f"{seed}/protected"), size)
        names = [name_of(node_id) for node_id in range(size)]
        victims = [name for name in names if name not in protected]
        return draw_plan(rng, names, victims, span_ns, options.faults)

    def admits(self, seed: int | str, options: sim.Options, plan: sim.FaultPlan) -> bool:
        """Whether a plan leaves the protected nodes of such a run alive and connected among each other."""
        protected = protected_of(random.Random(f"{seed}/protected"), options.ranks)
        return not any(harms(fault, protected) for fault in plan)


def harms(fault: sim.Fault, protected: frozenset[str]) -> bool:
    """Whether a fault kills, stops for long or divides the protected."""
    match fault:
        case sim.Pause(process=process, for_ns=for_ns):
            return process in protected and for_ns > SHORT_NS_MAX
        case sim.Partition(groups=groups):
            return sum(1 for group in groups if protected & set(group)) > 1
        case sim.Cut(source=source, target=target) | sim.Clog(source=source, target=target):
            return {source, target} <= protected
        case _:
            return bool(protected & set(sim.names_of(fault)))


def draw_plan(
    rng: random.Random, names: list[str], victims: list[str], span_ns: int, count: int
) -> sim.FaultPlan:
    """Faults that strike the victims, of these names; the others are at most stopped for a moment."""
    plan = [_draw(rng, names, victims, span_ns) for _ in range(count)]
    return tuple(sorted(plan, key=lambda fault: fault.at_ns))


def _draw(rng: random.Random, names: list[str], victims: list[str], span_ns: int) -> sim.Fault:
    at_ns = rng.randrange(span_ns)
    for_ns = min(span_ns, int(FAULT_NS_MIN * (FAULT_NS_MAX / FAULT_NS_MIN) ** rng.random()))
    if not victims or rng.random() < 0.1:
        return sim.Pause(process=rng.choice(names), at_ns=at_ns, for_ns=min(for_ns, SHORT_NS_MAX))
    victim = rng.choice(victims)
    kind = rng.choice((sim.Crash, sim.Crash, sim.Pause, sim.Partition, sim.Partition, sim.Cut, sim.Clog))
    if kind is sim.Crash:
        return sim.Crash(process=victim, at_ns=at_ns, for_ns=for_ns)
    if kind is sim.Pause:
        return sim.Pause(process=victim, at_ns=at_ns, for_ns=for_ns)
    if kind is sim.Partition:
        off = tuple(sorted(rng.sample(victims, rng.randint(1, len(victims)))))
        rest = tuple(name for name in names if name not in off)
        return sim.Partition(groups=(rest, off), at_ns=at_ns, for_ns=for_ns)
    other = rng.choice([name for name in names if name != victim])
    pair = (victim, other) if len(names) > EVERYBODY_OBSERVES_MAX or rng.random() < 0.5 else (other, victim)
    if kind is sim.Cut:
        return sim.Cut(source=pair[0], target=pair[1], at_ns=at_ns, for_ns=for_ns)
    return sim.Clog(source=pair[0], target=pair[1], at_ns=at_ns, for_ns=for_ns)
