"""ZeRO over a group: the driver of `ZeroStep`. It performs what the machine says, and decides nothing.

Operations of the group run on its data-plane thread, in the machine's order, while this thread computes:
weights are gathered ahead, and gradients reduced behind, the passes. What the machine hears of an operation
it hears between two computations, or when there is nothing to compute.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, assert_never

import numpy as np
from numpy.typing import NDArray

from zbmd.actors.rank.member import Worker
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe, active_probe
from zbmd.training.autograd.tape import Tensor
from zbmd.training.checkpoint.sharded import Piece, SavedState
from zbmd.training.config import TrainingConfig
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.task import StepResult, Trainer
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_group import TensorGroup
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.model_actors.tensor_actor import HeldTensor
from zbmd.training.optim import arrays_of
from zbmd.training.optim.clip import Pieces, TrainingDiverged, clip_scale
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, Storage, attempted, storage_dtype
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.run.journal import captured_machine
from zbmd.training.step.loader import BatchLoader
from zbmd.training.step.memory_estimate import naming_step
from zbmd.training.step.non_finite import NOT_FOUND, describe_first_non_finite
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import ShardSum, gather_pieces
from zbmd.training.step.step_hook import NO_HOOK, VOTE_NUMBERS, StepHook
from zbmd.training.zero import machine as zm
from zbmd.training.zero.layout import Accountant, MemoryKind, ShardLayout
from zbmd.training.zero.machine import ZERO_STEP
from zbmd.training.zero.rank import ZeroRank, slot_elements
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

STAGES: Final = (1, 2, 3)
RANKS_NAMED_MAX: Final = 4
ARENA_SLACK: Final = 1.25
"""Holes between arrays that come and go."""
ARENA_ROOM_BYTES: Final = 8 << 20
"""For what the group's operations stage."""

FORWARD_POINT = faults.declare("zero.forward", "before a unit is computed forwards")
BACKWARD_POINT = faults.declare("zero.backward", "before a unit is computed backwards")
NORM_POINT = faults.declare("zero.norm", "when all gradients are reduced, before the norm is shared")
UPDATE_POINT = faults.declare("zero.update", "before the shard is updated in place")
UPDATED_POINT = faults.declare("zero.updated", "when the shard is updated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """How the state is sharded. prefetch: units whose weights are gathered ahead, with stage 3.

    loss_scale: what float16 begins with.

    Raises `UserError` for a stage or storage that there is not.
    """

    stage: int = 3
    storage: Storage = "float32"
    prefetch: int = 1
    loss_scale: float = SCALE_FIRST

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise UserError(f"unknown ZeRO stage {self.stage}: use 1, 2 or 3.")
        if not 1 <= self.prefetch <= zm.PREFETCH_MAX:
            raise UserError(f"prefetch is {self.prefetch}: it must be 1 to {zm.PREFETCH_MAX}.")
        LossScale.of(storage_dtype(self.storage), first=self.loss_scale)


def shards_of(model: GPT, ranks: int) -> ShardLayout:
    """How `model` is cut for `ranks` ranks."""
    return ShardLayout.of(model.layout, model.units, ranks=ranks)


def arena_bytes_needed(
    model: GPT,
    config: TrainingConfig,
    options: ZeroOptions,
    *,
    ranks: int,
    copies: int = 0,
    offloaded: bool = False,
) -> int:
    """Bytes of arena that a rank needs, with room for `copies` of shards beside its own, unless in files."""
    shards, sums = shards_of(model, ranks), ShardSum.of(config.shards, ranks)
    dtype, arrays = storage_dtype(options.storage), len(arrays_of(config.optimizer))
    itemsize, scale_bytes = dtype.itemsize, 4 * LossScale.of(dtype).numbers
    whole = ranks * sum(unit.part for unit in shards.units)
    largest = ranks * max(unit.part for unit in shards.units)
    weights = shards.shard_size if options.stage == 3 else whole
    grads = whole if options.stage == 1 else shards.shard_size
    buffers = max(max(1, sums.plan(rank).buffers) for rank in range(ranks))
    reducing = (zm.REDUCING_MAX + 1) * itemsize * (buffers + 2 * sums.width)
    gathered = (options.prefetch + 1) * itemsize
    held = 0 if offloaded else 1 + copies
    state_bytes = held * (4 * arrays * shards.shard_size + scale_bytes) + itemsize * (weights + grads)
    return int(ARENA_SLACK * (state_bytes + (reducing + gathered) * largest)) + ARENA_ROOM_BYTES


class ZeroTrainer(Trainer):
    """Trains `recipe` on all members of `group`, its state shared out. For one thread, not the loop's.

    All members make it and call its methods together. `worker` was joined with an arena of at least
    `arena_bytes_needed`. keep_previous: see `ZeroRank`; offload: makes the file of so many float32
    numbers.
    """

    def __init__(
        self,
        worker: Worker,
        group: Group,
        recipe: Recipe,
        options: ZeroOptions,
        *,
        keep_previous: bool = False,
        offload: Callable[[int], StateFile] | None = None,
    ) -> None:
        self.recipe, self.options, self.group = recipe, options, group
        place, ranks = group.members.index(worker.rank), group.size
        arena = worker.segment.arena
        self.memory = Accountant(
            make=arena.empty, make_zeros=arena.zeros, make_lazy=arena.lazy_zeros, ready=arena.ready
        )
        self.sums, shards = ShardSum.of(recipe.config.shards, ranks), shards_of(recipe.model, ranks)
        elements = slot_elements(shards, recipe.config.optimizer, storage_dtype(options.storage))
        self.file = None if offload is None else offload(elements)
        self.own = ZeroRank(
            recipe.model,
            shards,
            self.sums,
            rank=place,
            stage=options.stage,
            storage=options.storage,
            optimizer=recipe.config.optimizer,
            seed=recipe.config.seed,
            memory=self.memory,
            keep_previous=keep_previous,
            loss_scale=options.loss_scale,
            offload=self.file,
            gather=lambda piece: gather_pieces(self._update_group, piece),
        )
        self._update_group: TensorGroup = group
        """What an optimizer gathers whole matrices in."""
        self.step = 0
        units = len(self.own.shards.units)
        config = {"stage": options.stage, "units": units, "prefetch": options.prefetch}
        self._machine = captured_machine(worker, ZERO_STEP, "zero", zm.ZeroStep(**config), config)
        self._pending: deque[tuple[Future[Any], Callable[[Any], zm.Event]]] = deque()
        self._watch: StepHook = NO_HOOK
        self._told = self._voted = False
        self._usable: bool | None = None
        """Whether the attempt under way came to an end that changed the state; None: it is under way."""
        self._scale = self.own.initial_scale
        """Loss scale of the attempt under way, with the skips before it."""
        self._norm, self._began_ns = 0.0, 0
        self._losses: dict[int, float] = {}
        self._samples: dict[int, tuple[int, ...]] = {}
        self._consumed: Mapping[int, NDArray[np.int64]] = {}
        """Ids of the samples that this rank consumed in the last attempt, by logical shard."""
        self._loader = BatchLoader(recipe)
        self._pieces: list[Pieces] = []
        """Of all ranks' gradients, of the last attempt."""
        self._lengths = self.own.pieces_lengths()

    # ---- steps

    def run_step(self, watch: StepHook = NO_HOOK) -> StepResult:
        """See `Trainer`."""
        self._watch, self._told, self._voted, self._began_ns = watch, False, False, now_ns()
        with naming_step(self.group.members[self.group.rank], self.step):
            try:
                return self._run_step()
            except BaseException as error:
                self._give_up(f"{type(error).__name__}: {error}")
                raise

    def _run_step(self) -> StepResult:
        if self.options.stage < 3:  # the last step ended with weights that all ranks have updated
            self._tell()
        try:
            attempted(self.own.loss_scale, self._attempt)
        except TrainingDiverged as error:
            raise self._named(error) from None
        return self._result()

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        """`error` with where it began, on all ranks alike: all is computed once more, and looked at."""
        watching, step, known = NonFiniteProbe(), self.step, self._known_of_attempt()
        self.own.look_at_weights(watching)
        otherwise = NOT_FOUND
        with watching.on(), contextlib.suppress(TrainingDiverged):
            self._attempt(self._scale)
            otherwise = (
                f"It did not come again when the step was computed once more. The first time {known}. "
                "The same numbers give the same bits, so look for a processor or memory that errs there."
            )
        began = describe_first_non_finite(self.group, self.recipe.model, watching.first, otherwise=otherwise)
        return TrainingDiverged(f"step {step}: {error} {began}")

    def _known_of_attempt(self) -> str:
        """Describe an attempt whose norm was not finite, the same on all ranks."""
        bad = {shard for shard, loss in self._losses.items() if not math.isfinite(loss)}
        ranks = [
            member
            for place, member in enumerate(self.group.members)
            if bad & {leaf.shard for leaf in self.sums.plan(place).leaves}
        ]
        if bad:
            return (
                f"the losses that {_ranks(ranks)} computed were not finite, of logical shard {min(bad)} first"
            )
        first = self.own.not_finite(self._pieces)
        if first is None:
            return "all losses and all parts of the gradient were finite, and its norm was not"
        unit, place = first
        name = self.recipe.model.unit_names[unit]
        return (
            "the losses of all ranks were finite, and the summed gradient was not: of "
            f"{name} first, in the part of {_ranks([self.group.members[place]])}"
        )

    def _attempt(self, scale: LossScale) -> float:
        """Do the step, or, if its gradients overflow, nothing; the norm, times `scale`.

        Raises `TrainingDiverged` for a norm that is not finite.
        """
        self._scale, self._usable = scale, None
        self._take_batches(scale.scale)
        if not self._drive(deque(self._handle(zm.Begin()))):
            raise TrainingDiverged(
                "the gradient's norm is not finite: the training diverged. Lower the learning rate, or clip "
                "harder."
            )
        return self._norm

    def _drive(self, actions: deque[zm.Action]) -> bool:
        """Perform `actions`, and what follows, until the attempt has ended; whether it changed the state."""
        while self._usable is None:
            event = self._perform(actions.popleft()) if actions else self._heard(wait_for_it=True)
            while event is not None:
                actions += self._handle(event)
                event = self._heard(wait_for_it=False)
        return self._usable

    def _take_batches(self, loss_scale: float) -> None:
        loaded = self._loader.load(self.step, self.own.leaves)
        self._consumed = loaded.samples
        self.own.begin(loaded.batches, loss_scale=loss_scale)

    def _handle(self, event: zm.Event) -> list[zm.Action]:
        actions = self._machine.handle(event, now_ns=now_ns())
        self._machine.check_invariants()
        return actions

    def _perform(self, action: zm.Action) -> zm.Event | None:
        """Do it; the event it ends in if it is done, else None."""
        match action:
            case zm.Gather(unit=unit):
                self._gather(unit)
            case zm.Reduce(unit=unit):
                self._reduce(unit)
            case zm.ShareNorm():
                self._share_norm()
            case zm.Release(unit=unit):
                self.own.release(unit)
            case zm.Forward(unit=unit):
                faults.hit(FORWARD_POINT)
                self.own.forward(unit)
                return zm.Computed(unit=unit)
            case zm.Backward(unit=unit):
                faults.hit(BACKWARD_POINT)
                self.own.backward(unit)
                return zm.Computed(unit=unit)
            case zm.Update():
                self._update()
                return zm.Updated()
            case zm.Finished(skipped=skipped):
                self._usable = not skipped
            case zm.Abandon(units=units):
                self.own.abandon(units)
            case _:
                assert_never(action)
        return None

    def _heard(self, *, wait_for_it: bool) -> zm.Event | None:
        """The end of the oldest operation under way; None if it has not ended, unless `wait_for_it`."""
        if not self._pending or not (wait_for_it or self._pending[0][0].done()):
            assert not wait_for_it, "nothing is under way, and the step is not done"
            return None
        future, take = self._pending[0]
        with spans.COMM:
            result = future.result()
        self._pending.popleft()
        return take(result)

    def _submit(self, operation: Callable[[Communicator], Any], take: Callable[[Any], zm.Event]) -> None:
        self._pending.append((self.group.submit(operation), take))

    def _give_up(self, reason: str) -> None:
        """Drain what is under way, and drop the step: others wait for us no longer."""
        self.group.abort()
        wait([future for future, _ in self._pending])
        self._pending.clear()
        for action in self._handle(zm.Lost(reason=reason)):
            self._perform(action)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._watch.all_hold(self.step)

    # ---- operations of the group

    def _gather(self, unit: int) -> None:
        part, end_ns = self.own.part(unit), self.group.deadline_ns()
        out = self.own.room(unit).reshape(self.group.size, len(part))

        def gathered(_: Any) -> zm.Event:
            self._tell()
            watching = active_probe()
            if watching is not None:
                self.own.look_at_gathered(watching, unit)
            return zm.Gathered(unit=unit)

        self._submit(lambda c: c.all_gather(part, out, deadline_ns=end_ns), gathered)

    def _reduce(self, unit: int) -> None:
        ranks, end_ns = self.group.size, self.group.deadline_ns()
        sent = [array.reshape(ranks, -1) for array in self.own.outgoing(unit)]
        received = [self.memory.take(MemoryKind.WORKING, array.size, array.dtype) for array in sent]

        def operation(c: Communicator) -> Array:
            blocks = [array.reshape(ranks, -1) for array in received]
            for array, into in zip(sent, blocks, strict=True):
                c.all_to_all(array, into, deadline_ns=end_ns)
            return self.sums.fold(blocks)

        def reduced(total: Array) -> zm.Event:
            self.own.take_reduced(unit, total)
            for array in received:
                self.memory.free(MemoryKind.WORKING, array)
            return zm.Reduced(unit=unit)

        self._submit(operation, reduced)

    def _share_norm(self) -> None:
        """Share the vote, the losses and samples of shards and the pieces of the norm, in one operation."""
        faults.hit(NORM_POINT)
        each, room = self.recipe.config.sequences_per_shard, self._shard_room()
        head, end_ns = VOTE_NUMBERS + room * (1 + each), self.group.deadline_ns()
        mine = np.zeros(head + max(self._lengths))
        with spans.COMM:  # it waits for the copy of a shard
            if not self._voted:  # an attempt before this one has told it
                mine[:VOTE_NUMBERS] = self._watch.vote().view(np.float64)
        for at, shard in enumerate(self.own.leaves):
            mine[VOTE_NUMBERS + at] = self.own.losses[shard]
            mine[VOTE_NUMBERS + room + at * each :][:each] = self._consumed[shard]
        with spans.GRAD_CLIP:
            pieces = self.own.norm_pieces()
        mine[head:][: len(pieces)] = pieces
        self._submit(lambda c: c.all_gather(mine, deadline_ns=end_ns), self._norm_shared)

    def _shard_room(self) -> int:
        """Logical shards of the rank that has most."""
        return -(-self.recipe.config.shards // self.group.size)

    def _norm_shared(self, every: NDArray[np.float64]) -> zm.Event:
        if not self._voted:
            self._voted = True
            self._watch.voted([row[:VOTE_NUMBERS].view(np.uint64) for row in every])
        each, room = self.recipe.config.sequences_per_shard, self._shard_room()
        samples, at = VOTE_NUMBERS + room, VOTE_NUMBERS + room * (1 + each)
        self._losses, self._samples = {}, {}
        for rank, row in enumerate(every):
            for number, leaf in enumerate(self.sums.plan(rank).leaves):
                self._losses[leaf.shard] = float(row[VOTE_NUMBERS + number])
                ids = row[samples + number * each :][:each].astype(np.int64)
                self._samples[leaf.shard] = tuple(ids.tolist())
        self._pieces = [row[at : at + length] for row, length in zip(every, self._lengths, strict=True)]
        try:
            with spans.GRAD_CLIP:
                self._norm = self.own.norm(self._pieces)
        except TrainingDiverged:
            return zm.NormShared(usable=False)
        return zm.NormShared(usable=True)

    def _update(self) -> None:
        faults.hit(UPDATE_POINT)
        config, step, scale = self.recipe.config, self.step, self._scale.scale
        with spans.OPTIMIZER:
            self.own.update(
                step=step,
                learning_rate=self.recipe.learning_rate(step),
                grad_scale=clip_scale(self._norm / scale, limit=config.clip_norm) / scale,
                loss_scale=self._scale.after(finite=True),
            )
        self.step += 1
        self._watch.updated(self._result())
        faults.hit(UPDATED_POINT)

    def _result(self) -> StepResult:
        return StepResult(
            version=self.step,
            losses=tuple(self._losses[shard] for shard in sorted(self._losses)),
            samples=tuple(self._samples[shard] for shard in sorted(self._samples)),
            grad_norm=self._norm / self._scale.scale,
            loss_scale=self._scale.scale,
            skipped=self._scale.skipped,
            compute_ns=now_ns() - self._began_ns,
        )

    # ---- between steps

    @property
    def shard(self) -> ZeroRank:
        """See `Trainer`."""
        return self.own

    @property
    def held_most(self) -> None:
        """See `Trainer`: activations of units are not counted."""

    @property
    def scale(self) -> tuple[float, ...]:
        """See `Trainer`."""
        return self.own.loss_scale.values

    def begin_with(self, weights: Array) -> None:
        """Begin with the whole model's weights, not with the seed's."""
        self.own.begin_with(weights)

    def begin_from(self, saved: SavedState) -> None:
        """Begin with the state in a checkpoint, of any mesh; go on with `enter`."""
        self.own.begin_from(saved)
        self.step = saved.version

    def enter(self, groups: MeshGroups, version: int) -> None:
        """See `Trainer`. The view has as many members; under stages 1 and 2 weights are gathered."""
        self.group, self.step, actors = groups.world, version, self.own.actors
        self._update_group = self.group if actors is None else actors.group(self.group)
        self.own.round_weights()
        for unit in range(len(self.own.shards.units) if self.options.stage < 3 else 0):
            self._gather_all(self.own.part(unit), self.own.room(unit))

    def _gather_all(self, part: Array, room: Array) -> None:
        with spans.COMM:
            self.group.blocking.all_gather(part, out=room.reshape(self.group.size, len(part)))

    def held_out_loss(self, *, windows_max: int) -> float:
        """See `Trainer`. Ranks share the windows, and gather the masters of a unit at a time."""
        recipe, own, ranks = self.recipe, self.own, self.group.size
        chunks, masters = recipe.evaluation_chunks(windows_max), own.state.weights
        totals = np.zeros(len(chunks))
        for start in range(0, len(chunks), ranks):
            mine, x = range(start + own.rank, len(chunks))[:1], Tensor(np.zeros(0))
            batches = [
                recipe.model.batch(recipe.corpus.windows(chunks[at]), global_batch=len(chunks[at]))
                for at in mine
            ]
            for number, unit in enumerate(own.shards.units):
                whole = np.empty(ranks * unit.part, np.float32)
                self._gather_all(np.ascontiguousarray(masters[unit.in_shard]), whole)
                for batch in batches:
                    x = own.evaluate(number, whole, x, batch)
            for at in mine:
                totals[at] = float(x.data) * len(chunks[at])
        every = self.group.blocking.all_gather(totals)
        found = [float(every[number % ranks][number]) for number in range(len(chunks))]
        return sum(found) / sum(map(len, chunks))

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `Trainer`."""
        yield from self.own.tensors(version)

    def supervised(self, actors: ModelActors) -> None:
        """See `Trainer`."""
        self.own.actors = actors

    def pieces(self) -> list[Piece]:
        """See `Trainer`."""
        return self.own.pieces()

    def close(self, *, gave_up: bool = False) -> None:
        """See `Trainer`: nothing is held of the neighbours between steps."""
        self._loader.close()

    def weights(self) -> Array:
        """The masters of all ranks, (layout.size,) float32; all ranks together."""
        mine = np.ascontiguousarray(self.own.state.weights)
        every = self.group.blocking.all_gather(mine)
        return self.own.shards.whole(list(every))


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: the first few by number."""
    named = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = len(ranks) - RANKS_NAMED_MAX
    return f"rank{'s' * (len(ranks) > 1)} {named}{f' and {more} more' if more > 0 else ''}"
