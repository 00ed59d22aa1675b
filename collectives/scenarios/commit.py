"""A simulated job whose ranks run the step-commit machine: the scenario behind its tests and seed hunts.

Each rank is the production machine over a model of memory: two slots a rank that peers can read, also after
the owner's death, as shared segments allow. A step ends only once every member has entered it; an aborted one
goes on scribbling into its slot until it has drained. The node runs the job as the only one of a cluster of
one node: it restarts the dead (or shrinks the group) and has views entered once all members are linked. Now
and then it has the same members link up again; in some of these cases two have lost each other. And in some
runs one rank comes late, to a job that is running: it is kept out of views until then.

Checked after every event: a committed version has the one content it may have, a slot that somebody reads
does not change, versions only grow. Once the kills stop, every rank must finish.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.state.job_table import JobPhase, JobSpec, SlotState
from zbmd.actors.simulated.one_node import OneNode
from zbmd.actors.view import RANKS_MAX, MemberId, OnLoss, Outcome, View
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.machine import StepCommit
from zbmd.collectives.scenarios.commit_world import (
    JOB,
    NODE,
    ROUND_NS_MAX,
    SHRINK_SHARE,
    SLOW_NS,
    CommitOptions,
    CommitWorld,
    ContentsOf,
    Enter,
    HashChain,
    HostedJob,
    JobScenario,
    Message,
    Parted,
    Slots,
    add_processes,
    install,
    joined,
    key_of,
    linked,
    member_of,
)
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

WORK_NS_MAX = 3_000_000
DRAIN_NS_MAX = 500_000
NOTHING = b"nothing"
"""The digest of a version that was not preserved."""
CORRUPTING_SHARE = 0.1
"""The share of runs with bad memory."""
CORRUPTED_SHARE = 0.5
"""The share of pulls that it strikes in them."""
REGROUP_SHARE = 0.5
"""The share of runs in which members link up again although nobody died."""
REGROUPS_MAX = 20
LATE_SHARE = 0.4
"""The share of runs in which a rank joins the others at their work."""
PARTED_SHARE = 0.3
"""The share of those in which two members have lost each other."""
EPOCH_STRIDE = 1000
"""Between two views of the job: room for those in which its members link up again."""
RESTARTS_MAX = 1000
"""No scenario kills so often: the limit on restarts is not what is looked at here."""


Work: TypeAlias = cm.Fetch | cm.Recall | cm.RunStep


class RankProcess:
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    def __init__(self, world: CommitWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.member = MemberId(rank=rank, incarnation=incarnation)
        self.slots = world.slots[self.member] = world.contents.open(self.member)
        self.machine = world.machines[self.member] = StepCommit(
            rank=rank,
            version=0,
            digest=world.contents.digest_of(0),
            handle=f"{rank}#{incarnation}".encode(),
            last_version=world.options.steps,
            known_version=world.committed_max,
        )
        self.view = View(epoch=0, members=())
        self.coming: cm.EpochReady | None = None
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
                return [joined(self.member)]
            case sim.Arrived(message=message):
                return self._take(message, now_ns)
            case sim.Commanded():
                raise LocalProtocolError("a rank is not a node")
            case sim.PeerEnded(peer=peer, incarnation=incarnation):
                if peer == NODE:
                    return []
                return self._feed(cm.PeerEnded(member=member_of(peer, incarnation), reason="killed"), now_ns)
            case sim.TimerFired():
                return self._work_on(now_ns)
            case _:
                assert_never(stimulus)

    def _take(self, message: Message, now_ns: int) -> list[sim.Effect[Message]]:
        match message:
            case jobs.InstallView(view=view):
                if view.epoch <= self.view.epoch:
                    return []  # overtaken by the next
                self.view = view
                return [linked(self.member, view.epoch)] if self.coming is None else []
            case Enter(epoch=epoch):
                if epoch != self.view.epoch or epoch <= self.machine.epoch or self.coming is not None:
                    return []
                self.coming = cm.EpochReady(epoch=epoch, members=self.view.ids)
                return self._feed(self.coming, now_ns)
            case Parted(member=member):
                return self._feed(cm.PeerEnded(member=member, reason="its link ended"), now_ns)
            case jobs.Joined() | jobs.Linked():
                raise LocalProtocolError("a rank is not a node")
            case _:
                return self._feed(message, now_ns)

    def _enter(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Enter the view that is ready, and go for the next if there is one."""
        coming, self.coming = self.coming, None
        assert coming is not None
        self.world.abandoned.add(self.machine.epoch)
        installed = cm.EpochInstalled(epoch=coming.epoch, members=coming.members)
        effects = self._feed(installed, now_ns)
        newer = self.view.epoch > coming.epoch
        return [*effects, linked(self.member, self.view.epoch)] if newer else effects

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
            case cm.SendVote(to=to, epoch=epoch, version=version, digest=digest, part=part, ready=ready):
                vote = cm.VoteReceived(
                    sender=rank, epoch=epoch, version=version, digest=digest, part=part, ready=ready
                )
                return [_to(to, vote)]
            case cm.SendGaveUp(to=to, epoch=epoch):
                return [_to(to, cm.GaveUpReceived(sender=rank, epoch=epoch))]
            case cm.EnterEpoch():
                return self._enter(now_ns)
            case cm.SendFinish(to=to, epoch=epoch):
                return [_to(to, cm.FinishReceived(sender=rank, epoch=epoch))]
            case cm.Fetch() | cm.Recall() | cm.RunStep():
                return self._begin(action, now_ns)
            case cm.AbortWork(epoch=epoch):
                self.aborted = True
                world.abandoned.add(epoch)
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
            agreed = self.world.workers.setdefault((work.epoch, work.version), work.workers)
            assert agreed == work.workers and agreed, f"{self.member}: {work.workers} compute, or {agreed}"
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
        return self.world.slots[MemberId(rank=int(rank), incarnation=int(incarnation))]

    def _work_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        work = self.work
        assert work is not None and self.seen is not None
        if isinstance(work, cm.RunStep):
            entered = self.world.entered[work.epoch, work.version] == set(work.members)
            given_up = work.epoch in self.world.abandoned and (not entered or self.rng.random() < 0.3)
            if given_up and not self.aborted:
                self.slots.tear(work.slot)
            elif not self.aborted and not entered:
                return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, WORK_NS_MAX))]
            done = not self.aborted and not given_up and self.slots.step(work)
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
    """The driver of the node that runs the job. rng: has members link up again; late: delays one."""

    def __init__(self, world: HostedJob, rng: random.Random, late: random.Random | None = None) -> None:
        options = self.options = world.options
        self.late: int | None = None
        if late is not None and options.world_size > 1 and options.late:
            self.late = late.randrange(options.world_size)
            self.late_ns = round(10 ** late.uniform(3.0, math.log10(ROUND_NS_MAX)))
        self.world, self.rng = world, rng
        self.regroups = REGROUPS_MAX if rng.random() < REGROUP_SHARE else 0
        self.view = View(epoch=0, members=())
        self.linked: set[int] = set()
        self.node = OneNode(
            JobSpec(
                job=JOB,
                target="a script",
                ranks_per_node=options.world_size,
                on_loss=OnLoss.SHRINK if options.shrink else OnLoss.REPLACE,
                max_restarts=RESTARTS_MAX,
            )
        )

    def check_invariants(self) -> None:
        """The machine's own."""
        self.node.check_invariants()

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Translate a stimulus into the machine's events and perform what it answers."""
        match stimulus:
            case sim.Started():
                return self._perform(self.node.begin(now_ns=now_ns), now_ns)
            case sim.Arrived(message=jobs.Joined() as event):
                return self._feed(event, now_ns)
            case sim.Arrived(message=jobs.Linked() as event):
                return self._linked(event, now_ns)
            case sim.TimerFired(name="late"):
                return self._let_in(now_ns)
            case sim.TimerFired():
                return self._regroup()
            case sim.PeerEnded(peer=peer, incarnation=incarnation, clean=clean):
                key, effects = key_of(member_of(peer, incarnation)), list[sim.Effect[Message]]()
                if not clean:
                    effects += self._feed(jobs.LossProven(key=key), now_ns)
                exited = jobs.Exited(key=key, code=0 if clean else -9, reason="it ended")
                return effects + self._feed(exited, now_ns)
            case sim.Commanded():
                return []  # only has the checkers look once more
            case _:
                raise LocalProtocolError(f"the node does not expect {stimulus}")

    def _linked(self, event: jobs.Linked, now_ns: int) -> list[sim.Effect[Message]]:
        epoch, again = divmod(event.epoch, EPOCH_STRIDE)
        if not again and self.late is None:
            return self._feed(jobs.Linked(key=event.key, epoch=epoch), now_ns)
        if event.epoch != self.view.epoch:
            return []
        self.linked.add(event.key.rank)
        if self.linked < set(self.view.ranks):
            return []
        return [*self._to_all(Enter(epoch=event.epoch)), *self._set_regroup(now_ns)]

    def _let_in(self, now_ns: int) -> list[sim.Effect[Message]]:
        """The late one has linked up with those who are at work."""
        late, self.late = self.late, None
        full = self.node.view
        if late not in full.ranks or full.epoch != self.view.epoch // EPOCH_STRIDE:
            return []  # another view is on its way, and it will be in it
        self.view, self.linked = dataclasses.replace(full, epoch=self.view.epoch + 1), set()
        for member in full.ids:
            linked = jobs.Linked(key=key_of(member), epoch=full.epoch)
            self.node.handle(linked, now_ns=now_ns)  # the view that it has is entered in this one's stead
        return self._to_all(install(self.view))

    def _without_late(self, view: View, now_ns: int) -> list[sim.Effect[Message]]:
        """Install a view of those who are there; the late one is let in later."""
        others = tuple(member for member in view.members if member.rank != self.late)
        self.view = dataclasses.replace(view, epoch=view.epoch * EPOCH_STRIDE, members=others)
        self.linked = set()
        timer = sim.SetTimer(name="late", at_ns=now_ns + self.late_ns)
        return [*self._to_all(install(self.view)), timer]

    def _set_regroup(self, now_ns: int) -> list[sim.Effect[Message]]:
        self.regroups -= 1
        if self.regroups < 0:
            return []
        return [sim.SetTimer(name="regroup", at_ns=now_ns + self.rng.randint(0, ROUND_NS_MAX // 4))]

    def _regroup(self) -> list[sim.Effect[Message]]:
        """Have the members of the view link up again, unless another view is on its way."""
        effects: list[sim.Effect[Message]] = []
        if self.node.unlinked or self.node.view.epoch != self.view.epoch // EPOCH_STRIDE:
            return effects
        self.view, self.linked = dataclasses.replace(self.view, epoch=self.view.epoch + 1), set()
        members = self.view.ids
        if len(members) > 1 and self.rng.random() < PARTED_SHARE:
            one, other = self.rng.sample(members, 2)
            effects.append(_to(one.rank, Parted(member=other)))
            if self.rng.random() < 0.5:
                effects.append(_to(other.rank, Parted(member=one)))
        return effects + self._to_all(install(self.view))

    def _to_all(self, message: Message) -> list[sim.Effect[Message]]:
        return [_to(rank, message) for rank in self.view.ranks]

    def _feed(self, event: jobs.Event, now_ns: int) -> list[sim.Effect[Message]]:
        return self._perform(self.node.handle(event, now_ns=now_ns), now_ns)

    def _perform(self, actions: Sequence[jobs.Action], now_ns: int) -> list[sim.Effect[Message]]:
        effects: list[sim.Effect[Message]] = []
        for action in actions:
            match action:
                case jobs.Fork(key=key):
                    effects.append(sim.Start(process=f"rank{key.rank}"))
                case jobs.InstallView(view=view) if set(view.ranks) - {self.late} and self.late in view.ranks:
                    effects += self._without_late(view, now_ns)
                case jobs.InstallView(view=view):
                    self.late = None
                    self.view = dataclasses.replace(view, epoch=view.epoch * EPOCH_STRIDE)
                    effects += self._to_all(install(self.view))
                case jobs.EnterView():
                    effects += [*self._to_all(Enter(epoch=self.view.epoch)), *self._set_regroup(now_ns)]
                case _:
                    pass  # what the other actions order, the simulator does by itself
        job = self.node.job
        if job.phase is JobPhase.ENDED and job.outcome is Outcome.FAILED:
            states = {entry.state for entry in job.ranks}
            assert self.options.shrink and states == {SlotState.LOST}, job.reason
            self.world.state_lost = True  # nobody is left, and nobody is to be started
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
) -> tuple[sim.Simulation[Message], CommitWorld]:
    """The simulation of one job, without its kills."""
    conditions = draw_conditions(random.Random(f"{seed}/conditions"))
    simulation = sim.Simulation[Message](seed, conditions=conditions)
    world = CommitWorld(options, contents(simulation))
    add_processes(
        simulation,
        options.world_size,
        lambda _: NodeProcess(world, simulation.rng("regroups"), simulation.rng("late")),
        partial(RankProcess, world),
    )
    return simulation, world


@dataclass(frozen=True)
class CommitScenario(JobScenario[CommitWorld]):
    """The step-commit machine and a node's, with a hash chain for a job. `length` counts steps."""

    name: str = "commit"
    description: str = "step commit, and a job on one node: kills between any two effects, replace or shrink"

    def contents(self, seed: int | str, options: CommitOptions) -> ContentsOf:
        """Return the maker of what the job computes; a subclass's choice."""
        return HashChain

    def options_of(self, seed: int | str, options: sim.Options) -> CommitOptions:
        """See `JobScenario`."""
        rng = random.Random(f"{seed}/options")
        return CommitOptions(
            world_size=min(options.ranks, RANKS_MAX),
            steps=options.length,
            shrink=rng.random() < SHRINK_SHARE,
            corrupting=rng.random() < CORRUPTING_SHARE,
            late=rng.random() < LATE_SHARE,
        )

    def made(self, seed: int | str, job: CommitOptions) -> tuple[sim.Simulation[Message], CommitWorld]:
        """See `JobScenario`."""
        return build(seed, job, self.contents(seed, job))

    def rehearsed(self, seed: int | str, job: CommitOptions) -> sim.Simulation[Message]:
        """See `JobScenario`. Of a hash chain, whatever the contents are."""
        return build(seed, job)[0]

    def is_over(self, simulation: sim.Simulation[Message], world: CommitWorld) -> bool:
        """Return whether the run has ended as it may: all have finished, or the state was truly lost.

        So it is, too, once a corrupted pull was noticed: the rank says so and ends, and a user has to look.
        With a group that shrinks, a rank that was lost stays away; one that is not lost finishes.
        """
        if world.state_lost or world.corruption_noticed:
            return True
        lost = {rank for rank in range(world.options.world_size) if not simulation.lives(f"rank{rank}")}
        if not world.options.shrink:
            return len(world.finished) == world.options.world_size == len(lost)
        return bool(world.finished) and len(lost) == world.options.world_size
