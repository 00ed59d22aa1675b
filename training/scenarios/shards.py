"""A simulated resilient loop whose state is sharded: the scenario of copies that replay their ward's updates.

It is `loop` with a shard for each rank, a copy of it at its buddy, and the delivery of gradients before each
vote, which may end at some ranks and fail at others.

Checked beside what `loop` checks: a shard and a copy are always of their version, made of whole gradients of
their own rank; a vote is cast by a rank that holds its ward's gradients; shards move between steps only; the
state is lost only where no living rank has a shard or its copy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeAlias

from zbmd.actors.view import MemberId
from zbmd.collectives.scenarios.hosted_job import JobOptions, Message
from zbmd.collectives.scenarios.repair import Meeting
from zbmd.training.scenarios.loop import (
    Content,
    Given,
    LoopRank,
    LoopScenario,
    LoopWorld,
    Stage,
    build,
)
from zbmd.training.torch import transaction as tx
from zbmd.transport import sim

Shard: TypeAlias = tuple[int, Content]
"""A rank, and the versions whose gradients its shard has taken in."""


@dataclass(slots=True)
class ShardWorld(LoopWorld):
    """The state that outlives a process."""

    copies: dict[MemberId, Shard] = field(default_factory=dict[MemberId, Shard])
    """The copies that members keep of shards of their wards."""


class ShardRank(LoopRank):
    """The driver of one rank."""

    def __init__(self, world: ShardWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.shards = world
        self.size = world.options.world_size
        self.shard: Shard = (rank, ())
        self.held: Shard | None = None
        """The shard of the ward from which the gradients were computed that this rank holds."""
        self.ballot: tx.Ballot | None = None

    def _made(self, *, fresh: bool) -> tx.Transactions:
        return tx.Transactions(fresh=fresh, sharded=True)

    @property
    def ward(self) -> int:
        """The rank of which this one keeps a copy."""
        return (self.member.rank - 1) % self.size

    def check_invariants(self) -> None:
        """See `LoopRank`; and that shard and copy are of this version."""
        super().check_invariants()
        copy = self.shards.copies.get(self.member)
        if not self.machine.fresh:
            assert self.shard == (self.member.rank, self.content), f"{self.member} has {self.shard}"
        if self.machine.keeps:
            assert copy == (self.ward, self.content), f"{self.member} keeps {copy} at {self.content}"

    # ---- meetings

    def _standings(self, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        effects = super()._standings(brought, now_ns)
        if self.stages and self.stages[0].name == "gradients":  # the first ranks: each gets its copy
            return self._begin("reports", now_ns)
        return effects

    def _brings(self, stage: Stage) -> object:
        match stage.name:
            case "deliver":
                assert self.gradients is not None, f"{self.member} delivers no whole gradients"
                return (self.member.rank, self.gradients)
            case "vote":
                return self.ballot
            case "rest":
                return super()._brings(Stage("give", stage.ranks, stage.source))
            case "shard":
                return self.shards.copies.get(self.member)
            case "copy":
                return self.shard
            case _:
                return super()._brings(stage)

    def _ends(self, stage: Stage, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        match stage.name:
            case "gradients":
                assert set(brought) == {self.content}, f"{self.member} reduces gradients of {set(brought)}"
                self.gradients = self.content
                return self._perform(self._handle(tx.Prepared()), now_ns)
            case "deliver":
                place = next(i for i, member in enumerate(self.members) if member.rank == self.ward)
                held = brought[place]
                assert isinstance(held, tuple)
                self.held = held
                return self._perform(self._handle(tx.Delivered()), now_ns)
            case "rest" | "shard" | "copy":
                if stage.source != self.member.rank:
                    self._take(stage, brought[stage.ranks.index(stage.source)])
                return self._perform([], now_ns)
            case _:
                return super()._ends(stage, brought, now_ns)

    def _take(self, stage: Stage, given: object) -> None:
        match stage.name:
            case "rest":
                assert isinstance(given, Given)
                self.content = given.content
            case "shard":
                assert given == (self.member.rank, self.content), f"{self.member} gets {given} for its shard"
                self.shard = (self.member.rank, self.content)
            case _:
                assert given == (self.ward, self.content), f"{self.member} gets {given} to keep"
                self.shards.copies[self.member] = (self.ward, self.content)
                if not self.machine.fresh:
                    self.actions += self._handle(tx.Kept())
        if self.machine.fresh and not any(isinstance(action, tx.Move) for action in self.actions):
            version = len(self.content)
            self.world.in_loop.add(self.member)
            self.world.ended[self.member] = version
            self.world.ways.add("takes")
            self.actions += self._handle(tx.Taken(version=version))

    def _cut(self, now_ns: int) -> list[sim.Effect[Message]]:
        effects = super()._cut(now_ns)
        if self.waits and self.known.epoch == self.entered and self._lives_on():
            return self._again(now_ns)
        return effects

    def _is_doomed(self, meeting: Meeting) -> bool:
        # Others may have gone to a newer view before this rank has made further groups of the old one.
        return super()._is_doomed(meeting) or (self.round > 1 and self.known.epoch > self.entered)

    def _lives_on(self) -> bool:
        return (self.lost | self.parted).isdisjoint(self.members)

    def _again(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Give up the groups, and make others of the same view."""
        self.world.left[self.member] = self.group
        self.round, self.waits = self.round + 1, False
        return self._begin("standings", now_ns)

    # ---- actions

    def _perform(self, actions: list[tx.Action], now_ns: int) -> list[sim.Effect[Message]]:
        self.actions += actions
        match self.actions[0] if self.actions else None:
            case tx.Deliver():
                self.actions.clear()
                return self._begin("deliver", now_ns)
            case tx.Vote(ballot=ballot):
                self.actions.clear()
                self.ballot = ballot
                return self._begin("vote", now_ns)
            case tx.Meet():
                self.world.ways.add("waits")
                self.actions.clear()
                return self._again(now_ns)
            case tx.Repeat():
                self.held = None
                self.gradients = None
                self.world.ways.add("repeats")
                self.actions.pop(0)
                return self._perform([], now_ns)
            case tx.Move(what=what, source=source, target=target):
                self.actions.pop(0)
                ranks = tuple(sorted((source, target)))  # of all ranks, whose places are their numbers
                self.stages = [Stage(what.value, ranks, source, source * self.size + target)]
                return self._tick(now_ns)
            case tx.Fail(lost=True):
                return self._lose()
            case _:
                return super()._perform([], now_ns)

    def _lose(self) -> list[sim.Effect[Message]]:
        fresh = {member.rank for member in self.members if member not in self.world.in_loop}
        copies = {copy[0] for member, copy in self.shards.copies.items() if member in self.members}
        assert not fresh <= copies, f"{self.member} gives up shards {fresh}, of which copies are kept"
        self.world.ways.add("is lost")
        self.world.state_lost = True
        return [sim.Exit()]

    def _update(self, *, promoted: bool, now_ns: int) -> list[sim.Effect[Message]]:
        before = self.content
        effects = super()._update(promoted=promoted, now_ns=now_ns)
        self.shard = (self.member.rank, self.content)
        if self.size > 1:
            assert self.held == (self.ward, before), f"{self.member} replays {self.held} upon {before}"
            self.shards.copies[self.member] = (self.ward, self.content)
        self.held = None
        return effects


@dataclass(frozen=True)
class ShardScenario(LoopScenario):
    """As `LoopScenario`, with a sharded state."""

    name: str = "shards"
    description: str = (
        "a PyTorch loop with shards, whose copies replay updates: kills before, in and after votes"
    )

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], ShardWorld]:
        """See `JobScenario`."""
        return build(seed, ShardWorld(job), ShardRank)
