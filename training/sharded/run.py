"""A recipe on this rank: data, model, steps, evaluation, checkpoints and records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import INBOX_BYTES_DEFAULT, Worker, join
from zbmd.collectives.commit.driver import StepFailed
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.plan import plan_text
from zbmd.training.checkpoint.sharded import checkpoint_in, open_state, require_state, write_shards
from zbmd.training.config import GPTConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.data.token_corpus import TokenCorpus, prepare_tokens
from zbmd.training.model.gpt import GPT
from zbmd.training.model.hugging_face import load_gpt2, save_gpt2
from zbmd.training.model.tensor_parallel import PartOfGPT
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import storage_dtype
from zbmd.training.pipeline.program import Shape
from zbmd.training.pipeline.schedules import schedule_named
from zbmd.training.profiler.lines import StepLine
from zbmd.training.redundancy.interface import Redundancy
from zbmd.training.redundancy.state_file import StateFile, StateName, require_folder
from zbmd.training.replicated.job import weights_sha256
from zbmd.training.run.journal import report_result
from zbmd.training.run.repeated_oom import raise_for
from zbmd.training.sharded.job import MeshJob, MeshTask
from zbmd.training.sharded.mesh import Mesh, MeshGroups, require_axes
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.records import Records, require_board
from zbmd.training.sharded.stages import (
    SLOTS,
    RankBytes,
    bytes_needed,
    elements_most,
    state_elements,
)
from zbmd.training.sharded.trainer import MeshStep, MeshTrainer
from zbmd.training.step.memory_estimate import (
    RankMemory,
    StepOutOfMemory,
    activation_bytes,
    require_memory,
    too_large,
)
from zbmd.training.step.recipe import Recipe, learning_rate_of
from zbmd.transport.errors import OutOfMemory, UserError
from zbmd.transport.native._native import now_ns

TELL_EVERY_STEPS = 10
ARENA_SPARE_BYTES = 4 << 20
HUGGING_FACE_DIRECTORY = "gpt2"


class TrainResult(msgspec.Struct, kw_only=True):
    """The result of a finished run; losses in nats per token."""

    steps: int
    mesh: str
    parameters: int
    loss_last: float
    held_out_loss: float
    tokens_per_s: float
    weights_sha256: str
    directory: str


def prepare(options: TrainOptions, world_size: int) -> tuple[Mesh, GPTConfig, Corpus]:
    """Return the mesh, the model with its vocabulary, and the data of a recipe, prepared if it is absent.

    Raises `UserError` for settings that do not fit each other, the world, or the data.
    """
    options.check()
    mesh = Mesh.parse(options.mesh, world_size)
    require_axes(mesh)
    if options.tensorboard:
        require_board()
    model = options.model
    if options.weights is not None:
        model = load_gpt2(options.weights)[1]
    if options.tokens == "bpe":
        tokenizer = prepare_tokens(
            options.data,
            options.out,
            vocabulary=options.vocabulary,
            context=model.context,
            tokenizer=options.tokenizer,
        )
        corpus: Corpus = TokenCorpus(options.out, context=model.context)
        vocabulary = tokenizer.vocabulary
    else:
        path = prepare_corpus(options.data, options.out, context=model.context)
        corpus, vocabulary = Corpus(path, context=model.context), 256
    if options.weights is None:
        model = replace(model, vocabulary=vocabulary)
    elif model.vocabulary < vocabulary:
        raise UserError(
            f"the model in {options.weights} has a vocabulary of {model.vocabulary}, and the tokens of "
            f"{options.data} one of {vocabulary}: give the --tokenizer that the model was trained with."
        )
    _check_memory(options, mesh, model)
    return mesh, model, corpus


def check_recipe(options: TrainOptions, ranks: int) -> None:
    """Raise `UserError` for a recipe that `ranks` ranks of this host cannot train, before one is started.

    Its data is prepared on the way, once for all ranks.
    """
    mesh, model, corpus = prepare(options, ranks)
    if options.offload is not None:
        most, dtype = elements_most(model, mesh, options.stages), storage_dtype(options.precision)
        elements = state_elements(most, dtype, options.training.optimizer)
        require_folder(options.offload, elements=elements, ranks=ranks)
    _require_beginning(options, model, corpus)


def _require_beginning(options: TrainOptions, model: GPTConfig, corpus: Corpus) -> None:
    """Raise `UserError` for a checkpoint that the run cannot go on from; its numbers are not read."""
    if options.resume is not None:
        require_state(
            options.resume,
            plan=plan_of(options, model, corpus),
            steps=options.training.steps,
        )


def plan_of(options: TrainOptions, config: GPTConfig, corpus: Corpus) -> str:
    """Return the plan of a run; the mesh is not in it, since a run may be resumed on another one."""
    return plan_text(
        config,
        options.training,
        corpus=corpus.header.digest,
        precision=options.precision,
        loss_scale=options.loss_scale,
    )


def _check_memory(options: TrainOptions, mesh: Mesh, config: GPTConfig) -> None:
    """Raise `UserError` for a recipe for which there is no memory, or that the mesh does not divide."""
    launched, needed = RankEnvironment.read(os.environ), _bytes_needed(options, mesh, config)
    stages, training = options.stages, options.training
    microbatches = -(-training.shards // mesh.size("dp"))
    shape = Shape(stages=mesh.size("pp"), chunks=stages.chunks, microbatches=microbatches)
    held = schedule_named(stages.schedule).activations_max(shape, 0)
    needs = RankMemory(
        state_bytes=needed.arena + needed.inbox,
        activation_bytes=activation_bytes(
            config,
            rows=training.sequences_per_shard * config.context,
            passes=min(held, microbatches * stages.chunks),
            blocks=config.layers // (shape.stages * shape.chunks),
            tensor_ranks=mesh.size("tp"),
            recompute=options.recompute,
        ),
    )
    ranks = mesh.world_size if launched is None else launched.ranks_per_host
    advice = "Choose a smaller model or batch, --recompute on, or a mesh with more tp or pp."
    require_memory(config, needs, ranks=ranks, advice=advice)


def _bytes_needed(options: TrainOptions, mesh: Mesh, config: GPTConfig) -> RankBytes:
    """Return the memory that a rank needs. Raises `UserError` for what the mesh does not divide."""
    ranks = mesh.size("tp")
    model = GPT(config) if ranks == 1 else PartOfGPT(config, 0, ranks)
    dtype = storage_dtype(options.precision)
    return bytes_needed(
        model,
        options.training,
        mesh,
        options.stages,
        dtype=dtype,
        copies=0 if _has_replicas(mesh) else SLOTS,
        offloaded=options.offload is not None,
    )


def _has_replicas(mesh: Mesh) -> bool:
    """Return whether ranks along `dp` stand for each other. In a launcher all ranks are of this host."""
    launched = RankEnvironment.read(os.environ)
    return mesh.has_replicas(mesh.world_size if launched is None else launched.ranks_per_host)


async def run(options: TrainOptions) -> TrainResult | None:
    """The recipe on this rank; the first tells the result, and returns it.

    Raises `UserError` for what only a person can mend: a divergence, or a rank and its buddy lost at once.
    """
    launched = RankEnvironment.read(os.environ)
    mesh, model, corpus = prepare(options, 1 if launched is None else launched.world_size)
    again = launched is not None and launched.incarnation > 1
    if not again:
        _require_beginning(options, model, corpus)
    needed = _bytes_needed(options, mesh, model)
    arena, inbox_bytes = needed.arena + ARENA_SPARE_BYTES, needed.inbox + INBOX_BYTES_DEFAULT
    try:
        async with join(arena=arena, inbox_bytes=inbox_bytes, enter=False) as worker:
            with contextlib.closing(_Run(worker, options, mesh, model, corpus, again=again)) as task:
                return await MeshJob(worker, mesh, task, replicas=_has_replicas(mesh)).run()
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, options.out, launched)
    except (OutOfMemory, MemoryError) as error:
        raise UserError(f"{too_large(model)}: {error}") from error
    except StepFailed as error:
        path = checkpoint_in(options.out)
        how = f"resume with --resume {path}" if path else "start again with --checkpoint-every"
        raise UserError(f"{error}. To continue: {how}.") from error


class _Run(MeshTask[TrainResult]):
    """A run by a recipe: evaluation, checkpoints, records and weights. For one thread.

    again: whether this is a replacement, whose predecessor may have written records.
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
    ) -> None:
        self.options, self.mesh, self.config, self.corpus = options, mesh, config, corpus
        self.steps, self.out = options.training.steps, options.out
        self.is_first = worker.rank == 0
        self._worker, self._again = worker, again
        self._records: Records | None = None
        if self.is_first:
            self._records = Records(options.out, tensorboard=options.tensorboard, again=again)
        self.known = 0 if self._records is None else self._records.last_step("loss")
        self._began_ns, self._first_step = now_ns(), 0
        self._last: MeshStep | None = None
        self._held_out = 0.0

    def close(self) -> None:
        """Close the records."""
        if self._records is not None:
            self._records.close()

    def trainer(self, groups: MeshGroups) -> MeshTrainer:
        """See `MeshTask`."""
        options = self.options
        recipe = Recipe(groups.model(self.config, recompute=options.recompute), self.corpus, options.training)
        trainer = MeshTrainer(
            recipe,
            groups,
            stages=options.stages,
            dtype=storage_dtype(options.precision),
            zeros=self._zeros,
            overlap=options.overlap,
            loss_scale=options.loss_scale,
            offload=self._file_in(groups.world),
            begins_later=True,
        )
        self._start(trainer)
        self._began_ns, self._first_step = now_ns(), trainer.step
        return trainer

    def _file_in(self, world: Group) -> Callable[[int], StateFile] | None:
        """Return a maker of this rank's file, or a predecessor's; None without `--offload`."""
        folder, place, ranks = self.options.offload, world.members.index(self._worker.rank), world.size
        if folder is None:
            return None

        def made(elements: int) -> StateFile:
            name = StateName(run=self._worker.job, place=place, ranks=ranks, elements=elements)
            return StateFile(folder, name, again=self._again)

        return made

    def copies(self, trainer: MeshTrainer) -> list[np.ndarray]:
        """See `MeshTask`."""
        most = elements_most(self.config, self.mesh, self.options.stages)
        size = state_elements(most, trainer.dtype, self.options.training.optimizer)
        return [self._zeros(size, trainer.state_dtype) for _ in range(SLOTS)]

    def _zeros(self, size: int, dtype: Any) -> Array:
        return self._worker.segment.arena.zeros(size, dtype)

    def agree(self, world: Group) -> None:
        """Nothing: the recipe says it all."""

    def committed(self, done: MeshStep) -> None:
        """Note what the step reported, unless that has been noted."""
        self._last = done
        records, step = self._records, done.step + 1
        if records is None:
            return
        took_s = max(1e-9, (done.compute_ns + done.waited_ns) / 1e9)
        values = {
            "loss": done.loss,
            "grad_norm": done.grad_norm,
            "learning_rate": self._learning_rate(done.step),
            "tokens_per_s": self._tokens_per_step / took_s,
            "waited_ms": done.waited_ns / 1e6,
        }
        if self.options.precision == "float16":
            values |= {"loss_scale": done.loss_scale, "skipped": float(done.skipped)}
        if records.put(step, **values) and self._due(step, TELL_EVERY_STEPS):
            records.tell(step, **values)

    def profiled(self, line: StepLine, mfu: float | None) -> None:
        """Note it for TensorBoard."""
        if self._records is not None:
            self._records.put_profile(line, mfu=mfu)

    def reached(self, trainer: MeshTrainer, keeper: Redundancy) -> None:
        """Evaluate, and write the checkpoint, if it is time."""
        step = trainer.step
        if self._due(step, self.options.evaluate_every):
            with spans.EVALUATE:
                self._held_out = trainer.held_out_loss(windows_max=self.options.evaluate_windows)
            if self._records is not None and self._records.put(step, held_out_loss=self._held_out):
                self._records.tell(step, held_out_loss=self._held_out)
        if self._due(step, self.options.checkpoint_every):
            with spans.CHECKPOINT:
                keeper.settle()  # nobody goes back behind what the file holds
                self._checkpoint(trainer)

    def finish(self, trainer: MeshTrainer) -> TrainResult | None:
        """Save the weights."""
        took_s = max(1e-9, (now_ns() - self._began_ns) / 1e9)
        weights = trainer.weights().astype(np.float32)
        if not self.is_first:
            return None
        self._save(weights)
        done = (trainer.step - self._first_step) * self._tokens_per_step
        result = TrainResult(
            steps=trainer.step,
            mesh=str(self.mesh),
            parameters=GPT(self.config).layout.parameter_count,
            loss_last=0.0 if self._last is None else self._last.loss,
            held_out_loss=self._held_out,
            tokens_per_s=round(done / took_s, 1),
            weights_sha256=weights_sha256(weights),
            directory=str(self.options.out),
        )
        report_result(self._worker, result)
        return result

    @property
    def _tokens_per_step(self) -> int:
        return self.options.training.global_batch * self.config.context

    def _learning_rate(self, step: int) -> float:
        return learning_rate_of(self.options.training, step)

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    # ---- what is kept

    @property
    def _plan(self) -> str:
        return plan_of(self.options, self.config, self.corpus)

    def _start(self, trainer: MeshTrainer) -> None:
        """Take the weights or the checkpoint that the recipe begins with."""
        options = self.options
        if options.weights is not None:
            trainer.begin_with(load_gpt2(options.weights)[0])
        elif options.resume is not None:
            with contextlib.closing(open_state(options.resume, plan=self._plan)) as saved:
                trainer.begin_from(saved)

    def _checkpoint(self, trainer: MeshTrainer) -> None:
        if self.options.precision == "float64":
            return
        write_shards(
            trainer.groups.world,
            self.options.out,
            trainer.pieces(),
            version=trainer.step,
            plan=self._plan,
            loss_scale=trainer.loss_scale.values,
        )

    def _save(self, weights: Array) -> None:
        save_weights(self.options.out / WEIGHTS_NAME, weights, self.config, step=self.steps)
        if self.config.family == "gpt2" and self.config.activation == "gelu":
            save_gpt2(self.options.out / HUGGING_FACE_DIRECTORY, weights, self.config)
