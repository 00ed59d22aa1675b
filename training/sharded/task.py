"""The task of `zbmd train`: a GPT on a mesh, or with its state sharded, trained by a recipe."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.checkpoint.plan import plan_text
from zbmd.training.config import GPTConfig
from zbmd.training.data.corpus import Corpus
from zbmd.training.job.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh, MeshGroups
from zbmd.training.job.results import note_numbers
from zbmd.training.job.task import ResultRow, StepResult, Task, Trainer
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.passes import FusedPasses
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.model.hugging_face import load_gpt2, save_gpt2
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.optim.mixed_precision import computing_dtype, storage_dtype
from zbmd.training.pipeline.part import balanced_cuts, layers_in
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.redundancy.coded.machine import Code
from zbmd.training.redundancy.stamped import StampedSlots, StateName, kept_slots
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.run.journal import report_result
from zbmd.training.sharded.device_trainer import DeviceTrainer, DeviceZeroTrainer, connect_devices
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.redundancy import code_of, redundancy_of
from zbmd.training.sharded.replicated import ReplicatedTrainer
from zbmd.training.sharded.samples import write_sample
from zbmd.training.sharded.stage_of_view import RingRoom
from zbmd.training.sharded.stages import SLOTS, elements_most, measured_costs, shard_layouts, state_elements
from zbmd.training.sharded.trainer import MeshTrainer
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe, learning_rate_of
from zbmd.training.step.reduction import Buckets
from zbmd.training.zero.rank import slot_elements
from zbmd.transport.memory.arena import Arena
from zbmd.transport.native._native import now_ns

HUGGING_FACE_DIRECTORY = "gpt2"
STEPS_TIMED_MAX = 10_000
"""Last steps whose bubbles are in the result."""


class TrainResult(msgspec.Struct, kw_only=True):
    """The result of a finished run; losses in nats per token.

    Of a pipeline: layers: those of each part, in order; bubble: median over steps; bubble_of_times: the
    schedule's, if each computation takes the median of what it took in this run. What `bubble` is above it is
    wake-ups, transfers, and how the times vary.
    """

    steps: int
    mesh: str
    parameters: int
    loss_last: float
    held_out_loss: float
    tokens_per_s: float
    weights_sha256: str
    directory: str
    layers: tuple[int, ...] = ()
    bubble: float | None = None
    bubble_of_times: float | None = None


def weights_sha256(weights: Array) -> str:
    """Return the SHA-256 of the bits of flat float32 weights, padding included, hex."""
    return hashlib.sha256(to_host(weights).data).hexdigest()


def plan_of(options: TrainOptions, config: GPTConfig, corpus: Corpus) -> str:
    """Return the plan of a run; the mesh is not in it, since a run may be resumed on another one."""
    return plan_text(
        config,
        options.training,
        corpus=corpus.header.digest,
        precision=options.precision,
        loss_scale=options.loss_scale,
    )


def shard_elements(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> int:
    """Return the float32 numbers of the largest shard of a state that is sharded."""
    optimizer, dtype = options.training.optimizer, storage_dtype(options.precision)
    return max(slot_elements(one, optimizer, dtype) for one in shard_layouts(config, mesh, options.stages))


def state_bytes(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> int:
    """Return the bytes of the largest state of a rank, of one version."""
    if options.zero:
        return 4 * shard_elements(options, config, mesh)
    dtype, most = storage_dtype(options.precision), elements_most(config, mesh, options.stages)
    return state_elements(most, dtype, options.training.optimizer) * computing_dtype(dtype).itemsize


def code_of_run(options: TrainOptions, config: GPTConfig, mesh: Mesh, *, shrinks: bool) -> Code | None:
    """Return the erasure code of a run, None without one. shrinks: whether views may be smaller."""
    redundancy = redundancy_of(options, mesh, shrinks=shrinks)
    return code_of(redundancy, mesh, state_bytes(options, config, mesh))


class EngineTask(Task[TrainResult]):
    """A recipe as a `Task`. again: this rank is a replacement; fewest: views may have so few ranks.

    executor: computes in the place of numpy.
    """

    def __init__(
        self,
        worker: Worker,
        options: TrainOptions,
        mesh: Mesh,
        config: GPTConfig,
        corpus: Corpus,
        *,
        again: bool,
        fewest: int,
        executor: Executor | None = None,
    ) -> None:
        training = options.training
        self.plan, self.seed = plan_of(options, config, corpus), training.seed
        self.steps, self.windows, self.mesh = training.steps, options.evaluate_windows, mesh
        self.row = ResultRow(training.shards, training.sequences_per_shard)
        self._options, self._config, self._corpus = options, config, corpus
        self._worker, self._again, self._fewest = worker, again, fewest
        self._executor = executor
        self._paths = ""
        """The way in which devices reached each other in the last view."""
        self._shrinks = fewest < mesh.world_size
        self.resizes = self._shrinks and options.recuts(mesh)
        self._stages, self._rings = options.stages, RingRoom()
        self._costs = np.zeros(layers_in(config))
        """Of the layers, if they are divided by what they cost; none is known at first."""
        self._began_ns, self._first_step = now_ns(), 0
        self._bubbles = deque[float](maxlen=STEPS_TIMED_MAX)

    # ---- the trainer

    def state_keys(self, groups: MeshGroups) -> Sequence[int]:
        """See `Task`."""
        return () if self._options.shards_over_all(groups.mesh) else groups.mesh.state_keys()

    def fits(self, ranks: Sequence[int]) -> bool:
        """See `Task`: the mesh may have fewer ranks along `dp`."""
        return self._shrinks and self._fewest <= len(self.mesh.among(ranks))

    def active(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """See `Task`."""
        return self.mesh.among(ranks)

    async def groups(self, world: Group) -> MeshGroups:
        """See `Task`. GPUs that reach each other exchange arrays directly from then on."""
        made = await self._groups_of(world)
        if self._executor is not None:
            paths, before = await connect_devices(made, self._executor), self._paths
            if paths != before and world.rank == 0:
                print(f"between devices: {paths}", file=sys.stderr, flush=True)
            self._paths = paths
        return made

    async def _groups_of(self, world: Group) -> MeshGroups:
        """Return the groups; a state that is sharded over the whole world needs no other one."""
        if self._options.zero and self.mesh.size(DATA_AXIS) == self.mesh.world_size:
            return MeshGroups.along_data(world)
        others = self.mesh.world_size // self.mesh.size(DATA_AXIS)
        always = (self.mesh.sharded_axis,) if self._options.zero else ()
        return await MeshGroups.of(world, self.mesh.along_data(world.size // others), always=always)

    def agree(self, world: Group) -> None:
        """Divide layers as members of earlier views do; in the first one, by what the first rank measures."""
        if not self._options.balance:
            return
        known = world.blocking.all_gather(self._costs)
        first = next((costs for costs in known if costs.any()), None)
        if first is None:
            if world.rank == 0:
                self._costs[:] = measured_costs(self._recipe(GPT(self._config)))
            first = world.blocking.broadcast(self._costs, 0)
        self._costs[:] = first
        parts = self.mesh.size(PIPELINE_AXIS) * self._options.chunks
        cuts = balanced_cuts(self._costs.tolist(), parts)
        self._stages = replace(self._stages, cuts=cuts)

    def _recipe(self, model: GPT) -> Recipe:
        return Recipe(model, self._corpus, self._options.training)

    def trainer(self, groups: MeshGroups) -> Trainer:
        """See `Task`."""
        options, run = self._options, self._executor
        offload = self._file_in(groups.world)
        trainer: MeshTrainer
        if options.zero:
            zero = ZeroTrainer if run is None else partial(DeviceZeroTrainer, executor=run)
            trainer = zero(
                self._recipe(self._model(groups)),
                groups,
                options.zero_options,
                stages=self._stages,
                keep_previous=True,
                offload=offload,
                keep=self._kept_part(groups.world) if self.resizes else self._kept_slots,
                shrinks=self._shrinks,
                rings=self._rings,
                spare=options.spare_gradients,
            )
        else:
            trainer = self._replicated(groups, offload)
        if options.weights is not None:
            trainer.begin_with(load_gpt2(options.weights)[0])
        self._began_ns, self._first_step = now_ns(), trainer.step
        return trainer

    def _replicated(
        self, groups: MeshGroups, offload: Callable[[int], StateFile] | None
    ) -> ReplicatedTrainer:
        """Return the trainer of a state that replicas along `dp` hold, on the CPU or a GPU."""
        options = self._options
        settings = dict[str, Any](
            stages=self._stages,
            dtype=storage_dtype(options.precision),
            arena=None if self._worker.alone else self._arena,
            keep=self._kept_slots,
            overlap=options.overlap,
            loss_scale=options.loss_scale,
            offload=offload,
            begins_later=True,
            largest=self.mesh if self._shrinks else None,
            rings=self._rings,
            spare=options.spare_gradients,
        )
        model, run = self._model(groups), self._executor
        if run is None:
            return ReplicatedTrainer(self._recipe(model), groups, **settings)
        if options.graph == "fused" and self.mesh.size(PIPELINE_AXIS) * self.mesh.size(TENSOR_AXIS) == 1:
            model.whole_step = FusedSteps(model, run, spans=Buckets(model.layout).spans)
        return DeviceTrainer(self._recipe(model), groups, run, **settings)

    def _model(self, groups: MeshGroups) -> GPT:
        xp = np if self._executor is None else DeviceModule(self._executor)
        model = groups.model(self._config, xp=xp, recompute=self._options.recompute)
        if self._executor is not None and self._options.graph == "fused":
            model.fused_units = FusedPasses(model, self._executor)
        return model

    def _file_in(self, world: Group) -> Callable[[int], StateFile] | None:
        """Return a maker of this rank's file, or a predecessor's; None without `--offload`."""
        folder, place, ranks = self._options.offload, world.members.index(self._worker.rank), world.size
        if folder is None:
            return None

        def made(elements: int) -> StateFile:
            job, note = self._worker.job, self.row.numbers
            name = StateName(run=job, place=place, ranks=ranks, elements=elements, note=note)
            if self.resizes:  # what its predecessor had, all read
                return StateFile(folder, name, again=False, made=world.epoch)
            return StateFile(folder, name, again=self._again)

        return made

    def _kept_slots(self, elements: int) -> StampedSlots | None:
        return kept_slots(self._worker, elements, note=note_numbers(self.row))

    def _kept_part(self, world: Group) -> Callable[[int], StampedSlots | None]:
        """Return a maker of memory for this rank's part of a state that is recut."""
        part, note = (world.members.index(self._worker.rank), world.size), note_numbers(self.row)
        return lambda elements: kept_slots(self._worker, elements, note=note, part=part)

    def actors(self, trainer: Trainer) -> ModelActors | None:
        """See `Task`."""
        if not self._options.actors:
            return None
        assert isinstance(trainer, MeshTrainer), "another task's trainer"
        return ModelActors(trainer, trainer.recipe.model, seed=self.seed)

    def copies(self, trainer: Trainer) -> list[Array]:
        """See `Task`."""
        code = code_of_run(self._options, self._config, self.mesh, shrinks=self._shrinks)
        if code is not None:
            return [self._arena.lazy_empty(code.room, np.uint8) for _ in range(SLOTS)]
        if isinstance(trainer, ZeroTrainer):
            if self.resizes and trainer.groups.world.size == 1:
                return []
            mesh = trainer.groups.mesh
            return trainer.own.mirror_copies(shard_elements(self._options, self._config, mesh))
        options, dtype = self._options, storage_dtype(self._options.precision)
        most = elements_most(self._config, self.mesh, self._stages)
        size = state_elements(most, dtype, options.training.optimizer)
        return [self._arena.lazy_empty(size, computing_dtype(dtype)) for _ in range(SLOTS)]

    @property
    def _arena(self) -> Arena:
        return self._worker.segment.arena

    # ---- reports

    @property
    def _tokens_per_step(self) -> int:
        return self._options.training.global_batch * self._config.context

    def metrics(self, done: StepResult) -> Mapping[str, float]:
        """See `Task`."""
        if done.busy_ns:
            self._bubbles.append(done.compute_ns / max(done.busy_ns) - 1.0)
        took_s = max(1e-9, (done.compute_ns + done.waited_ns) / 1e9)
        on_device: dict[str, float] = {}
        if self._executor is not None:
            on_device["launches"], on_device["kernels"] = self._executor.counted(done.version)
        return {
            **on_device,
            "learning_rate": learning_rate_of(self._options.training, done.version - 1),
            "tokens_per_s": self._tokens_per_step / took_s,
            "tokens": float(self._tokens_per_step * done.version),
            "waited_ms": done.waited_ns / 1e6,
        }

    def profiler(self, out: Path) -> Profiler:
        """See `Task`."""
        sequences = self._options.training.sequences_per_shard
        dtype = computing_dtype(storage_dtype(self._options.precision)).name
        every = self._options.profile_ops
        model, run = GPT(self._config), self._executor
        return open_profiler(out, model, sequences=sequences, dtype=dtype, ops_every=every, executor=run)

    def reached(self, trainer: Trainer, *, is_first: bool) -> None:
        """Have the first rank write a sample, if it is due; the others wait for it."""
        every, step = self._options.sample_every, trainer.step
        if not every or step % every:
            return
        assert isinstance(trainer, MeshTrainer), "another task's trainer"
        with spans.SAMPLE_GEN:
            weights = trainer.weights()
            if is_first:
                write_sample(self._options.out, self._config, weights, step=step, seed=self.seed)
            trainer.groups.world.blocking.barrier()

    def finish(
        self, trainer: Trainer, last: StepResult | None, held_out_loss: float, *, is_first: bool
    ) -> TrainResult | None:
        """Save the weights."""
        assert isinstance(trainer, MeshTrainer), "another task's trainer"
        took_s = max(1e-9, (now_ns() - self._began_ns) / 1e9)
        weights = trainer.weights().astype(np.float32)
        pipeline = self.mesh.size(PIPELINE_AXIS) > 1
        of_times = trainer.bubble_of_times() if pipeline else None
        if not is_first:
            return None
        self._save(weights)
        done = (trainer.step - self._first_step) * self._tokens_per_step
        result = TrainResult(
            steps=trainer.step,
            mesh=str(self.mesh),
            parameters=GPT(self._config).layout.parameter_count,
            loss_last=0.0 if last is None else last.loss,
            held_out_loss=held_out_loss,
            tokens_per_s=round(done / took_s, 1),
            weights_sha256=weights_sha256(weights),
            directory=str(self._options.out),
            layers=tuple(map(len, self._stages.cuts_of(self._config, self.mesh.size(PIPELINE_AXIS)))),
            bubble=float(np.median(list(self._bubbles))) if pipeline and self._bubbles else None,
            bubble_of_times=of_times,
        )
        report_result(self._worker, result)
        return result

    def _save(self, weights: Array) -> None:
        out, config = self._options.out, self._config
        save_weights(out / WEIGHTS_NAME, weights, config, step=self.steps)
        if config.family == "gpt2" and config.activation == "gelu":
            save_gpt2(out / HUGGING_FACE_DIRECTORY, weights, config)
