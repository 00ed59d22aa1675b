"""A simulated job whose ranks run the step-commit machine: the scenario behind its tests and seed hunts.

Each rank is the production machine over a model of memory: two slots a rank that peers can read, also after
the owner's death, as shared segments allow. A step ends only once every member has entered it; an aborted one
goes on scribbling into its slot until it has drained. The node restarts the dead (or shrinks the group) and
installs epochs. Checked after every event: a committed version has the one content it may have, a slot that
somebody reads does not change, versions only grow. Once the kills stop, every rank must finish.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from zbmd.collectives import commit_messages as cm
from zbmd.collectives.commit import StepCommit
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

NODE = "node"
WORK_NS_MAX = 3_000_000
DRAIN_NS_MAX = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank tells the node that it is up."""

    member: cm.MemberId


Message: TypeAlias = Join | cm.EpochInstalled | cm.ReportReceived | cm.VoteReceived | cm.FinishReceived


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
        preserved = world.options.steps if world.preserved else 0
        self.slots = world.slots[self.member] = [oracle(preserved), b"unwritten"]
        self.machine = world.machines[self.member] = StepCommit(
            rank=rank,
            version=preserved,
            digest=oracle(preserved),
            handle=f"{rank}#{incarnation}".encode(),
            last_version=world.options.steps,
            known_version=world.committed_max,
        )
        self.work: cm.Fetch | cm.RunStep | None = None
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
                return [sim.Send(to=NODE, message=Join(member=self.member))]
            case sim.Arrived(message=message) if not isinstance(message, Join):
                return self._feed(message, now_ns)
            case sim.Arrived() | sim.Commanded():
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
            case cm.Fetch() | cm.RunStep():
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

    def _begin(self, work: cm.Fetch | cm.RunStep, now_ns: int) -> list[sim.Effect[Message]]:
        self.work, self.aborted, self.seen = work, False, self._read(work)
        self.slots[work.slot] = b"torn"
        if isinstance(work, cm.RunStep):
            self.world.entered.setdefault((work.epoch, work.version), set()).add(self.member.rank)
        return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]

    def _read(self, work: cm.Fetch | cm.RunStep) -> bytes:
        if isinstance(work, cm.RunStep):
            return self.slots[1 - work.slot]
        rank, _, incarnation = work.handle.decode().partition("#")
        source = cm.MemberId(rank=int(rank), incarnation=int(incarnation))
        return self.world.slots[source][work.source_slot]

    def _work_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        work = self.work
        assert work is not None and self.seen is not None
        if self.aborted:
            self.work = None
            # Some of what is aborted had in truth completed: the machine must cope with either.
            completed = isinstance(work, cm.Fetch) and self.rng.random() < 0.3
            if not completed:
                return self._feed(_cut_short(work), now_ns)
            self.slots[work.slot] = self.seen
            return self._feed(_ended(work, self.seen), now_ns)
        if isinstance(work, cm.RunStep):
            if self.world.entered[work.epoch, work.version] != set(work.members):
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]
            self.slots[work.slot] = _advance(self.seen, work.version)
        else:
            self.slots[work.slot] = self.seen
        self.work = None
        return self._feed(_ended(work, self.slots[work.slot]), now_ns)


def _ended(work: cm.Fetch | cm.RunStep, digest: bytes) -> cm.FetchEnded | cm.StepEnded:
    if isinstance(work, cm.Fetch):
        return cm.FetchEnded(epoch=work.epoch, version=work.version, digest=digest)
    return cm.StepEnded(epoch=work.epoch, version=work.version, digest=digest)


def _cut_short(work: cm.Fetch | cm.RunStep) -> cm.FetchEnded | cm.StepEnded:
    if isinstance(work, cm.Fetch):
        return cm.FetchEnded(epoch=work.epoch, version=work.version, digest=None, reason="aborted")
    return cm.StepEnded(epoch=work.epoch, version=work.version, digest=None, reason="aborted")


def _to(rank: int, message: Message) -> sim.Send[Message]:
    return sim.Send(to=f"rank{rank}", message=message)


class NodeProcess:
    """The host: installs an epoch whenever every rank it counts on is up."""

    def __init__(self, options: CommitOptions) -> None:
        self.options = options
        self.expected = set(range(options.world_size))
        self.live: dict[int, cm.MemberId] = {}
        self.epoch = 0
        self.installed: set[int] = set()

    def check_invariants(self) -> None:
        """Only ranks that are counted on are live."""
        assert set(self.live) <= self.expected

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Take joins and deaths; restart or shrink; install."""
        effects: list[sim.Effect[Message]] = []
        match stimulus:
            case sim.Arrived(message=Join(member=member)) if member.rank in self.expected:
                self.live[member.rank] = member
            case sim.PeerEnded(peer=peer, incarnation=incarnation, clean=clean):
                rank = int(peer.removeprefix("rank"))
                live = self.live.get(rank)
                if rank not in self.expected or (live is not None and live.incarnation > incarnation):
                    return []
                self.live.pop(rank, None)
                if clean or (self.options.shrink and len(self.expected) > 1):
                    self.expected.discard(rank)
                else:
                    effects.append(sim.Start(process=peer))
                if clean and rank not in self.installed:
                    return effects
            case _:
                return []
        if not self.expected or set(self.live) != self.expected:
            return effects
        self.epoch += 1
        self.installed = set(self.live)
        members = tuple(self.live[rank] for rank in sorted(self.live))
        installed = cm.EpochInstalled(epoch=self.epoch, members=members)
        return effects + [_to(member.rank, installed) for member in members]


def build(seed: int | str, options: CommitOptions) -> tuple[sim.Simulation[Message], World]:
    """The simulation of one job, with its kills already scheduled by the seed."""
    simulation = sim.Simulation[Message](seed)
    world = World(options)
    simulation.add(NODE, lambda incarnation: NodeProcess(options))
    for rank in range(options.world_size):

        def make(incarnation: int, rank: int = rank) -> RankProcess:
            rng = simulation.rng(f"rank{rank}#{incarnation}")
            return RankProcess(world, rank, incarnation, rng)

        simulation.add(f"rank{rank}", make, start=False)
        simulation.start(f"rank{rank}", delay_ns=1)  # the node is there first
    rng = simulation.rng("kills")
    span_ns = options.steps * WORK_NS_MAX
    for _ in range(options.kills):
        victim = f"rank{rng.randrange(options.world_size)}"
        simulation.crash_at(victim, sim.SIM_START_NS + rng.randrange(span_ns))
    return simulation, world


def run(seed: int | str, options: CommitOptions) -> World:
    """Run one seed to its end: every rank left has finished, or the state was truly lost.

    Raises `zbmd.transport.sim.SimulationFailure` with the story of the run otherwise.
    """
    simulation, world = build(seed, options)
    simulation.run(until=lambda: world.state_lost)
    if not world.state_lost:
        stuck = [
            name for name in (f"rank{rank}" for rank in range(options.world_size)) if simulation.lives(name)
        ]
        simulation.add_checker("liveness", lambda: _nobody_is_stuck(stuck))
        simulation.command(NODE, "settle")
        simulation.run()
    return world


def _nobody_is_stuck(stuck: list[str]) -> None:
    assert not stuck, f"nothing is under way, but {stuck} have not finished"
