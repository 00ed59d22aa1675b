"""A simulated job whose ranks run the step-commit machine: the scenario behind its tests and seed hunts.

Each rank is the production machine over a model of memory: two slots a rank that peers can read, also after
the owner's death, as shared segments allow. A step ends only once every member has entered it; an aborted one
goes on scribbling into its slot until it has drained. The node runs the host's membership machine: it
restarts the dead (or shrinks the group) and has views entered once all members are linked.

Checked after every event: a committed version has the one content it may have, a slot that somebody reads
does not change, versions only grow. Once the kills stop, every rank must finish.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from zbmd.actors import view as membership
from zbmd.collectives import commit_messages as cm
from zbmd.collectives.commit import StepCommit
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

NODE = "node"
WORK_NS_MAX = 3_000_000
DRAIN_NS_MAX = 500_000
SLOW_NS = 30_000_000
"""The slowest that anything is, but for its jitter."""
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


def oracle(version: int) -> bytes:
    """The one content that `version` may have: a hash chain, as a step is a function of the one before."""
    content = b"initial"
    for step in range(1, version + 1):
        content = _advance(content, step)
    return content


def _advance(content: bytes, version: int) -> bytes:
    return hashlib.blake2b(content + version.to_bytes(4, "little"), digest_size=16).digest()


@dataclass(slots=True)
class World:
    """What outlives a process: its memory, the commit log, and who has entered which step."""

    options: CommitOptions
    slots: dict[cm.MemberId, list[bytes]] = field(default_factory=dict[cm.MemberId, list[bytes]])
    entered: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    committed_max: int = 0
    finished: set[int] = field(default_factory=set[int])
    preserved: bool = False
    state_lost: bool = False
    machines: dict[cm.MemberId, StepCommit] = field(default_factory=dict[cm.MemberId, StepCommit])


class RankProcess:
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    def __init__(self, world: World, rank: int, incarnation: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.member = cm.MemberId(rank=rank, incarnation=incarnation)
        self.slots = world.slots[self.member] = [oracle(0), b"unwritten"]
        self.machine = world.machines[self.member] = StepCommit(
            rank=rank,
            version=0,
            digest=oracle(0),
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
                self.slots[1 - self.machine.slot] = b"torn"
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(0, DRAIN_NS_MAX))]
            case cm.Commit(version=version, slot=slot) | cm.Adopted(version=version, slot=slot):
                assert self.slots[slot] == oracle(version), f"{self.member} holds a wrong {version}"
                world.committed_max = max(world.committed_max, version)
                return [sim.Note(value=(type(action).__name__, version))]
            case cm.Preserve(version=version):
                assert self.slots[self.machine.slot] == oracle(version)
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
        assert kind is cm.FailureKind.STATE_LOST, reason
        best = max(self.world.machines[m].version for m in self.machine.members)
        assert best < self.world.committed_max - 1, f"{reason}; but a member holds version {best}"
        self.world.state_lost = True

    def _begin(self, work: Work, now_ns: int) -> list[sim.Effect[Message]]:
        self.work, self.aborted, self.seen = work, False, self._read(work)
        if not isinstance(work, cm.Recall) or self.world.preserved:
            self.slots[work.slot] = b"torn"
        if isinstance(work, cm.RunStep):
            self.world.entered.setdefault((work.epoch, work.version), set()).add(self.member.rank)
        return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]

    def _read(self, work: Work) -> bytes:
        if isinstance(work, cm.RunStep):
            return self.slots[1 - work.slot]
        if isinstance(work, cm.Recall):
            return oracle(work.version) if self.world.preserved else b"nothing"
        rank, _, incarnation = work.handle.decode().partition("#")
        source = cm.MemberId(rank=int(rank), incarnation=int(incarnation))
        return self.world.slots[source][work.source_slot]

    def _work_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        work = self.work
        assert work is not None and self.seen is not None
        if self.aborted:
            self.work = None
            # Some of what is aborted had in truth completed: the machine must cope with either.
            completed = not isinstance(work, cm.RunStep) and self.rng.random() < 0.3
            if not completed or self.seen == b"nothing":
                return self._feed(_cut_short(work), now_ns)
            self.slots[work.slot] = self.seen
            return self._feed(_ended(work, self.seen), now_ns)
        if isinstance(work, cm.RunStep):
            if self.world.entered[work.epoch, work.version] != set(work.members):
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]
            self.slots[work.slot] = _advance(self.seen, work.version)
        elif self.seen == b"nothing":
            self.work = None
            return self._feed(_cut_short(work), now_ns)
        else:
            self.slots[work.slot] = self.seen
        self.work = None
        return self._feed(_ended(work, self.slots[work.slot]), now_ns)


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


def build(seed: int | str, options: CommitOptions) -> tuple[sim.Simulation[Message], World]:
    """The simulation of one job, without its kills."""
    simulation = sim.Simulation[Message](
        seed, conditions=draw_conditions(random.Random(f"{seed}/conditions"))
    )
    world = World(options)
    simulation.add(NODE, lambda incarnation: NodeProcess(world))
    for rank in range(options.world_size):

        def make(incarnation: int, rank: int = rank) -> RankProcess:
            rng = simulation.rng(f"rank{rank}#{incarnation}")
            return RankProcess(world, rank, incarnation, rng)

        simulation.add(f"rank{rank}", make, start=False)  # the node starts it
    return simulation, world


def schedule_kills(seed: int | str, options: CommitOptions, simulation: sim.Simulation[Message]) -> None:
    """Draw the kills: at random moments, or between two effects of the same run without kills."""
    if not options.kills:
        return
    calm, _ = build(seed, options)
    calm.run()
    points = [point for point in calm.kill_points() if point.process != NODE]
    rng = simulation.rng("kills")
    for _ in range(options.kills):
        if rng.random() < 0.5:
            # The end of a run is where its rules meet: a third of these kills falls into the last tenth.
            first = len(points) * 9 // 10 if rng.random() < 0.33 else 0
            simulation.crash_during(points[rng.randrange(first, len(points))])
        else:
            victim = f"rank{rng.randrange(options.world_size)}"
            simulation.crash_at(victim, rng.randrange(sim.SIM_START_NS, calm.now_ns + 1))


def run(seed: int | str, options: CommitOptions) -> World:
    """Run one seed to its end: every rank left has finished, or the state was truly lost.

    Raises `zbmd.transport.sim.SimulationFailure` with the story of the run otherwise.
    """
    simulation, world = build(seed, options)
    schedule_kills(seed, options, simulation)
    simulation.run(until=lambda: world.state_lost)
    if not world.state_lost:
        stuck = [
            name for name in (f"rank{rank}" for rank in range(options.world_size)) if simulation.lives(name)
        ]
        simulation.add_checker("liveness", lambda: _nobody_is_stuck(stuck))
        simulation.command(NODE, "look")
        simulation.run()
    return world


def _nobody_is_stuck(stuck: list[str]) -> None:
    assert not stuck, f"nothing is under way, but {stuck} have not finished"
