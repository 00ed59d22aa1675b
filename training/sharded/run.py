"""A recipe on this rank: data, model, steps, evaluation, checkpoints and records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace

import msgspec

from zbmd.actors.process.spare import is_spare, rank_given
from zbmd.actors.rank.environment import JobEnvironment, RankEnvironment
from zbmd.actors.rank.host_contracts import DEVICE_LOST
from zbmd.actors.rank.member import INBOX_BYTES_DEFAULT, Worker, join
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.pace import AUTO
from zbmd.training.checkpoint.sharded import open_state, require_state, write_alone
from zbmd.training.checkpoint.verified import newest_whole
from zbmd.training.config import GPTConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.data.sources import RunData
from zbmd.training.data.token_corpus import TokenCorpus, prepare_tokens
from zbmd.training.job.explained import errors_explained
from zbmd.training.job.job import ARENA_SPARE_BYTES, Job
from zbmd.training.job.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh, require_axes
from zbmd.training.job.options import RunOptions
from zbmd.training.job.overwrite import holders_of
from zbmd.training.job.paced import PaceClock
from zbmd.training.job.records import Records, require_board
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.job.task import ResultRow
from zbmd.training.model.gpt import GPT
from zbmd.training.model.hugging_face import load_gpt2
from zbmd.training.model.tensor_parallel import PartOfGPT
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.optim.mixed_precision import storage_dtype
from zbmd.training.redundancy.buddy import COPIES
from zbmd.training.redundancy.failures import FailureKind, StepFailed
from zbmd.training.redundancy.state_file import require_folder
from zbmd.training.run.ledger import LOG_NAME, begin_log, has_log
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.activations import activations_needed
from zbmd.training.sharded.devices import open_device
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.redundancy import NONE, arena_bytes, has_replicas, redundancy_of, unused_bytes
from zbmd.training.sharded.stages import (
    SLOTS,
    RankBytes,
    bytes_needed,
    elements_most,
    inbox_needed,
    shard_layouts,
    state_elements,
)
from zbmd.training.sharded.task import (
    EngineTask,
    TrainResult,
    code_of_run,
    plan_of,
    shard_elements,
    weights_sha256,
)
from zbmd.training.step.memory_estimate import (
    RankMemory,
    require_memory,
    too_large,
)
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.options import arena_bytes_needed, kept_bytes
from zbmd.transport.cuda.api import DeviceLost
from zbmd.transport.errors import UserError
from zbmd.transport.host.threads import computing_with
from zbmd.transport.native._native import now_ns


def prepare(options: TrainOptions, world_size: int) -> tuple[Mesh, GPTConfig, Corpus]:
    """Return the mesh, the model with its vocabulary, and the data of a recipe, prepared if it is absent.

    Raises `UserError` for settings that do not fit each other, the world, or the data.
    """
    options.check()
    mesh = Mesh.parse(options.mesh, world_size)
    require_axes(mesh)
    mesh, axis = mesh.with_data_axis(), mesh.sharded_axis
    if options.zero and mesh.size(mesh.sharded_axis) == 1 and mesh.world_size > 1:
        raise UserError(f"--zero shards the state along {axis}, and {mesh} has one rank there: omit it.")
    if options.spare_gradients and mesh.data_ranks == 1 and mesh.world_size > 1:
        raise UserError(
            f"--on-straggler rebalance moves logical shards between ranks along dp and fsdp, and {mesh} has "
            "one place there: give dp or fsdp, or --on-straggler replace."
        )
    if options.zero and mesh.size(PIPELINE_AXIS) == 1 and (options.chunks != 1 or options.balance):
        raise UserError("--zero has no stages to divide: omit --chunks and --balance, or give pp.")
    if options.tensorboard:
        require_board()
    launched = JobEnvironment.read_job(os.environ)
    run = RunData(
        job=0 if launched is None else launched.job,
        begun=has_log(options.out / LOG_NAME) and not options.overwrite,
        resumed=options.resume,
    )
    model = options.model
    if options.weights is not None:
        model = load_gpt2(options.weights)[1]
    if options.tokens == "bytes" and options.weights is None:
        _check_memory(options, mesh, model)  # before data is read
    if options.tokens == "bpe" and options.data is not None:
        tokenizer = prepare_tokens(
            options.data,
            options.out,
            vocabulary=options.vocabulary,
            context=model.context,
            tokenizer=options.tokenizer,
            run=run,
        )
        corpus: Corpus = TokenCorpus(options.out, context=model.context)
        vocabulary = tokenizer.vocabulary
    else:
        path = prepare_corpus(options.data, options.out, context=model.context, run=run)
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
    options = from_whole(options)
    mesh, model, corpus = prepare(options, ranks)
    training, dtype = options.training, storage_dtype(options.precision)
    if options.offload is not None:
        if options.zero:
            elements = shard_elements(options, model, mesh)
        else:
            elements = state_elements(elements_most(model, mesh, options.stages), dtype, training.optimizer)
        note = ResultRow(training.shards, training.sequences_per_shard).numbers
        files = ranks * (2 if _fewest(options, mesh) < mesh.world_size else 1)  # of two cuts at once
        require_folder(options.offload, elements=elements, ranks=files, note=note)
    if not options.overwrite and (options.resume is not None or not holders_of(options.out)):
        begin_log(options.out, options.resume)
    _require_beginning(options, model, corpus)


def from_whole(options: TrainOptions) -> TrainOptions:
    """Return the recipe with the newest checkpoint that is whole to resume from. Raises `UserError`."""
    if options.resume is None:
        return options
    return msgspec.structs.replace(options, resume=newest_whole(options.resume))


def _require_beginning(options: TrainOptions, model: GPTConfig, corpus: Corpus) -> None:
    """Raise `UserError` for a checkpoint that the run cannot go on from; its numbers are not read."""
    if options.resume is not None:
        plan = plan_of(options, model, corpus)
        require_state(options.resume, plan=plan, steps=options.training.steps)


def _check_memory(options: TrainOptions, mesh: Mesh, config: GPTConfig) -> None:
    """Raise `UserError` for a recipe for which there is no memory, or that the mesh does not divide."""
    launched, needed = JobEnvironment.read_job(os.environ), _bytes_needed(options, mesh, config)
    if launched is None and options.resume is None and holders_of(options.out):
        return  # a snapshot process has most of it
    code = code_of_run(options, config, mesh, shrinks=_fewest(options, mesh) < mesh.world_size)
    needs = RankMemory(
        state_bytes=needed.arena + needed.inbox - unused_bytes(code, mesh),
        activation_bytes=activations_needed(options, config, mesh),
    )
    ranks = mesh.world_size if launched is None else launched.ranks_per_host
    smaller = "Choose smaller --width, --layers, --context or --sequences-per-shard, fewer ranks of this host"
    advice = f"{smaller}, --recompute on, or a mesh with more tp or pp."
    if options.zero:
        advice = "Choose a higher --zero stage, a smaller model, fewer sequences a shard, or more ranks."
        if _fewest(options, mesh) < mesh.world_size:
            advice += " A rank has room for its part among the fewest: --on-loss replace needs less."
    require_memory(config, needs, ranks=ranks, advice=advice)


def _bytes_needed(options: TrainOptions, mesh: Mesh, config: GPTConfig) -> RankBytes:
    """Return the memory that a rank needs. Raises `UserError` for what the mesh does not divide."""
    ranks, training, offloaded = mesh.size(TENSOR_AXIS), options.training, options.offload is not None
    shrinks = _fewest(options, mesh) < mesh.world_size
    code = code_of_run(options, config, mesh, shrinks=shrinks)
    if options.zero:
        zero, meshes, stages = options.zero_options, _meshes(options, mesh), options.stages
        every = [shard_layouts(config, one, stages) for one in meshes]
        states = [one.size(DATA_AXIS) if mesh.has_shards_alike else 1 for one in meshes]
        copies = SLOTS - 1 if _has_replicas(options, mesh) or code is not None else COPIES
        needed = [
            arena_bytes_needed(
                layouts,
                training,
                zero,
                copies=copies,
                offloaded=offloaded,
                states=count,
                spare=options.spare_gradients,
            )
            for layouts, count in zip(every, states, strict=True)
        ]
        kept = [
            kept_bytes(layouts, training, zero, copies=COPIES, ranks=one.world_size)
            for layouts, one in zip(every, meshes, strict=True)
            if len(meshes) > 1 and not offloaded and options.recuts(mesh)
        ]
        moves = options.spare_gradients > 0
        inbox = max(
            inbox_needed(config, training, one, stages, moves=moves) for one in {mesh, _least(options, mesh)}
        )
        return RankBytes(arena=max(needed) + max(kept, default=0) + arena_bytes(code), inbox=inbox)
    found = bytes_needed(
        GPT(config) if ranks == 1 else PartOfGPT(config, 0, ranks),
        training,
        mesh,
        options.stages,
        dtype=storage_dtype(options.precision),
        copies=0 if _has_replicas(options, mesh) or code is not None else SLOTS,
        offloaded=offloaded,
        shrinks=shrinks,
        spare=options.spare_gradients,
    )
    return replace(found, arena=found.arena + arena_bytes(code))


def _has_replicas(options: TrainOptions, mesh: Mesh) -> bool:
    """Return whether ranks along `dp` stand for each other, or no other is there: nothing is copied.

    In a launcher all ranks are of this host.
    """
    if options.recuts(mesh):
        return options.redundancy == NONE and options.offload is None
    return mesh.world_size == 1 or options.redundancy == NONE or has_replicas(mesh, options.redundancy)


def _fewest(options: TrainOptions, mesh: Mesh) -> int:
    """Return the least number of ranks that the run goes on with.

    A state that is sharded is recut for each number, as far as its launcher has it: a rank needs memory
    for its largest part. A rank that is lost takes one place along `dp` with it.
    """
    launched, ranks, replicas = JobEnvironment.read_job(os.environ), mesh.world_size, mesh.size(DATA_AXIS)
    if options.recuts(mesh):
        lost = 0 if launched is None else ranks - min(launched.ranks_min or ranks, ranks)
        return ranks // replicas * max(1, replicas - lost)
    return ranks // replicas if _has_replicas(options, mesh) else ranks


def _least(options: TrainOptions, mesh: Mesh) -> Mesh:
    """Return the mesh whose stages need most room for what passes them: one pipeline, if views may shrink."""
    return mesh.along_data(1) if _fewest(options, mesh) < mesh.world_size else mesh


def _meshes(options: TrainOptions, mesh: Mesh) -> list[Mesh]:
    """Return the meshes that a sharded state may be used on."""
    others = mesh.world_size // mesh.size(DATA_AXIS)
    least = _fewest(options, mesh) // others
    return [mesh.along_data(size) for size in range(least, mesh.size(DATA_AXIS) + 1)]


def open_recipe(options: TrainOptions, ranks: int = 1) -> Recipe:
    """Return the model, data and configuration of a recipe, its data prepared. Raises `UserError`."""
    _, config, corpus = prepare(options, ranks)
    return Recipe(GPT(config, recompute=options.recompute), corpus, options.training)


def run_plain(options: TrainOptions) -> TrainResult:
    """Train by the recipe in a bare loop in this process: the reference for the bits of every mesh.

    Raises `UserError` as `train`.
    """
    options = from_whole(options)
    recipe, training = open_recipe(options), options.training
    model, corpus, config = recipe.model, recipe.corpus, recipe.model.config
    _require_beginning(options, config, corpus)
    plan = plan_of(options, config, corpus)
    assert options.precision != "float64", "options.check refuses it"
    trainer = PlainTrainer(recipe, storage=options.precision, loss_scale=options.loss_scale)
    if options.weights is not None:
        trainer.begin_with(load_gpt2(options.weights)[0])
    if options.resume is not None:
        with closing(open_state(options.resume, plan=plan)) as saved:
            trainer.begin_from(saved)
    began_ns, first, loss = now_ns(), trainer.step, 0.0
    every = options.checkpoint_every
    clock = PaceClock(options.out, first, hosts=1, begins=True, note=_say_pace)
    while trainer.step < training.steps:
        clock.stepped()
        loss = trainer.run_step().loss
        due = clock.is_due(trainer.step) if every == AUTO else every > 0 and trainer.step % every == 0
        if due or trainer.step == training.steps:
            scale = trainer.loss_scale.values
            clock.begun(trainer.step)
            with clock.stalling():
                write_alone(
                    options.checkpoint_to or options.out,
                    trainer.pieces(),
                    version=trainer.step,
                    plan=plan,
                    loss_scale=scale,
                    retention=options.retention,
                    codec=Codec(options.checkpoint_codec),
                )
            clock.written(beside=every == AUTO)
    took_s = max(1e-9, (now_ns() - began_ns) / 1e9)
    weights = trainer.state.weights
    save_weights(options.out / WEIGHTS_NAME, weights, config, step=training.steps)
    return TrainResult(
        steps=trainer.step,
        mesh=str(Mesh.parse(options.mesh, 1)),
        parameters=model.layout.parameter_count,
        loss_last=loss,
        held_out_loss=recipe.held_out_loss(weights, windows_max=options.evaluate_windows),
        tokens_per_s=round((trainer.step - first) * training.global_batch * config.context / took_s, 1),
        weights_sha256=weights_sha256(weights),
        directory=str(options.out),
    )


def _say_pace(step: int, values: Mapping[str, float], says: bool) -> None:
    if says:
        Records.tell(step, **values)


async def train(
    options: TrainOptions,
    task_of: type[EngineTask] = EngineTask,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TrainResult | None:
    """Train by the recipe on this rank; the first one reports the result, and returns it.

    within: makes the context to train in, once it is known which rank this is. Raises `UserError` for what
    only a person can mend: a divergence, or a rank and its buddy lost at once.
    """
    with computing_with(options.threads):
        if options.plain:
            done = run_plain(options)
            print(msgspec.json.encode(done).decode(), flush=True)
            return done
        prepared = await _prepared(options)
        with within():
            return await _train(*prepared, task_of)


async def _prepared(options: TrainOptions) -> tuple[TrainOptions, Mesh, GPTConfig, Corpus]:
    """Return the recipe with what it resumes from, and what `prepare` does; a spare then waits for a rank."""
    job, waits, begins = JobEnvironment.read_job(os.environ), is_spare(), from_whole(options)
    mesh, model, corpus = prepare(begins, 1 if job is None else job.world_size)
    await rank_given()
    return from_whole(options) if waits else begins, mesh, model, corpus


async def _train(
    options: TrainOptions, mesh: Mesh, model: GPTConfig, corpus: Corpus, task_of: type[EngineTask]
) -> TrainResult | None:
    launched = RankEnvironment.read(os.environ)
    again = launched is not None and launched.is_again
    if not again:
        _require_beginning(options, model, corpus)
    executor, device = open_device(options, model, mesh, launched)
    if device:
        who = "" if launched is None else f"rank {launched.rank}: "
        print(f"{who}{device}", file=sys.stderr, flush=True)
    needed = _bytes_needed(options, mesh, model)
    private = launched is None and not options.zero  # no other rank reads this one's memory
    arena = ARENA_SPARE_BYTES + (0 if private else needed.arena)
    with errors_explained(options.out, options.checkpoint_to, launched, memory=too_large(model)):
        inbox = needed.inbox + INBOX_BYTES_DEFAULT
        async with join(arena=arena, inbox_bytes=inbox, enter=False, outlives=True) as worker:
            if again:
                worker.segment.arena.want()  # nothing else is to be done before the view
            fewest = _fewest(options, mesh)
            shrinks = fewest < mesh.world_size
            task = task_of(
                worker, options, mesh, model, corpus, again=again, fewest=fewest, executor=executor
            )
            settings = RunOptions(
                out=options.out,
                resume=options.resume,
                evaluate_every=options.evaluate_every,
                checkpoint_every=options.checkpoint_every,
                hosts=1 if launched is None else launched.hosts,
                checkpoint_to=options.checkpoint_to,
                retention=options.retention,
                codec=Codec(options.checkpoint_codec),
                checkpoints=options.precision != "float64",
                tensorboard=options.tensorboard,
                replicas=_has_replicas(options, mesh),
                files=options.offload is not None,
                code=code_of_run(options, model, mesh, shrinks=shrinks),
                on_straggler=OnStraggler(options.on_straggler),
            )
            if mesh.world_size > 1 and not again and worker.rank == 0:
                found = redundancy_of(options, mesh, shrinks=shrinks)
                print(f"redundancy {found}", file=sys.stderr, flush=True)
            job = Job(worker, task, settings, again=again)
            return await (job.run() if executor is None else _on_device(job, worker, executor))


async def _on_device(job: Job[TrainResult], worker: Worker, executor: Executor) -> TrainResult | None:
    """Run a job; if its device is lost, tell the launcher, which replaces this process, on another device."""
    index, name = executor.api.device, executor.name
    try:
        return await job.run()
    except DeviceLost as error:
        worker.report({"kind": DEVICE_LOST, "device": index, "reason": str(error)[:1000]})
        await worker.reported()
        print(
            f"rank {worker.rank}: device cuda:{index} ({name}) is lost: {error}", file=sys.stderr, flush=True
        )
        raise
    except StepFailed as error:
        if error.kind is FailureKind.DIVERGED:
            print(f"rank {worker.rank}: its state was made by device cuda:{index} ({name})", file=sys.stderr)
        raise
