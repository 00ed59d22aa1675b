"""The data-parallel training step as a transactional workload (see `zbmd.collectives.commit.driver`).

A rank computes the gradients of its logical shards, combines them in tree order, and sends each bucket as
soon as the backward pass of its last shard has made it final. The sum has the same bits for every number of
ranks, and so has the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.algorithms.shard_tree import assign_shards, assign_to
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.driver import Cancellation, StepOutcome
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.config import TrainingConfig
from zbmd.training.optim import arrays_of
from zbmd.training.optim.clip import TrainingDiverged, non_finite
from zbmd.training.profiler.profiler import Profiler
from zbmd.training.redundancy.pull import FETCH_ELEMENTS, open_state, pull
from zbmd.training.run.journal import Journal
from zbmd.training.run.ledger import VotePart
from zbmd.training.step.accumulate import AccumulationPlan, Buckets
from zbmd.training.step.memory_estimate import naming_step
from zbmd.training.step.non_finite import bad_gradient, bad_weights, describe_first_non_finite
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import ShardReduction
from zbmd.training.step.two_slot_store import Store
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.memory.segment import PeerMemory
from zbmd.transport.native._native import now_ns

AHEAD_NS = 20_000_000
"""If a step takes longer, the samples of the next are drawn half-way, when the event loop is idle."""

HELD_OUT_WINDOWS = 96
"""Held-out windows evaluated during training, all ranks together."""

STEP_BEGIN = faults.declare("step.begin", "before anything of a step is computed")
STEP_BACKWARD = faults.declare("step.backward", "in the backward pass, before a bucket is sent on its way")
STEP_REDUCE = faults.declare("step.reduce", "when all buckets are on their way")
STEP_UPDATE = faults.declare("step.update", "before the optimizer writes the new version")
STEP_PREPARED = faults.declare("step.prepared", "when the new version is prepared and not yet voted for")
FETCH_BEGIN = faults.declare("fetch.begin", "before a pull of the state")
FETCH_MIDDLE = faults.declare("fetch.middle", "half-way through a pull")
FETCH_END = faults.declare("fetch.end", "when a pull is complete and not yet adopted")
RECALL_BEGIN = faults.declare("recall.begin", "before it looks for the preserved last version")


def arena_bytes_needed(layout: ParameterLayout, config: TrainingConfig) -> int:
    """Return the arena bytes that a rank needs, for any number of ranks: the store, gradients, partial
    sums."""
    shards, arrays = config.shards, len(arrays_of(config.optimizer))
    buffers = AccumulationPlan.of(shards, 0, shards).buffers
    flat_bytes = layout.size * np.dtype(np.float32).itemsize
    return Store.nbytes(layout, arrays=arrays) + (buffers + 2) * flat_bytes


def _awake() -> None:
    """Do nothing: the call wakes the loop."""


class _Rehearsed(Exception):
    """The other ranks are done: no time is left for a warm-up."""


class TrainingWorkload:
    """Trains on `worker`, with the state in `store`; `journal` records what is committed."""

    def __init__(
        self,
        worker: Worker,
        recipe: Recipe,
        store: Store,
        journal: Journal,
        profiler: Profiler,
        *,
        evaluate_every: int,
        before_step: Callable[[int], None] | None = None,
    ) -> None:
        self.worker = worker
        self._arena = worker.segment.arena
        self.recipe = recipe
        self.store = store
        self.journal = journal
        self.profiler = profiler
        self._prepared_ns = 0
        """When the last step was ready for its vote."""
        self._took_ns = 0
        """The duration of the last step up to then."""
        self._evaluate_every = evaluate_every
        self._before_step = before_step
        self._buckets = Buckets(store.layout)
        self._buffers: list[Array] = []
        self._total: Array = self._arena.lazy_zeros(store.layout.size)
        self._ahead: tuple[int, np.ndarray] | None = None
        """The next step, and its samples."""

    def handle(self) -> bytes:
        """Return where peers read the slots."""
        regions = self.worker.segment.regions
        handles = [regions.register(slot.flat) for slot in self.store.slots]
        return msgspec.msgpack.encode(handles)

    # ---- on the compute thread

    def run_step(self, work: cm.RunStep, group: Group, cancellation: Cancellation) -> StepOutcome:
        """Compute version `work.version` into `work.slot`; see `Workload`."""
        began_ns = now_ns()
        self.profiler.follow(group)
        self.profiler.begin_step(work.version)
        with self.profiler.recording(), naming_step(self.worker.rank, work.version - 1):
            outcome = self._run_step(work, group, cancellation)
        self._prepared_ns = now_ns()
        self._took_ns = self._prepared_ns - began_ns
        return outcome

    def _run_step(self, work: cm.RunStep, group: Group, cancellation: Cancellation) -> StepOutcome:
        faults.hit(STEP_BEGIN)
        step, shards = work.version - 1, self.recipe.config.shards
        assignment = assign_to(shards, work.members, work.workers)
        plan = AccumulationPlan.of(shards, *assignment[work.members.index(self.worker.rank)])
        self._arena.ready(self._total)
        reduction = ShardReduction(group, plan, assignment, self._buffers_for(plan), self._total)
        ids = self._samples_of(step)
        held_out = self._evaluate(work)
        try:
            losses = {
                leaf.shard: self._run_leaf(index, step, ids[leaf.shard], reduction, cancellation)
                for index, leaf in enumerate(plan.leaves)
            }
            if not plan.leaves:
                for span in self._buckets.spans:
                    reduction.submit(span)
                self._rehearse(work, ids, reduction, cancellation)
            faults.hit(STEP_REDUCE)
            reduction.finish()
        finally:
            reduction.drain()
        cancellation.check()
        faults.hit(STEP_UPDATE)
        self._arena.ready(self.store.slots[work.slot].flat)
        old, new = self.store.slots[1 - work.slot].state, self.store.slots[work.slot].state
        try:
            norm = self.recipe.update(old, new, reduction.total, step=step)
        except TrainingDiverged as error:
            began = self._where_it_began(group, reduction, ids, step, cancellation)
            raise TrainingDiverged(f"{error} {began}") from None
        part = VotePart(
            shards={shard: tuple(ids[shard].tolist()) for shard in losses},
            losses=losses,
            grad_norm=norm,
            held_out=held_out,
        )
        # A core that has slept for long takes 0.1 ms to wake up: have the loop's do so meanwhile.
        self.worker.system.loop.call_soon_threadsafe(_awake)
        with spans.DIGEST:
            digest = self.store.digest(work.slot)
        faults.hit(STEP_PREPARED)
        return StepOutcome(digest, msgspec.msgpack.encode(part))

    def _samples_of(self, step: int) -> np.ndarray:
        ahead = self._ahead
        return ahead[1] if ahead is not None and ahead[0] == step else self.recipe.sample_ids(step)

    def _where_it_began(
        self,
        group: Group,
        reduction: ShardReduction,
        ids: np.ndarray,
        step: int,
        cancellation: Cancellation,
    ) -> str:
        """Describe where the first non-finite value arose; called by all ranks together.

        All ranks have the same bits of the sum, so they agree to come here. Each computes its shards again
        with a probe.
        """
        model, plan, watching = self.recipe.model, reduction.plan, NonFiniteProbe()
        partials = [reduction.buffers[place] for place in plan.partials.values()]
        gradient = bad_gradient([non_finite(model.layout, grads, xp=np) for grads in partials], model)
        weights = self.store.current.state.weights
        watching.first = bad_weights(model.layout, weights, model)
        with watching.on():
            for leaf in plan.leaves:
                cancellation.check()
                grads = reduction.buffers[leaf.buffer]
                self.recipe.shard_gradient(weights, grads, ids[leaf.shard], step=step)
        return describe_first_non_finite(group, model, watching.first or gradient)

    def _run_leaf(
        self, index: int, step: int, ids: np.ndarray, reduction: ShardReduction, cancellation: Cancellation
    ) -> float:
        """Compute one shard; after the last one, submit each bucket as it becomes final.

        A rank that is alone submits nothing. Additions during the backward pass would evict its caches then.
        """
        cancellation.check()
        leaf, last = reduction.plan.leaves[index], index == len(reduction.plan.leaves) - 1
        hands_over, buffers = last and not reduction.is_alone, reduction.buffers
        self._buckets.begin()

        def send(parameter: int) -> None:
            cancellation.check()
            span = self._buckets.ready(parameter)
            if span is not None:
                faults.hit(STEP_BACKWARD)
                AccumulationPlan.perform(leaf.additions, buffers, span)
                reduction.submit(span)

        weights = self.store.current.state.weights
        on_grad_ready = send if hands_over else cancellation.check_between
        grads = buffers[leaf.buffer]
        loss = self.recipe.shard_gradient(weights, grads, ids, step=step, on_grad_ready=on_grad_ready)
        if not hands_over:
            everything = slice(0, self.recipe.model.layout.size)
            AccumulationPlan.perform(leaf.additions, buffers, everything)
        return loss

    def _rehearse(
        self,
        work: cm.RunStep,
        ids: np.ndarray,
        reduction: ShardReduction,
        cancellation: Cancellation,
    ) -> None:
        """Compute a future shard without using the result, while other ranks compute theirs, to warm up."""
        shards = self.recipe.config.shards
        lo, hi = assign_shards(shards, len(work.members))[work.members.index(self.worker.rank)]
        if lo == hi:
            return
        plan = AccumulationPlan.of(shards, lo, hi)
        leaf, weights = plan.leaves[0], self.store.current.state.weights

        def check(_: int) -> None:
            cancellation.check()
            if reduction.done:
                raise _Rehearsed

        grads = self._buffers_for(plan)[leaf.buffer]
        with contextlib.suppress(_Rehearsed):
            self.recipe.shard_gradient(
                weights, grads, ids[leaf.shard], step=work.version - 1, on_grad_ready=check
            )

    def _buffers_for(self, plan: AccumulationPlan) -> list[Array]:
        while len(self._buffers) < plan.buffers:
            self._buffers.append(self._arena.zeros(self.recipe.model.layout.size))
        return self._buffers

    def _evaluate(self, work: cm.RunStep) -> tuple[float, int]:
        """Return this rank's part of the held-out loss of the committed version, on some steps."""
        if self._evaluate_every == 0 or (work.version - 1) % self._evaluate_every:
            return (0.0, 0)
        index, size = work.members.index(self.worker.rank), len(work.members)
        ids = self.recipe.corpus.evaluation_ids(HELD_OUT_WINDOWS)[index::size]
        if len(ids) == 0:
            return (0.0, 0)
        weights = self.store.current.state.weights
        with spans.EVALUATE:
            loss = self.recipe.model.loss(weights, self.recipe.corpus.windows(ids))
        return (loss * len(ids), len(ids))

    def fetch(self, work: cm.Fetch, cancellation: Cancellation) -> bytes:
        """Pull a version from a peer's slot into `work.slot`; see `Workload`."""
        with self.profiler.recording(), spans.COMM:
            return self._fetch(work, cancellation)

    def _fetch(self, work: cm.Fetch, cancellation: Cancellation) -> bytes:
        faults.hit(FETCH_BEGIN)
        target = self.store.slots[work.slot].flat
        region, memory = self._source(work, target.nbytes)
        self._arena.want(target)
        for start in range(0, len(target), FETCH_ELEMENTS):
            cancellation.check()
            into = target[start : start + FETCH_ELEMENTS]
            self._arena.ready(into)
            pull(region, memory, into, start * target.itemsize, cancellation, source=work.source)
            if start <= len(target) // 2 < start + FETCH_ELEMENTS:
                faults.hit(FETCH_MIDDLE)
        digest = self.store.digest(work.slot)
        faults.hit(FETCH_END)
        return digest

    def _source(self, work: cm.Fetch, nbytes: int) -> tuple[RemoteRegion, PeerMemory]:
        """Return the peer's slot that `work` names, which must have `nbytes`, and the peer's memory."""
        peer = self.worker.peers.get(work.source)
        if peer is None:
            raise RemoteProtocolError(f"cannot read from rank {work.source}: it is not a peer")
        own, memory = self.worker.segment, peer.memory
        found = open_state(work.handle, work.source_slot, memory, own, rank=work.source, nbytes=nbytes)
        return found, memory

    def recall(self, work: cm.Recall, cancellation: Cancellation) -> bytes | None:
        """Read the last checkpoint into `work.slot` if it holds the last version; see `Workload`."""
        faults.hit(RECALL_BEGIN)
        self._arena.ready(self.store.slots[work.slot].flat)
        if not self.journal.read_preserved(work.version, self.store.slots[work.slot]):
            return None
        cancellation.check()
        return self.store.digest(work.slot)

    # ---- on the event loop

    async def before_step(self, work: cm.RunStep) -> None:
        """Call the hook of the job, if any, and schedule drawing the next step's samples."""
        if self._before_step is not None:
            self._before_step(work.version)
        if self._took_ns > AHEAD_NS:
            self.worker.system.loop.call_later(self._took_ns / 2e9, self._look_ahead, work.version)

    def _look_ahead(self, step: int) -> None:
        if step < self.recipe.config.steps:
            self._ahead = step, self.recipe.sample_ids(step)

    async def epoch_installed(self, epoch: int, members: tuple[int, ...], *, whole: bool) -> None:
        """Let the journal write what the last writer may not have lived to write."""
        await self.journal.epoch_installed(epoch, members, whole=whole)

    async def committed(self, commit: cm.Commit, members: tuple[int, ...]) -> None:
        """Swap the slots and write the record."""
        self.profiler.add(spans.COMM, self._prepared_ns, now_ns())
        await self._commit(commit.version, commit.slot)
        began_ns = now_ns()
        await self.journal.committed(commit, members, self.store.current)
        self.profiler.add(spans.CHECKPOINT, began_ns, now_ns())

    async def _commit(self, version: int, slot: int) -> None:
        self.store.commit(slot, version=version)

    async def adopted(self, adopted: cm.Adopted) -> None:
        """Swap the slots: the pulled version is ours."""
        await self._commit(adopted.version, adopted.slot)
        self.journal.adopted(adopted)

    async def preserve(self, version: int) -> None:
        """Write the last checkpoint and wait until it is durable."""
        began_ns = now_ns()
        await self.journal.preserve(version, self.store.current)
        self.profiler.add(spans.CHECKPOINT, began_ns, now_ns())
