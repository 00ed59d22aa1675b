"""A simulated resilient loop whose ranks leave their parts of the state in memory that outlives them.

As `sharded_loop`; but each rank has two slots, of which one is torn while a step is copied there, and two
places for the gradients of an update, which it fills before its vote. Memory may fail: then buddies keep
copies from the next meeting on. A part is lost only if no memory has it.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, cast

from zbmd.collectives.scenarios.hosted_job import JobOptions, Message
from zbmd.training.scenarios.loop import Content, LoopRank, LoopScenario, build
from zbmd.training.scenarios.sharded_loop import Rows, ShardRank, ShardWorld, rows_at
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.fsdp import division as dv
from zbmd.transport import sim

FAILS_SHARE = 0.05
"""Of steps, after which a rank's memory fails."""


class Update(NamedTuple):
    """Gradients that a rank has left: of the update to a version, computed from this state."""

    version: int
    content: Content


@dataclass(slots=True)
class Memory:
    """That of the rank of a place, by the parity of versions. slots: version and rows."""

    slots: dict[int, tuple[int, Rows]] = field(default_factory=dict[int, tuple[int, Rows]])
    updates: dict[int, Update] = field(default_factory=dict[int, Update])

    def put(self, version: int, rows: Rows) -> None:
        """Have a step whole."""
        self.slots[version % 2] = version, dict(rows)

    def reach_of(self, version: int) -> int:
        """Return the last version that the step of `version` leads to."""
        then = version + 1
        left = self.updates.get(then % 2)
        return then if left is not None and left.version == then else version

    @property
    def reach(self) -> int:
        """The last version that it leads to; -1: none."""
        return max((self.reach_of(version) for version, _ in self.slots.values()), default=-1)

    def rows_of(self, version: int) -> Rows:
        """Return the rows of a version: of a step, or of one after the update that was left."""
        for at, rows in self.slots.values():
            if at == version:
                return dict(rows)
        before, rows = next((at, rows) for at, rows in self.slots.values() if at == version - 1)
        left = self.updates[version % 2]
        assert all(content == left.content for content in rows.values()), f"{left} is not of {before}"
        return {row: (*content, left.version) for row, content in rows.items()}


@dataclass(slots=True)
class LeftWorld(ShardWorld):
    """The state that outlives a process."""

    memory: dict[int, Memory] = field(default_factory=dict[int, Memory])
    """By rank."""


class LeftRank(ShardRank):
    """The driver of one rank."""

    def __init__(self, world: LeftWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.left = world
        self.has_memory, self.has_left = True, False

    @property
    def memory(self) -> Memory:
        """That which outlives this rank."""
        return self.left.memory.setdefault(self.member.rank, Memory())

    @property
    def is_left(self) -> bool:
        """See `ShardRank`."""
        return self.has_left

    def _made(self, *, fresh: bool) -> tx.Transactions:
        if not fresh:
            self.left.memory[self.member.rank] = Memory()
            self.memory.put(0, rows_at(self.size, self.place, ()))
        held = tuple(
            dv.Held(version=at, place=self.place, size=self.size, reach=self.memory.reach_of(at))
            for at, _ in self.memory.slots.values()
        )
        return self.machine_type(
            fresh=fresh,
            sharded=True,
            place=self.place,
            size=self.size,
            held=held if fresh else (),
            outlives=not fresh,
        )

    def _handle(self, event: tx.Event) -> list[tx.Action]:
        if isinstance(event, tx.Cut):
            event = tx.Cut(outlives=self.has_memory and self.memory.reach >= self.machine.version)
        return super()._handle(event)

    def _perform(self, actions: list[tx.Action], now_ns: int) -> list[sim.Effect[Message]]:
        self.actions += actions
        match self.actions[0] if self.actions else None:
            case tx.Deliver(leaves=False):
                self.has_left = False
                return super()._perform([], now_ns)
            case tx.Deliver(version=version):
                self.actions.clear()
                self.has_left = True
                if self.has_memory:
                    self.memory.put(version - 1, self.held.own)  # the copy is whole by now
                    self.memory.updates[version % 2] = Update(version, self.content)
                return self._perform(self._handle(tx.Delivered()), now_ns)
            case dv.Move(what=dv.What.LEFT, version=version):
                self.actions.pop(0)
                self.world.ways.add("comes from memory")
                self.held.own.clear()
                self.held.own.update(self.memory.rows_of(version))
                if not any(isinstance(one, dv.Move) for one in self.actions):
                    self.world.ways.add("takes")
                    self.actions += self._handle(tx.Taken(version=len(self.content)))
                return self._perform([], now_ns)
            case _:
                return super()._perform([], now_ns)

    def _end_step(self, now_ns: int) -> list[sim.Effect[Message]]:
        version = self.machine.version
        if self.has_memory:
            self.memory.slots.pop(version % 2, None)  # a copy begins: it is torn until it is whole
            if self.rng.random() < 1 / 2:
                self.memory.put(version, self.held.own)
            if self.rng.random() < FAILS_SHARE:
                self.world.ways.add("has no memory")
                self.has_memory, self.left.memory[self.member.rank] = False, Memory()
        return super()._end_step(now_ns)

    def _lose(self) -> list[sim.Effect[Message]]:
        fresh = [each for each in self.reports if each.fresh]
        assert any(not each.held for each in fresh), f"{self.member} gives up, and memory has {self.reports}"
        return self._end_lost()


@dataclass(frozen=True)
class LeftScenario(LoopScenario):
    """As `LoopScenario`, with a sharded state in memory that outlives its ranks; all of them are replaced."""

    rank: ClassVar[type[LoopRank]] = LeftRank
    name: str = "left"
    description: str = "a PyTorch loop with shards, which memory keeps: kills in and about votes, replace"

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`."""
        return dataclasses.replace(super().options_of(seed, options), shrink=False, late=False)

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], ShardWorld]:
        """See `JobScenario`."""
        return build(seed, LeftWorld(job), cast("type[LeftRank]", self.rank))
