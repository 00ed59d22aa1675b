"""The commit scenario with real training as its job: a tiny GPT with gradients and optimizer state.

Every rank holds two slots of weights and moments, and two for copies of its ward's, computes the gradients of
its shards and combines them along the shard tree. The programs of the all-reduce run in
`zbmd.collectives.programs.simulate`, where a member that has died in the meantime dies at some instruction.
Slots are torn while they are written. Each version must have the bits that one plain process computes
(`zbmd.training.run.plain`), whatever died, came back or left.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import xxhash

from zbmd.actors.view import MemberId
from zbmd.collectives.algorithms.catalogue import Operation, Request, build
from zbmd.collectives.algorithms.shard_tree import Node, assign_shards, shard_tree_nodes
from zbmd.collectives.programs.program import OUT, input_buffer
from zbmd.collectives.programs.simulate import Outcome, Result, Simulation
from zbmd.collectives.scenarios.hosted_job import Message
from zbmd.training.autograd.array_module import Array
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, write_corpus
from zbmd.training.data.sources import Source
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.elementwise import ARRAYS, AdamWState
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.scenarios.commit import CommitScenario, draw_options
from zbmd.training.scenarios.world import (
    CELLS,
    Cells,
    CommitOptions,
    Contents,
    ContentsOf,
    StepOrder,
    part_key,
)
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import AccumulationPlan
from zbmd.transport import sim

MODEL = GPTConfig(context=8, width=8, heads=1, layers=1)
SHARDS = (2, 3, 5)
TEXT_BYTES = 4096
DYING_STEPS_MAX = 60
"""A member that has died in the meantime dies within this many of its steps of the all-reduce."""
JOBS_KEPT = 64
"""Cached recipes and the digests of their versions, by steps and shards."""


@dataclass(frozen=True)
class ScenarioJob:
    """A recipe and the states of all its versions in one plain process."""

    recipe: Recipe
    versions: tuple[Array, ...]

    def digest(self, version: int, key: int) -> int:
        """Return the digest of a version, as the shard `key` has it."""
        return digest_of(self.versions[version], key)


@lru_cache(maxsize=JOBS_KEPT)
def plain_job(steps: int, shards: int) -> ScenarioJob:
    """Return the job of that many steps and shards, run in one plain process."""
    config = TrainingConfig(steps=steps, shards=shards, sequences_per_shard=1, warmup_steps=2)
    recipe = Recipe(GPT(MODEL), _corpus(), config)
    trainer = PlainTrainer(recipe)
    versions = [_flat(trainer)]
    for _ in range(steps):
        trainer.run_step()
        versions.append(_flat(trainer))
    return ScenarioJob(recipe, tuple(versions))


def _flat(trainer: PlainTrainer) -> Array:
    """Return a copy of the state: weights, then moments."""
    state = trainer.state
    return np.concatenate([state.weights, state.mean, state.square])


def digest_of(flat: Array, key: int) -> int:
    """Return the digest of a state. Shards with other keys are distinguished, though all hold the whole."""
    return xxhash.xxh3_64_intdigest(flat.data, seed=key)


@lru_cache(maxsize=1)
def _corpus() -> Corpus:
    """Return a small corpus in memory: words drawn from a fixed seed."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 7))) for _ in range(64)]
    text = " ".join(rng.choices(words, k=TEXT_BYTES)).encode()[:TEXT_BYTES]
    text_fd, corpus_fd = os.memfd_create("zbmd-text"), os.memfd_create("zbmd-corpus")
    try:
        os.write(text_fd, text)
        source = Source(f"/proc/self/fd/{text_fd}", TEXT_BYTES, 0)
        with os.fdopen(os.dup(corpus_fd), "wb") as file:
            write_corpus(file, [source], "", "words of no sense", TEXT_BYTES)
        corpus = Corpus(Path(f"/proc/self/fd/{corpus_fd}"), context=MODEL.context)
        corpus.data = np.array(corpus.data)  # in place of the mapping, which would hold a descriptor
        return corpus
    finally:
        os.close(text_fd)
        os.close(corpus_fd)


class TrainingContents(Contents):
    """The memory of all ranks, and the all-reduces between them. Every rank holds the whole state."""

    def __init__(self, job: ScenarioJob, simulation: sim.Simulation[Message]) -> None:
        self.job = job
        self.shards = job.recipe.config.shards
        self.samples = job.recipe.config.sequences_per_shard
        self._simulation = simulation
        self._rng = simulation.rng("all-reduce")
        self._entered: dict[tuple[int, int], dict[MemberId, dict[Node, Array]]] = {}
        self._results: dict[tuple[int, int], dict[MemberId, Result]] = {}

    def digest_of(self, key: int, version: int) -> int:
        """See `Contents`."""
        return self.job.digest(version, key)

    def sample_ids(self, version: int) -> Sequence[Sequence[int]]:
        """See `Contents`."""
        ids: list[list[int]] = self.job.recipe.sample_ids(version - 1).tolist()
        return ids

    def open(self, member: MemberId, key: int) -> Cells:
        """See `Contents`."""
        return TrainingCells(self, key)

    def enter(self, order: StepOrder, partials: dict[Node, Array]) -> None:
        """Note that a member has its partial sums ready."""
        self._entered.setdefault((order.epoch, order.version), {})[order.members[order.place]] = partials

    def total(self, order: StepOrder) -> Array | None:
        """Return the gradient that the all-reduce gives a member; None if one was lost before it was complete
        there.
        """
        key = (order.epoch, order.version)
        if key not in self._results:
            self._results[key] = self._reduced(order.members, self._entered.pop(key))
        result = self._results[key][order.members[order.place]]
        return result.out if result.outcome is Outcome.COMPLETE else None

    def _reduced(
        self, members: Sequence[MemberId], entered: dict[MemberId, dict[Node, Array]]
    ) -> dict[MemberId, Result]:
        request = Request(
            operation=Operation.ALL_REDUCE_SHARDS,
            algorithm="shard_tree",
            n=len(members),
            chunks=len(members),
            shards=self.shards,
            assignment=assign_shards(self.shards, len(members)),
        )
        size = self.job.recipe.model.layout.size
        buffers = [
            {
                **{input_buffer(k): entered[m][node] for k, node in enumerate(entered[m])},
                OUT: np.zeros(size, np.float32),
            }
            for m in members
        ]
        kills = {
            index: self._rng.randrange(DYING_STEPS_MAX)
            for index, member in enumerate(members)
            if not self._lives(member)
        }
        programs = [build(request, index) for index in range(len(members))]
        reduction = Simulation(programs, buffers, size, seed=self._rng.randrange(1 << 32), kills=kills)
        return dict(zip(members, reduction.run(), strict=True))

    def _lives(self, member: MemberId) -> bool:
        name = f"rank{member.rank}"
        return self._simulation.lives(name) and self._simulation.incarnation(name) == member.incarnation


class TrainingCells(Cells):
    """The state of one incarnation, and what it does to it. cells: (CELLS, arrays * size)."""

    def __init__(self, training: TrainingContents, key: int) -> None:
        self._training = training
        self._keys = [key] * CELLS
        """Of the shard in each cell."""
        self._recipe = training.job.recipe
        self._size = self._recipe.model.layout.size
        self.cells = np.zeros((CELLS, len(ARRAYS) * self._size), np.float32)
        self._total: Array | None = None

    def state(self, cell: int) -> AdamWState:
        """Return views of what a cell holds."""
        return AdamWState.of(self.cells[cell], self._size, len(ARRAYS))

    def digest(self, cell: int) -> int:
        """See `Cells`."""
        return digest_of(self.cells[cell], self._keys[cell])

    def tear(self, cell: int) -> None:
        """See `Cells`. Half of it is as it was."""
        flat = self.cells[cell]
        flat[: len(flat) // 2] += 1.0

    def err(self, cell: int, bit: int) -> None:
        """See `Cells`."""
        self.cells[cell].view(np.uint32)[7] ^= np.uint32(1 << bit)

    def begin(self, version: int) -> None:
        """See `Cells`."""
        flat = self.cells[version % SLOTS]
        flat[:] = 0.0
        self.state(version % SLOTS).weights[:] = self._recipe.model.init(self._recipe.config.seed)

    def compute(self, order: StepOrder) -> None:
        """See `Cells`. The gradients of all our shards, added up along the tree."""
        shards, step = self._training.shards, order.version - 1
        lo, hi = assign_shards(shards, len(order.members))[order.place]
        plan = AccumulationPlan.of(shards, lo, hi)
        buffers = [np.zeros(self._size, np.float32) for _ in range(plan.buffers)]
        ids, old = self._recipe.sample_ids(step), self.state(step % SLOTS)
        for leaf in plan.leaves:
            self._recipe.shard_gradient(old.weights, buffers[leaf.buffer], ids[leaf.shard], step=step)
            plan.perform(leaf.additions, buffers, slice(0, self._size))
        partials = {node: buffers[plan.partials[node]] for node in shard_tree_nodes(shards, lo, hi)}
        self._training.enter(order, partials)

    def reduce(self, order: StepOrder) -> bool:
        """See `Cells`."""
        self._total = self._training.total(order)
        return self._total is not None

    def update(self, order: StepOrder) -> None:
        """See `Cells`."""
        assert self._total is not None, "the gradients are not reduced"
        old, new = self.state(1 - order.version % SLOTS), self.state(order.version % SLOTS)
        self._recipe.update(old, new, self._total, step=order.version - 1)

    def copy(self, source: Cells, source_cell: int, cell: int) -> None:
        """See `Cells`."""
        assert isinstance(source, TrainingCells)
        self.cells[cell], self._keys[cell] = source.cells[source_cell], source._keys[source_cell]

    def assemble(self, sources: Sequence[tuple[Cells, int]], version: int) -> None:
        """See `Cells`. Every part is the whole."""
        slot, (whole, cell) = version % SLOTS, sources[0]
        assert isinstance(whole, TrainingCells)
        flat = whole.cells[cell]
        right = [digest_of(flat, part_key(len(sources), part)) for part in range(len(sources))]
        if [cells.digest(at) for cells, at in sources] == right:
            self.cells[slot] = flat


@dataclass(frozen=True)
class TrainingScenario(CommitScenario):
    """As `commit`, with real contents. Kills are drawn from runs of a hash chain, which take as long."""

    name: str = "training"
    description: str = "the job itself, a tiny GPT: every committed version has the bits of a plain process"

    def options_of(self, seed: int | str, options: sim.Options) -> CommitOptions:
        """See `JobScenario`. Along `dp` alone, from the beginning of the plan."""
        drawn = draw_options(random.Random(f"{seed}/options"), options, meshes=0.0)
        return dataclasses.replace(drawn, first=0)

    def contents(self, seed: int | str, options: CommitOptions) -> ContentsOf:
        """The training of one of a few recipes."""
        job = plain_job(options.steps, random.Random(f"{seed}/recipe").choice(SHARDS))
        return partial(TrainingContents, job)
