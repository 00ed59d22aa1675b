"""The node of a simulated job: the production machine of a job on one node, over the simulation's processes.

It runs the job as the only one of a cluster of one node: it restarts the dead (or shrinks the group) and has
views entered once all members are linked. Now and then it has the same members link up again; in some of
these cases two have lost each other. And in some runs one rank comes late, to a job that is running: it is
kept out of views until then.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.state.job_table import JobPhase, JobSpec, SlotState
from zbmd.actors.simulated.one_node import OneNode
from zbmd.actors.view import OnLoss, Outcome, View
from zbmd.collectives.scenarios.hosted_job import (
    JOB,
    ROUND_NS_MAX,
    SLOW_NS,
    Enter,
    HostedJob,
    Message,
    Parted,
    install,
    key_of,
    member_of,
)
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

REGROUP_SHARE = 0.5
"""The share of runs in which members link up again although nobody died."""
REGROUPS_MAX = 20
PARTED_SHARE = 0.3
"""The share of those in which two members have lost each other."""
EPOCH_STRIDE = 1000
"""Between two views of the job: room for those in which its members link up again."""
RESTARTS_MAX = 1000
"""No scenario kills so often: the limit on restarts is not what is looked at here."""


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
                    effects += self._feed(jobs.Forked(key=key), now_ns)
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
