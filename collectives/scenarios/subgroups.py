"""Simulated processes with several elastic groups each: a mesh's rows and columns, beside the group of all.

Each group is that of `zbmd.collectives.scenarios.repair`, with its machine and its checks, and its members
use it whenever they like, some groups hardly ever or never. But a process uses none before it is in all of
them, as a program makes them first: who does not come to one of them holds it up everywhere. What is looked
at here is what they share: the views, which the machine of `zbmd.collectives.elastic.views_machine` enters,
while some groups have lost a member and others have not.

Checked besides: a group without one of those that a view drops is never cut by it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.view import MemberId, View
from zbmd.collectives.elastic import views_machine as vm
from zbmd.collectives.elastic.views_machine import ViewsMachine
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.machine import RepairState
from zbmd.collectives.scenarios.hosted_job import (
    Enter,
    JobOptions,
    JobScenario,
    Message,
    Parted,
    add_processes,
    group_of,
    joined,
    linked,
)
from zbmd.collectives.scenarios.node import NodeProcess
from zbmd.collectives.scenarios.repair import RankProcess, RepairWorld, conditions_of
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

DRAIN_NS_MAX = 2_000_000
"""The slowest that what a group has under way is drained."""
RANKS_MAX = 8
COLUMNS = 2

Effects = list[sim.Effect[Message]]


@dataclass(slots=True)
class SubgroupWorld(RepairWorld):
    """Of one group. ranks: those that belong to it; empty: all."""

    ranks: tuple[int, ...] = ()

    def call(self, sequence: int) -> rm.Call:
        """See `RepairWorld`: a root is one of its own ranks."""
        found = RepairWorld.call(self, sequence)
        if found.needs < 0 or not self.ranks:
            return found
        return dataclasses.replace(found, needs=self.ranks[found.needs % len(self.ranks)])


@dataclass(slots=True)
class Mesh:
    """The state that outlives processes: the worlds of all groups, by name."""

    options: JobOptions
    state_lost: bool = False
    parts: dict[str, SubgroupWorld] = field(default_factory=dict[str, SubgroupWorld])

    def of(self, rank: int) -> list[str]:
        """The groups that a rank belongs to."""
        return [name for name, part in self.parts.items() if not part.ranks or rank in part.ranks]


class SubgroupProcess(RankProcess):
    """A rank in one of its groups.

    view: what its process is in; entered: hears of a new epoch of it; ready: whether operations may begin.
    """

    world: SubgroupWorld

    def __init__(
        self,
        world: SubgroupWorld,
        member: MemberId,
        rng: random.Random,
        view: Callable[[], View],
        entered: Callable[[tuple[MemberId, ...]], Effects],
        ready: Callable[[], bool],
    ) -> None:
        super().__init__(world, member.rank, member.incarnation, rng)
        self._view = view
        self._entered = entered
        self._ready = ready
        self.due = 0
        self.settled = False
        self.done = False

    def come(self, now_ns: int) -> Effects:
        """Go to the view that the process is in, if a newer one is waited for."""
        view, waits = self._view(), self.machine.state in (RepairState.NEW, RepairState.AWAITING_VIEW)
        if not waits or view.epoch <= self.machine.epoch:
            return []
        belong = [m for m in view.members if not self.world.ranks or m.rank in self.world.ranks]
        members = tuple(m.id for m in belong)
        event = rm.EpochEntered(
            epoch=view.epoch,
            members=members,
            gone=(*view.finished, *view.lost),
            readable=self.readable(members) if self.machine.call else (),
        )
        return [*self._entered(members), *self._feed(event, now_ns)]

    def cut(self, now_ns: int) -> Effects:
        """End what is under way."""
        self._leave()
        return self._cut(now_ns) if self.stages else []

    def follow(self, epoch: int, now_ns: int) -> Effects:
        """Come to the view of `epoch` once nothing is under way."""
        self.due = max(epoch, self.due)
        if self.machine.state is not RepairState.IDLE or self.machine.epoch >= self.due:
            return []
        return self._feed(rm.FollowAsked(), now_ns)

    def _leave(self) -> None:
        self.world.left[self.member] = max(self.machine.epoch, self.world.left.get(self.member, 0))

    @property
    def given_up(self) -> bool:
        """Whether it takes part in nothing more of its epoch: what is begun there ends at once."""
        return self.world.left.get(self.member, 0) >= self.machine.epoch

    def _meet(self, now_ns: int) -> Effects:
        if self.stages and self.given_up:
            return self._cut(now_ns)
        return [*super()._meet(now_ns)]

    def _link(self) -> Effects:
        return []

    def _enter(self, now_ns: int) -> Effects:
        self._leave()
        return self.come(now_ns)

    def _call(self, now_ns: int) -> Effects:
        if self.machine.state is not RepairState.IDLE:
            return []  # it follows a view: behind that another call is due
        if not self._ready():
            return [*super()._calm(now_ns)]
        if self.machine.sequence > self.world.options.steps:
            self.world.finished.add(self.member.rank)
            self.done = True
            return []
        return super()._call(now_ns)

    def _calm(self, now_ns: int) -> Effects:
        self.settled = True
        return [*super()._calm(now_ns), *self.follow(self.due, now_ns)]


class MeshProcess:
    """A rank with all of its groups, the driver of their machines and of that of its views."""

    def __init__(self, mesh: Mesh, rank: int, incarnation: int, rng: random.Random) -> None:
        self.rng = rng
        self.member = MemberId(rank=rank, incarnation=incarnation)
        self.views = ViewsMachine()
        self.view = View(epoch=0, members=())
        self.known = self.view
        self.may_enter = 0
        self.asked = 0
        self.cuts = 0
        self.parted: set[MemberId] = set()
        self.coming: View | None = None
        self.names = mesh.of(rank)
        self.parts = [self._part(mesh.parts[name], number) for number, name in enumerate(self.names)]

    def _part(self, world: SubgroupWorld, number: int) -> SubgroupProcess:
        def entered(members: tuple[MemberId, ...]) -> Effects:
            joined = vm.GroupEntered(group=number, members=members, ranks=world.ranks)
            return self._views(joined, self.now_ns)

        def ready() -> bool:
            return all(part.settled for part in self.parts)

        return SubgroupProcess(world, self.member, self.rng, lambda: self.view, entered, ready)

    def check_invariants(self) -> None:
        """The machines' own."""
        self.views.check_invariants()
        for part in self.parts:
            part.check_invariants()

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Hand a stimulus to the views, or to the group that it is for."""
        self.now_ns = now_ns
        match stimulus:
            case sim.Started():
                return [joined(self.member)]
            case sim.Arrived(message=jobs.InstallView(view=view)):
                self.known = max(self.known, view, key=lambda known: known.epoch)
                return self._ask()
            case sim.Arrived(message=Enter(epoch=epoch)):
                self.may_enter = max(epoch, self.may_enter)
                return self._come(now_ns)
            case sim.Arrived(message=Parted(member=member)):
                self.parted.add(member)
                return self._to_parts(stimulus, now_ns)
            case sim.PeerEnded():
                return self._to_parts(stimulus, now_ns)
            case sim.TimerFired(name=name):
                return self._fired(name, now_ns)
            case _:
                raise LocalProtocolError(f"a rank does not expect {stimulus}")

    def _to_parts(self, stimulus: sim.Stimulus[Message], now_ns: int) -> Effects:
        for part in self.parts:
            part.deliver(stimulus, now_ns=now_ns)
        return []

    def _fired(self, name: str, now_ns: int) -> Effects:
        what, number, *_ = name.split("/")
        part = self.parts[int(number)]
        if what != "drain":
            effects = self._of(int(number), part.deliver(sim.TimerFired(name=what), now_ns=now_ns))
            over = all(part.done and part.machine.state is RepairState.IDLE for part in self.parts)
            return [*effects, sim.Exit()] if over else effects
        effects = self._of(int(number), part.cut(now_ns))
        return [*effects, *self._views(vm.Drained(group=int(number)), now_ns)]

    def _of(self, number: int, effects: Sequence[sim.Effect[Message]]) -> Effects:
        """A group's effects as its process's: timers have its number."""
        return [
            dataclasses.replace(effect, name=f"{effect.name}/{number}")
            if isinstance(effect, sim.SetTimer) and "/" not in effect.name
            else effect
            for effect in effects
        ]

    # ---- views

    def _ask(self) -> Effects:
        """Say that we are linked for the view that is known, whatever our groups do."""
        if self.coming is not None or self.known.epoch <= max(self.asked, self.view.epoch):
            return []
        self.asked = self.known.epoch
        return [linked(self.member, self.known.epoch)]

    def _come(self, now_ns: int) -> Effects:
        """A view that all members are linked for may be entered; one at a time is."""
        known = self.known
        if self.coming is not None or not self.view.epoch < known.epoch <= self.may_enter:
            return self._ask()
        self.coming = known
        members = known.ids
        held = set(self.view.ids) - self.parted
        kept = tuple(m for m in members if m in held or m == self.member)
        return self._views(vm.ViewReady(epoch=known.epoch, members=members, kept=kept), now_ns)

    def _views(self, event: vm.ViewsEvent, now_ns: int) -> Effects:
        effects: Effects = []
        for action in self.views.handle(event, now_ns=now_ns):
            match action:
                case vm.Cut(group=group):
                    self._check_cut(self.parts[group])
                    at_ns = now_ns + self.rng.randint(1, DRAIN_NS_MAX)
                    self.cuts += 1  # one that is cut again drains again, beside the first time
                    effects.append(sim.SetTimer(name=f"drain/{group}/{self.cuts}", at_ns=at_ns))
                case vm.Enter():
                    effects += self._entered(now_ns)
                case vm.Follow(group=group, epoch=epoch):
                    effects += self._of(group, self.parts[group].follow(epoch, now_ns))
                case _:
                    assert_never(action)
        return effects

    def _check_cut(self, part: SubgroupProcess) -> None:
        assert self.coming is not None
        stay = set(self.coming.ids) - self.parted
        assert not set(part.machine.members) <= stay, f"{self.member}: {part.machine.members} all stay"

    def _entered(self, now_ns: int) -> Effects:
        """The view is entered. No group may still be at work with one whose memory goes with it."""
        assert self.coming is not None
        before = set(self.coming.ids) - self.parted
        for part in self.parts:
            busy = part.stages and not part.given_up and not set(part.machine.members) <= before
            assert not busy, f"{self.member} enters {self.coming}, and is in {part.stages[0]}"
        self.view, self.coming = self.coming, None
        self.parted.clear()
        effects: Effects = []
        for number, part in enumerate(self.parts):
            part.parted.clear()
            effects += self._of(number, part.come(now_ns))
        return [*effects, *self._come(now_ns)]


def build(seed: int | str, options: JobOptions) -> tuple[sim.Simulation[Message], Mesh]:
    """A mesh, without its kills. `options.steps` counts the operations of "all"; others have fewer."""
    simulation = sim.Simulation[Message](seed, conditions=conditions_of(seed))
    mesh, size = Mesh(options), options.world_size
    groups: dict[str, tuple[int, ...]] = {"all": ()} | {
        f"row{r}": (r, r + 1) for r in range(0, size - 1, COLUMNS)
    }
    groups |= {f"column{c}": tuple(range(c, size, COLUMNS)) for c in range(COLUMNS) if size > COLUMNS}
    for name, ranks in groups.items():
        steps = random.Random(f"{seed}/{name}/steps").randint(0, options.steps) if ranks else options.steps
        own = dataclasses.replace(options, steps=steps)
        mesh.parts[name] = SubgroupWorld(own, f"{seed}/{name}", ranks=ranks)
    lives = add_processes(
        simulation,
        size,
        lambda _: NodeProcess(mesh, simulation.rng("regroups")),
        partial(MeshProcess, mesh),
    )
    for part in mesh.parts.values():
        part.lives = lives
    return simulation, mesh


@dataclass(frozen=True)
class SubgroupsScenario(JobScenario[JobOptions, Mesh]):
    """The repair machines of several groups in each process. `length` counts those of the group of all."""

    name: str = "parts"
    description: str = "elastic groups with sub-groups: rows and columns are repaired, others go on"

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`."""
        return group_of(seed, options, RANKS_MAX)

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], Mesh]:
        """See `JobScenario`."""
        return build(seed, job)

    def is_over(self, simulation: sim.Simulation[Message], world: Mesh) -> bool:
        """Return whether all who live on have finished in all of their groups.

        With a group that shrinks, those that were lost stay away; the job is over, too, once all were.
        """
        size = world.options.world_size
        if any(simulation.lives(f"rank{rank}") for rank in range(size)):
            return False
        finished = [
            all(rank in world.parts[name].finished for name in world.of(rank)) for rank in range(size)
        ]
        if world.options.shrink:
            return any(finished) or world.state_lost
        return all(finished)
