"""The data-parallel training job of `python -m zbmd.training`, on each rank, alone or under `zbmd-node
run`."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.commit.driver import CommitDriver, StepFailed
from zbmd.collectives.commit.machine import StepCommit
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint.plan import plan_text
from zbmd.training.checkpoint.sharded import (
    checkpoint_in,
    no_checkpoint,
    open_state,
    require_state,
    take_state,
    write_alone,
)
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import (
    CORPUS_FILE,
    Corpus,
    bigram_loss,
    fit_bigram,
    prepare_corpus,
    require_data,
)
from zbmd.training.files import DiskFull
from zbmd.training.model.gpt import GPT, parameter_shapes
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.optim import arrays_of
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import SCALE_FIRST, Precision, Storage
from zbmd.training.profiler.profiler import open_profiler
from zbmd.training.replicated.workload import TrainingWorkload, arena_bytes_needed
from zbmd.training.run.journal import Journal, report_losses
from zbmd.training.run.ledger import (
    LOG_FORMAT,
    LOG_NAME,
    CommitLog,
    LogHeader,
    loss_of,
    read_header,
    read_log,
    require_no_log,
)
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.run.repeated_oom import raise_for
from zbmd.training.step.memory_estimate import (
    RankMemory,
    StepOutOfMemory,
    activation_bytes,
    require_memory,
    too_large,
)
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.two_slot_store import Store
from zbmd.transport.errors import ArenaFull, OutOfMemory, UserError

FINAL_HELD_OUT_WINDOWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a training job. `checkpoint_every` and `evaluate_every` are in steps; 0 means never."""

    out: Path
    data: str | None = None
    resume: Path | None = None
    model: GPTConfig = field(default_factory=GPTConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=300))
    checkpoint_every: int = 50
    evaluate_every: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a finished job; losses in nats per byte."""

    steps: int
    parameters: int
    loss_last: float
    held_out_loss: float
    held_out_loss_bigram: float
    weights_sha256: str
    directory: str


def open_recipe(options: JobOptions, *, prepare: bool = True) -> Recipe:
    """Return the job's model, data and configuration. With `prepare`, create the corpus file if it is
    missing.

    Raises `UserError` for data that is missing, empty or too short, and for a directory that is not writable.
    """
    path, context = options.out / CORPUS_FILE, options.model.context
    if prepare:
        path = prepare_corpus(options.data, options.out, context=context)
    return Recipe(GPT(options.model), Corpus(path, context=context), options.training)


def plan_of(recipe: Recipe, *, precision: Precision = "float32", loss_scale: float = SCALE_FIRST) -> str:
    """Return the plan of a recipe; see `plan_text`."""
    return plan_text(
        recipe.model.config,
        recipe.config,
        corpus=recipe.corpus.header.digest,
        precision=precision,
        loss_scale=loss_scale,
    )


def weights_sha256(weights: Array) -> str:
    """Return the SHA-256 of the bits of flat float32 weights, padding included, hex."""
    return hashlib.sha256(to_host(weights).data).hexdigest()


def result_of(options: JobOptions, recipe: Recipe, weights: Array, loss_last: float) -> JobResult:
    """Evaluate final `weights` on the held-out text, compared with a bigram table of the training text."""
    ids = recipe.corpus.evaluation_ids(FINAL_HELD_OUT_WINDOWS)
    return JobResult(
        steps=recipe.config.steps,
        parameters=recipe.model.layout.parameter_count,
        loss_last=loss_last,
        held_out_loss=recipe.held_out_loss(weights, windows_max=FINAL_HELD_OUT_WINDOWS),
        held_out_loss_bigram=bigram_loss(fit_bigram(recipe.corpus), recipe.corpus.windows(ids)),
        weights_sha256=weights_sha256(weights),
        directory=str(options.out),
    )


def run_plain(options: JobOptions, *, storage: Storage = "float32") -> JobResult:
    """Run the job in this process, without the stack: the reference for its bits.

    Raises `UserError` for invalid settings or data, and for a checkpoint that it cannot resume from.
    """
    launched = RankEnvironment.read(os.environ)
    recipe, loss = open_recipe(options), 0.0
    plan, steps, every = plan_of(recipe, precision=storage), recipe.config.steps, options.checkpoint_every
    require_beginning(options, recipe, plan)
    trainer = PlainTrainer(recipe, storage=storage)
    if options.resume is not None:
        with closing(open_state(options.resume, plan=plan)) as saved:
            trainer.begin_from(saved)
    while trainer.step < steps:
        loss = trainer.run_step().loss
        is_due = trainer.step == steps or (every > 0 and trainer.step % every == 0)
        if is_due and (launched is None or launched.rank == 0):
            scale = trainer.loss_scale.values
            write_alone(options.out, trainer.pieces(), version=trainer.step, plan=plan, loss_scale=scale)
    save_weights(options.out / WEIGHTS_NAME, trainer.state.weights, options.model, step=recipe.config.steps)
    return result_of(options, recipe, trainer.state.weights, loss)


async def run_job(
    options: JobOptions, *, before_step: Callable[[int], None] | None = None
) -> JobResult | None:
    """Run the job on this rank; the lowest rank of the last epoch returns the result, the others None.

    `before_step(version)` is called on the event loop before each step. Raises `UserError` for what needs a
    person: settings, data, a full disk, or a state that was lost with all ranks that held it.
    """
    launched = RankEnvironment.read(os.environ)
    replacement = launched is not None and launched.incarnation > 1
    check_memory(options, ranks=1 if launched is None else launched.ranks_per_host)
    recipe = open_recipe(options, prepare=not replacement)
    if not replacement:
        require_beginning(options, recipe, plan_of(recipe))
    arena_bytes = arena_bytes_needed(recipe.model.layout, options.training)
    try:
        async with join(arena=arena_bytes, enter=False) as worker:
            if replacement:
                worker.segment.arena.want()  # nothing else is to be done before the view
            return await _train(worker, options, recipe, before_step, replacement=replacement)
    except StepFailed as error:
        again = "start again, with a smaller --checkpoint-every"
        raise UserError(_advice(str(error), options, otherwise=again)) from error
    except DiskFull as error:
        again = "free some space and start again"
        raise UserError(_advice(str(error), options, otherwise=again)) from error
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, options.out, launched)
    except ArenaFull:
        raise
    except (OutOfMemory, MemoryError) as error:
        raise UserError(f"{too_large(options.model)}: {error}") from error


def check_memory(options: JobOptions, *, ranks: int) -> None:
    """Raise `UserError` if `ranks` ranks of one host have too little memory for the model, before allocating
    any.
    """
    model, training = options.model, options.training
    layout = ParameterLayout.of(parameter_shapes(model))
    weights_bytes, bias_bytes = 4 * layout.size, 8 * model.heads * model.context**2
    needs = RankMemory(
        state_bytes=arena_bytes_needed(layout, training) + weights_bytes + bias_bytes,
        activation_bytes=activation_bytes(model, rows=training.sequences_per_shard * model.context),
    )
    advice = "Choose smaller --width, --layers, --context or --sequences-per-shard, or fewer ranks (-n)."
    require_memory(model, needs, ranks=ranks, advice=advice)


def check_data(
    options: JobOptions, *, plan: Callable[[Recipe], str], is_named: bool, has_log: bool = True
) -> None:
    """Raise `UserError` for unsuitable data or a checkpoint that does not fit, before any rank is started.

    `is_named`: whether `options.out` is the run's directory; the corpus is then created there, once for all
    ranks. Otherwise the launcher will name the directory: nothing is created, and the content of a checkpoint
    is not compared. `has_log`: whether the job writes a commit log, which must not exist yet.
    """
    if not is_named:
        require_data(options.data, context=options.model.context)
        if options.resume is not None and not options.resume.exists():
            raise no_checkpoint(options.resume)
        return
    recipe = open_recipe(options)
    if has_log:
        require_no_log(options.out / LOG_NAME)
    require_beginning(options, recipe, plan(recipe))


def require_beginning(options: JobOptions, recipe: Recipe, plan: str) -> None:
    """Raise `UserError` for a checkpoint that the run cannot resume from, without reading its arrays."""
    if options.resume is not None:
        require_state(options.resume, plan=plan, steps=recipe.config.steps)


def _advice(reason: str, options: JobOptions, *, otherwise: str) -> str:
    """Return what happened, and the checkpoint to resume from; `otherwise`: what to do if there is none."""
    checkpoint = checkpoint_in(options.out)
    what_happened = reason if reason.endswith(".") else f"{reason}."
    if checkpoint is None:
        return f"{what_happened} No checkpoint had been written yet: {otherwise}."
    return (
        f"{what_happened} The last durable checkpoint is {checkpoint}: resume with "
        f"--resume {checkpoint} and a new --out."
    )


async def _train(
    worker: Worker,
    options: JobOptions,
    recipe: Recipe,
    before_step: Callable[[int], None] | None,
    *,
    replacement: bool,
) -> JobResult | None:
    plan = plan_of(recipe)
    # On a thread: the event loop connects to peers in the meantime, and other ranks already work.
    store, digest, known_version = await asyncio.to_thread(
        _initial_store, worker, recipe, options, plan, replacement=replacement
    )
    base_version = store.version
    journal = Journal(
        options.out,
        log_header(worker, recipe, plan, base_version),
        recipe.model,
        arrays_of(recipe.config.optimizer),
        rank=worker.rank,
        report=worker.report,
        checkpoint_every=options.checkpoint_every,
    )
    profiler = open_profiler(options.out, recipe.model, sequences=recipe.config.sequences_per_shard)
    workload = TrainingWorkload(
        worker,
        recipe,
        store,
        journal,
        profiler,
        evaluate_every=options.evaluate_every,
        before_step=before_step,
    )
    machine = StepCommit(
        rank=worker.rank,
        version=base_version,
        digest=digest,
        handle=workload.handle(),
        last_version=recipe.config.steps,
        known_version=known_version,
    )
    forget = report_losses(worker)
    try:
        await CommitDriver(worker, machine, workload).run()
        profiler.end_step()
        await journal.settle()
        if machine.members[0].rank != worker.rank:
            return None
        # From the log: this rank may have come up when the last step was done.
        loss_last = loss_of(read_log(journal.log.path)[1][-1])
        weights = store.current.state.weights
        result = await asyncio.to_thread(result_of, options, recipe, weights, loss_last)
    finally:
        forget()
        profiler.close()
    worker.report({"kind": "result", **asdict(result)})
    return result


def log_header(worker: Worker, recipe: Recipe, plan: str, base_version: int = 0) -> LogHeader:
    """Return the header of the commit log of this run; `plan` as from `plan_of`."""
    return LogHeader(
        format=LOG_FORMAT,
        run_id=f"{worker.job:016x}",
        base_version=base_version,
        plan=plan,
        seed=recipe.config.seed,
    )


NO_DIGEST = bytes(16)
"""Of a slot that holds nothing; no member compares it."""


def _initial_store(
    worker: Worker, recipe: Recipe, options: JobOptions, plan: str, *, replacement: bool
) -> tuple[Store, bytes, int]:
    """Return a store, the digest of its committed slot, and the last version in the commit log.

    The slot has the version that the run began with: initial weights, or those of a checkpoint. A replacement
    in a run that cannot go back to it any more leaves the slot empty: members are at most one version behind
    the log.
    """
    arena, arrays, layout = worker.segment.arena, arrays_of(recipe.config.optimizer), recipe.model.layout
    store = Store(layout, arena.lazy_zeros, arrays=len(arrays))
    path, state, xp = options.out / LOG_NAME, store.current.state, recipe.model.xp

    def last_version() -> int:
        return CommitLog(path, log_header(worker, recipe, plan, store.version)).last_version()

    if replacement and path.exists():
        store.version = read_header(path).base_version
        known_version = last_version()
        if known_version > store.version + 1:
            arena.want(store.slots[1 - store.committed].flat)  # the members' state is pulled into it
            return store, NO_DIGEST, known_version
    arena.ready(store.current.flat)
    if options.resume is None:
        state.weights[:] = xp.asarray(recipe.model.init(recipe.config.seed))
    else:
        with closing(open_state(options.resume, plan=plan)) as saved:
            take_state(saved, state, layout, arrays, xp=xp)
            store.version = saved.version
    return store, store.digest(store.committed), last_version()
