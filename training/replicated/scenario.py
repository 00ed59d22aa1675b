"""The commit scenario with real training as its job: a tiny GPT with gradients and optimizer state.

Every rank holds two slots of weights and moments, computes the gradients of its shards and combines them
along the shard tree. The programs of the all-reduce run in `zbmd.collectives.programs.simulate`, where a
member that has died in the meantime dies at some instruction. Slots are torn while they are written. Each
version must have the bits that one plain process computes (`zbmd.training.run.plain`), whatever died,
came back or left.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from zbmd.actors.view import MemberId
from zbmd.collectives.algorithms.catalogue import Operation, Request, build
from zbmd.collectives.algorithms.shard_tree import Node, assign_to, shard_tree_nodes
from zbmd.collectives.commit import events as cm
from zbmd.collectives.programs.program import OUT, input_buffer
from zbmd.collectives.programs.simulate import Outcome, Result, Simulation
from zbmd.collectives.scenarios.commit import CommitScenario
from zbmd.collectives.scenarios.commit_world import CommitOptions, Contents, ContentsOf, Message, Slots
from zbmd.training.autograd.array_module import Array
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, Source, write_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.accumulate import AccumulationPlan
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.two_slot_store import Store, own_memory
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
    """A recipe and its results in one plain process: the digests of all versions, the bits of the last."""

    recipe: Recipe
    digests: tuple[bytes, ...]
    last: Array


@lru_cache(maxsize=JOBS_KEPT)
def plain_job(steps: int, shards: int) -> ScenarioJob:
    """Return the job of that many steps and shards, run in one plain process."""
    config = TrainingConfig(steps=steps, shards=shards, sequences_per_shard=1, warmup_steps=2)
    recipe = Recipe(GPT(MODEL), _corpus(), config)
    trainer, store = PlainTrainer(recipe), Store(recipe.model.layout, own_memory)
    digests: list[bytes] = []
    for version in range(steps + 1):
        if version:
            trainer.run_step()
        slot, state = store.slots[0].state, trainer.state
        slot.weights[:], slot.mean[:], slot.square[:] = state.weights, state.mean, state.square
        digests.append(store.digest(0))
    return ScenarioJob(recipe, tuple(digests), store.slots[0].flat.copy())


@lru_cache(maxsize=1)
def _corpus() -> Corpus:
    """Return a small corpus in memory: words drawn from a fixed seed."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 7))) for _ in range(64)]
    text = " ".join(rng.choices(words, k=TEXT_BYTES)).encode()[:TEXT_BYTES]
    text_fd, corpus_fd = os.memfd_create("zbmd-text"), os.memfd_create("zbmd-corpus")
    try:
        os.write(text_fd, text)
        source = Source(Path(f"/proc/self/fd/{text_fd}"), TEXT_BYTES, 0)
        with os.fdopen(os.dup(corpus_fd), "wb") as file:
            write_corpus(file, [source], "", "words of no sense", TEXT_BYTES)
        corpus = Corpus(Path(f"/proc/self/fd/{corpus_fd}"), context=MODEL.context)
        corpus.data = np.array(corpus.data)  # in place of the mapping, which would hold a descriptor
        return corpus
    finally:
        os.close(text_fd)
        os.close(corpus_fd)


class TrainingContents(Contents):
    """The memory of all ranks, and the all-reduces between them."""

    def __init__(self, job: ScenarioJob, simulation: sim.Simulation[Message]) -> None:
        self.job = job
        self._simulation = simulation
        self._rng = simulation.rng("all-reduce")
        self._entered: dict[tuple[int, int], dict[MemberId, dict[Node, Array]]] = {}
        self._results: dict[tuple[int, int], dict[int, Result]] = {}

    def digest_of(self, version: int) -> bytes:
        """See `Contents`."""
        return self.job.digests[version]

    def open(self, member: MemberId) -> Slots:
        """See `Contents`."""
        return TrainingSlots(self, member)

    def enter(self, work: cm.RunStep, member: MemberId, partials: dict[Node, Array]) -> None:
        """Note that a member has its partial sums ready."""
        self._entered.setdefault((work.epoch, work.version), {})[member] = partials

    def total(self, work: cm.RunStep, rank: int) -> Array | None:
        """Return the gradient that the all-reduce gives `rank`; None if a member was lost before it was
        complete.
        """
        key = (work.epoch, work.version)
        if key not in self._results:
            self._results[key] = self._reduce(work, self._entered.pop(key))
        result = self._results[key][rank]
        return result.out if result.outcome is Outcome.COMPLETE else None

    def _reduce(self, work: cm.RunStep, entered: dict[MemberId, dict[Node, Array]]) -> dict[int, Result]:
        shards, members = self.job.recipe.config.shards, sorted(entered, key=lambda member: member.rank)
        request = Request(
            operation=Operation.ALL_REDUCE_SHARDS,
            algorithm="shard_tree",
            n=len(members),
            chunks=len(members),
            shards=shards,
            assignment=assign_to(shards, work.members, work.workers),
        )
        size = self.job.recipe.model.layout.size
        buffers = [
            {
                **{input_buffer(k): entered[m][node] for k, node in enumerate(entered[m])},
                OUT: own_memory(size),
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
        return dict(zip((member.rank for member in members), reduction.run(), strict=True))

    def _lives(self, member: MemberId) -> bool:
        name = f"rank{member.rank}"
        return self._simulation.lives(name) and self._simulation.incarnation(name) == member.incarnation


class TrainingSlots(Slots):
    """The store of one incarnation, and what it does to it."""

    def __init__(self, training: TrainingContents, member: MemberId) -> None:
        self._training, self._member = training, member
        self._recipe = training.job.recipe
        layout = self._recipe.model.layout
        self.store = Store(layout, own_memory)
        self.store.slots[0].state.weights[:] = self._recipe.model.init(self._recipe.config.seed)

    def digest(self, slot: int) -> bytes:
        """See `Slots`."""
        return self.store.digest(slot)

    def tear(self, slot: int) -> None:
        """See `Slots`. Half of it is as it was."""
        flat = self.store.slots[slot].flat
        flat[: len(flat) // 2] += 1.0

    def enter(self, work: cm.RunStep) -> None:
        """See `Slots`. The gradients of all our shards, added up along the tree."""
        self.tear(work.slot)
        shards, layout = self._recipe.config.shards, self._recipe.model.layout
        lo, hi = assign_to(shards, work.members, work.workers)[work.members.index(self._member.rank)]
        plan = AccumulationPlan.of(shards, lo, hi)
        buffers = [own_memory(layout.size) for _ in range(plan.buffers)]
        ids, old = self._recipe.sample_ids(work.version - 1), self.store.slots[1 - work.slot].state
        for leaf in plan.leaves:
            step = work.version - 1
            self._recipe.shard_gradient(old.weights, buffers[leaf.buffer], ids[leaf.shard], step=step)
            plan.perform(leaf.additions, buffers, slice(0, layout.size))
        partials = {node: buffers[plan.partials[node]] for node in shard_tree_nodes(shards, lo, hi)}
        self._training.enter(work, self._member, partials)

    def step(self, work: cm.RunStep) -> bool:
        """See `Slots`."""
        total = self._training.total(work, self._member.rank)
        if total is None:
            return False
        old, new = self.store.slots[1 - work.slot].state, self.store.slots[work.slot].state
        self._recipe.update(old, new, total, step=work.version - 1)
        return True

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """See `Slots`."""
        assert isinstance(source, TrainingSlots)
        self.store.slots[slot].flat[:] = source.store.slots[source_slot].flat

    def recall(self, version: int, slot: int) -> None:
        """See `Slots`. What is preserved has been compared with the plain job's bits."""
        self.store.slots[slot].flat[:] = self._training.job.last


@dataclass(frozen=True)
class TrainingScenario(CommitScenario):
    """As `commit`, with real contents. Kills are drawn from runs of a hash chain, which take as long."""

    name: str = "training"
    description: str = "the job itself, a tiny GPT: every committed version has the bits of a plain process"

    def contents(self, seed: int | str, options: CommitOptions) -> ContentsOf:
        """The training of one of a few recipes."""
        job = plain_job(options.steps, random.Random(f"{seed}/recipe").choice(SHARDS))
        return partial(TrainingContents, job)
