"""A simulated job whose ranks run the step-commit machine: the scenario behind its tests and seed hunts.

Each rank is the production machine over a model of memory: two slots a rank that peers can read, also after
the owner's death, as shared segments allow. A step ends only once every member has entered it; an aborted one
goes on scribbling into its slot until it has drained. The node runs the host's membership machine: it
restarts the dead (or shrinks the group) and has views entered once all members are linked.

Checked after every event: a committed version has the one content it may have, a slot that somebody reads
does not change, versions only grow. Once the kills stop, every rank must finish.

What a step computes is the scenario's choice (`Contents`): here a hash chain, in
`zbmd.training.training_scenario` the training itself.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, assert_never

from zbmd.actors import view as membership
from zbmd.collectives import commit_messages as cm
from zbmd.collectives.commit import StepCommit
from zbmd.collectives.killing_scenario import DISTURBANCES, draw_kills
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

NODE = "node"
WORK_NS_MAX = 3_000_000
DRAIN_NS_MAX = 500_000
SLOW_NS = 30_000_000
"""The slowest that anything is, but for its jitter."""
NOTHING = b"nothing"
"""What is read where nothing has been preserved."""
ROUND_NS_MAX = 20 * SLOW_NS
"""What a step, or a recovery, takes at most: a dozen messages one after the other, and their work."""
SHRINK_SHARE = 0.4
CORRUPTING_SHARE = 0.1
"""The share of runs with bad memory."""
CORRUPTED_SHARE = 0.5
"""The share of pulls that it strikes in them."""
RESTARTS_MAX = 1000
"""No scenario kills so often: the limit on restarts is not what is looked at here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """The node tells a rank that all members of the view of `epoch` are linked."""

    epoch: int


Message: TypeAlias = (
    membership.Joined
    | membership.InstallView
    | membership.Linked
    | Enter
    | cm.ReportReceived
    | cm.VoteReceived
    | cm.FinishReceived
)


Work: TypeAlias = cm.Fetch | cm.Recall | cm.RunStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """One run: `world_size` ranks, `steps` steps, `kills` SIGKILLs at random moments, then calm."""

    world_size: int = 4
    steps: int = 12
    kills: int = 3
    shrink: bool = False
    corrupting: bool = False
    """A pull now and then brings other bits than it read, as bad memory does: it must be noticed."""


class Slots(Protocol):
    """The two slots of one incarnation of a rank: peers can read them, also after its death."""

    def digest(self, slot: int) -> bytes:
        """Of what the slot holds now."""
        ...

    def tear(self, slot: int) -> None:
        """Write something into it that is no version, as work under way does."""
        ...

    def enter(self, work: cm.RunStep) -> None:
        """Begin a step: do what needs no other rank. Its target is torn from here on."""
        ...

    def step(self, work: cm.RunStep) -> bool:
        """End the step, which all members have entered. False if a lost member cuts it short."""
        ...

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """Pull what a slot of a member holds into one of ours."""
        ...

    def recall(self, version: int, slot: int) -> None:
        """Read the preserved `version` back."""
        ...


class Contents(Protocol):
    """What versions hold, and what a step makes of them."""

    def digest_of(self, version: int) -> bytes:
        """Of the one content that `version` may have."""
        ...

    def open(self, member: cm.MemberId) -> Slots:
        """The slots of a new incarnation: 0 holds version 0."""
        ...


ContentsOf: TypeAlias = "Callable[[sim.Simulation[Message]], Contents]"
"""Makes the contents of a job in a simulation."""


def oracle(version: int) -> bytes:
    """The one content that `version` may have: a hash chain, as a step is a function of the one before."""
    content = b"initial"
    for step in range(1, version + 1):
        content = _advance(content, step)
    return content


def _advance(content: bytes, version: int) -> bytes:
    return hashlib.blake2b(content + version.to_bytes(4, "little"), digest_size=16).digest()


class HashSlots(Slots):
    """Slots of a hash chain; a content is its own digest."""

    def __init__(self) -> None:
        self.held = [oracle(0), b"unwritten"]

    def digest(self, slot: int) -> bytes:
        """See `Slots`."""
        return self.held[slot]

    def tear(self, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = b"torn"

    def enter(self, work: cm.RunStep) -> None:
        """See `Slots`."""
        self.tear(work.slot)

    def step(self, work: cm.RunStep) -> bool:
        """See `Slots`."""
        self.held[work.slot] = _advance(self.held[1 - work.slot], work.version)
        return True

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = source.digest(source_slot)

    def recall(self, version: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = oracle(version)


class HashChain(Contents):
    """The simplest job whose versions can be told apart."""

    def __init__(self, simulation: sim.Simulation[Message]) -> None:
        """It needs nothing of the simulation."""

    def digest_of(self, version: int) -> bytes:
        """See `Contents`."""
        return oracle(version)

    def open(self, member: cm.MemberId) -> Slots:
        """See `Contents`."""
        return HashSlots()


@dataclass(slots=True)
class World:
    """What outlives a process: its memory, the commit log, and who has entered which step."""

    options: CommitOptions
    contents: Contents
    slots: dict[cm.MemberId, Slots] = field(default_factory=dict[cm.MemberId, Slots])
    entered: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    committed_max: int = 0
    finished: set[int] = field(default_factory=set[int])
    preserved: bool = False
    state_lost: bool = False
    corrupted: bool = False
    corruption_noticed: bool = False
    machines: dict[cm.MemberId, StepCommit] = field(default_factory=dict[cm.MemberId, StepCommit])


class RankProcess:
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    def __init__(self, world: World, rank: int, incarnation: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.member = cm.MemberId(rank=rank, incarnation=incarnation)
        self.slots = world.slots[self.member] = world.contents.open(self.member)
        self.machine = world.machines[self.member] = StepCommit(
            rank=rank,
            version=0,
            digest=world.contents.digest_of(0),
            handle=f"{rank}#{incarnation}".encode(),
            last_version=world.options.steps,
            known_version=world.committed_max,
        )
        self.view = membership.View(epoch=0, members=())
        self.work: Work | None = None
        self.seen: bytes | None = None
        self.aborted = False

    def check_invariants(self) -> None:
        """The machine's own, and: what the work in flight reads has not changed under it."""
        self.machine.check_invariants()
        if self.work is not None and not self.aborted:
            assert self._read(self.work) == self.seen, f"{self.member}: the slot being read has changed"

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Translate a stimulus into the machine's event and perform what it answers."""
        match stimulus:
            case sim.Started():
                rank, incarnation = self.member.rank, self.member.incarnation
                joined = membership.Joined(
                    rank=rank, incarnation=incarnation, address=f"{rank}#{incarnation}"
                )
                return [sim.Send(to=NODE, message=joined)]
            case sim.Arrived(message=message):
                return self._take(message, now_ns)
            case sim.Commanded():
                raise LocalProtocolError("a rank is not a node")
            case sim.PeerEnded(peer=peer, incarnation=incarnation):
                if peer == NODE:
                    return []
                ended = cm.MemberId(rank=int(peer.removeprefix("rank")), incarnation=incarnation)
                return self._feed(cm.PeerEnded(member=ended, reason="killed"), now_ns)
            case sim.TimerFired():
                return self._work_on(now_ns)
            case _:
                assert_never(stimulus)

    def _take(self, message: Message, now_ns: int) -> list[sim.Effect[Message]]:
        match message:
            case membership.InstallView(view=view):
                if view.epoch <= self.view.epoch:
                    return []  # overtaken by the next
                self.view = view
                rank, incarnation = self.member.rank, self.member.incarnation
                linked = membership.Linked(rank=rank, incarnation=incarnation, epoch=view.epoch)
                return [sim.Send(to=NODE, message=linked)]
            case Enter(epoch=epoch):
                if epoch != self.view.epoch or epoch <= self.machine.epoch:
                    return []
                members = tuple(
                    cm.MemberId(rank=member.rank, incarnation=member.incarnation)
                    for member in self.view.members
                )
                return self._feed(cm.EpochInstalled(epoch=epoch, members=members), now_ns)
            case membership.Joined() | membership.Linked():
                raise LocalProtocolError("a rank is not a node")
            case _:
                return self._feed(message, now_ns)

    def _feed(self, event: cm.CommitEvent, now_ns: int) -> list[sim.Effect[Message]]:
        effects: list[sim.Effect[Message]] = []
        for action in self.machine.handle(event, now_ns=now_ns):
            effects += self._perform(action, now_ns)
        return effects

    def _perform(self, action: cm.CommitAction, now_ns: int) -> list[sim.Effect[Message]]:
        rank, world = self.member.rank, self.world
        match action:
            case cm.SendReport(to=to, epoch=epoch, held=held):
                return [_to(to, cm.ReportReceived(sender=rank, epoch=epoch, held=held))]
            case cm.SendVote(to=to, epoch=epoch, version=version, digest=digest, part=part):
                vote = cm.VoteReceived(sender=rank, epoch=epoch, version=version, digest=digest, part=part)
                return [_to(to, vote)]
            case cm.SendFinish(to=to, epoch=epoch):
                return [_to(to, cm.FinishReceived(sender=rank, epoch=epoch))]
            case cm.Fetch() | cm.Recall() | cm.RunStep():
                return self._begin(action, now_ns)
            case cm.AbortWork():
                self.aborted = True
                self.slots.tear(1 - self.machine.slot)
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(0, DRAIN_NS_MAX))]
            case cm.Commit(version=version, slot=slot) | cm.Adopted(version=version, slot=slot):
                assert self._holds(slot, version), f"{self.member} holds a wrong {version}"
                world.committed_max = max(world.committed_max, version)
                return [sim.Note(value=(type(action).__name__, version))]
            case cm.Preserve(version=version):
                assert self._holds(self.machine.slot, version), f"{self.member} preserves a wrong {version}"
                world.preserved = True
                return []
            case cm.Finished():
                world.finished.add(rank)
                return [sim.Exit()]
            case cm.Failed(kind=kind, reason=reason):
                self._check_failure(kind, reason)
                return [sim.Exit()]
            case _:
                assert_never(action)

    def _check_failure(self, kind: cm.FailureKind, reason: str) -> None:
        if kind is cm.FailureKind.DIVERGED:
            assert self.world.corrupted, reason
            self.world.corruption_noticed = True
            return
        best = max(self.world.machines[m].version for m in self.machine.members)
        assert best < self.world.committed_max - 1, f"{reason}; but a member holds version {best}"
        self.world.state_lost = True

    def _holds(self, slot: int, version: int) -> bool:
        return self.slots.digest(slot) == self.world.contents.digest_of(version)

    def _begin(self, work: Work, now_ns: int) -> list[sim.Effect[Message]]:
        self.work, self.aborted, self.seen = work, False, self._read(work)
        if isinstance(work, cm.RunStep):
            self.slots.enter(work)
            self.world.entered.setdefault((work.epoch, work.version), set()).add(self.member.rank)
        elif self.seen != NOTHING:
            self.slots.tear(work.slot)
        return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]

    def _read(self, work: Work) -> bytes:
        """The digest of what the work reads."""
        match work:
            case cm.RunStep():
                return self.slots.digest(1 - work.slot)
            case cm.Recall():
                return self.world.contents.digest_of(work.version) if self.world.preserved else NOTHING
            case cm.Fetch():
                return self._source(work).digest(work.source_slot)
            case _:
                assert_never(work)

    def _source(self, work: cm.Fetch) -> Slots:
        rank, _, incarnation = work.handle.decode().partition("#")
        return self.world.slots[cm.MemberId(rank=int(rank), incarnation=int(incarnation))]

    def _work_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        work = self.work
        assert work is not None and self.seen is not None
        if isinstance(work, cm.RunStep):
            entered = self.world.entered[work.epoch, work.version] == set(work.members)
            if not self.aborted and not entered:
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]
            done = not self.aborted and self.slots.step(work)
        else:
            # Some of what is aborted had in truth completed: the machine must cope with either.
            done = self.seen != NOTHING and (not self.aborted or self.rng.random() < 0.3)
            if done and isinstance(work, cm.Fetch):
                self.slots.copy(self._source(work), work.source_slot, work.slot)
                if self.world.options.corrupting and self.rng.random() < CORRUPTED_SHARE:
                    self.slots.tear(work.slot)
                    self.world.corrupted = True
            elif done:
                self.slots.recall(work.version, work.slot)
        self.work = None
        ended = _ended(work, self.slots.digest(work.slot)) if done else _cut_short(work)
        return self._feed(ended, now_ns)


def _ended(work: Work, digest: bytes) -> cm.CommitEvent:
    match work:
        case cm.Fetch():
            return cm.FetchEnded(epoch=work.epoch, version=work.version, digest=digest)
        case cm.Recall():
            return cm.RecallEnded(epoch=work.epoch, version=work.version, digest=digest)
        case cm.RunStep():
            return cm.StepEnded(epoch=work.epoch, version=work.version, digest=digest)


def _cut_short(work: Work) -> cm.CommitEvent:
    match work:
        case cm.Fetch():
            return cm.FetchEnded(epoch=work.epoch, version=work.version, digest=None, reason="aborted")
        case cm.Recall():
            return cm.RecallEnded(epoch=work.epoch, version=work.version, digest=None)
        case cm.RunStep():
            return cm.StepEnded(epoch=work.epoch, version=work.version, digest=None, reason="aborted")


def _to(rank: int, message: Message) -> sim.Send[Message]:
    return sim.Send(to=f"rank{rank}", message=message)


class NodeProcess:
    """The driver of the host's membership machine."""

    def __init__(self, world: World) -> None:
        options = self.options = world.options
        self.world = world
        self.machine = membership.MembershipMachine(
            options.world_size,
            on_loss=membership.OnLoss.SHRINK if options.shrink else membership.OnLoss.REPLACE,
            restarts_max=RESTARTS_MAX,
        )

    def check_invariants(self) -> None:
        """The machine's own."""
        self.machine.check_invariants()

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Translate a stimulus into the machine's events and perform what it answers."""
        match stimulus:
            case sim.Started():
                return self._feed(membership.StartRequested(), now_ns)
            case sim.Arrived(message=membership.Joined() | membership.Linked() as event):
                return self._feed(event, now_ns)
            case sim.PeerEnded(peer=peer, incarnation=incarnation, clean=clean):
                rank, code = int(peer.removeprefix("rank")), 0 if clean else -9
                effects: list[sim.Effect[Message]] = []
                if not clean:
                    effects += self._feed(membership.LossProven(rank=rank, incarnation=incarnation), now_ns)
                exited = membership.Exited(rank=rank, incarnation=incarnation, code=code, reason="it ended")
                return effects + self._feed(exited, now_ns)
            case sim.Commanded():
                return []  # only has the checkers look once more
            case _:
                raise LocalProtocolError(f"the node does not expect {stimulus}")

    def _feed(self, event: membership.Event, now_ns: int) -> list[sim.Effect[Message]]:
        effects: list[sim.Effect[Message]] = []
        for action in self.machine.handle(event, now_ns=now_ns):
            match action:
                case membership.Fork(rank=rank):
                    effects.append(sim.Start(process=f"rank{rank}"))
                case membership.InstallView(view=view):
                    effects += [_to(rank, action) for rank in view.ranks]
                case membership.EnterView(epoch=epoch, to=to):
                    effects += [_to(rank, Enter(epoch=epoch)) for rank in to]
                case membership.RunEnded(outcome=membership.Outcome.FAILED, reason=reason):
                    states = {self.machine.state(rank)[0] for rank in range(self.options.world_size)}
                    assert self.options.shrink and states == {membership.RankState.LOST}, reason
                    self.world.state_lost = True  # nobody is left, and nobody is to be started
                case _:
                    pass  # what the other actions order, the simulator does by itself
        return effects


def draw_conditions(rng: random.Random) -> sim.Conditions:
    """Draw how slow messages, notices and starts are beside each other: which of them come first decides."""

    def up_to(limit_ns: int) -> int:
        return round(10 ** rng.uniform(3.0, math.log10(limit_ns)))

    notice_ns, start_ns = sorted((up_to(SLOW_NS), up_to(SLOW_NS))), sorted((up_to(SLOW_NS), up_to(SLOW_NS)))
    return sim.Conditions(
        latency_ns=up_to(SLOW_NS),
        jitter_ns=up_to(SLOW_NS),
        notice_min_ns=notice_ns[0],
        notice_max_ns=notice_ns[1],
        start_min_ns=start_ns[0],
        start_max_ns=start_ns[1],
    )


def build(
    seed: int | str, options: CommitOptions, contents: ContentsOf = HashChain
) -> tuple[sim.Simulation[Message], World]:
    """The simulation of one job, without its kills."""
    conditions = draw_conditions(random.Random(f"{seed}/conditions"))
    simulation = sim.Simulation[Message](seed, conditions=conditions)
    world = World(options, contents(simulation))
    simulation.add(NODE, lambda incarnation: NodeProcess(world))
    for rank in range(options.world_size):

        def make(incarnation: int, rank: int = rank) -> RankProcess:
            rng = simulation.rng(f"rank{rank}#{incarnation}")
            return RankProcess(world, rank, incarnation, rng)

        simulation.add(f"rank{rank}", make, start=False)  # the node starts it
    return simulation, world


def names_of(world_size: int) -> tuple[str, ...]:
    """The processes of the ranks."""
    return tuple(f"rank{rank}" for rank in range(world_size))


def is_over(simulation: sim.Simulation[Message], world: World) -> bool:
    """Whether the run has ended as it may: nobody is left who has not finished, or the state was truly lost.

    So it is, too, once a corrupted pull was noticed: the rank says so and ends, and a user has to look.
    With a group that shrinks, a rank that was lost stays away; who is not lost finishes.
    """
    if world.state_lost or world.corruption_noticed:
        return True
    lost = {rank for rank in range(world.options.world_size) if not simulation.lives(f"rank{rank}")}
    if not world.options.shrink:
        return len(world.finished) == world.options.world_size == len(lost)
    return bool(world.finished) and len(lost) == world.options.world_size


def run(seed: int | str, options: CommitOptions) -> World:
    """Run one seed to its end, under the kills that it draws.

    Raises `zbmd.transport.sim.SimulationFailure` with the story of the run if safety or liveness is broken.
    """
    simulation, world = build(seed, options)
    victims, rng = names_of(options.world_size), random.Random(f"{seed}/kills")
    for fault in draw_kills(rng, victims, options.kills, lambda: build(seed, options)[0]):
        simulation.apply(fault)
    simulation.run(until=lambda: world.state_lost)
    simulation.add_checker("liveness", lambda: _assert_over(simulation, world))
    simulation.command(NODE, "look")
    simulation.run()
    return world


def _assert_over(simulation: sim.Simulation[Message], world: World) -> None:
    left = [name for name in names_of(world.options.world_size) if simulation.lives(name)]
    assert is_over(simulation, world), f"nothing is under way, {left} have not finished"


@dataclass(frozen=True)
class CommitScenario:
    """The step-commit and membership machines, with a hash chain for a job. `length` counts steps."""

    name: str = "commit"
    description: str = "step commit and membership machines: kills between any two effects, replace or shrink"
    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, *DISTURBANCES)

    def contents(self, seed: int | str, options: CommitOptions) -> ContentsOf:
        """What the job computes; a subclass's choice."""
        return HashChain

    def options_of(self, seed: int | str, options: sim.Options) -> CommitOptions:
        """The job that a run of the frame stands for; whether it shrinks is the seed's choice."""
        rng = random.Random(f"{seed}/options")
        return CommitOptions(
            world_size=min(options.ranks, membership.RANKS_MAX),
            steps=options.length,
            shrink=rng.random() < SHRINK_SHARE,
            corrupting=rng.random() < CORRUPTING_SHARE,
        )

    def build(self, seed: int | str, options: sim.Options) -> sim.Stage:
        """See `zbmd.transport.sim.Scenario`."""
        job = self.options_of(seed, options)
        simulation, world = build(seed, job, self.contents(seed, job))
        return sim.Stage(
            world=simulation,
            victims=names_of(job.world_size),
            converged=lambda core: is_over(simulation, world),
            span_ns=(job.steps + options.faults + 1) * ROUND_NS_MAX,
            liveness_ns=(job.steps + options.faults + 1) * ROUND_NS_MAX,
            restarts_itself=True,
        )

    def draw_plan(self, seed: int | str, options: sim.Options) -> sim.FaultPlan:
        """Kills between two effects, from runs of the same seed; see `draw_kills`."""
        job = self.options_of(seed, options)
        victims, rng = names_of(job.world_size), random.Random(f"{seed}/kills")
        return draw_kills(rng, victims, options.faults, lambda: build(seed, job)[0])
