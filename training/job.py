"""The training job: what `python -m zbmd.training` runs on every rank, alone or under `zbmd-node run`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from zbmd.actors.member import Node, join
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.collectives.commit import StepCommit
from zbmd.collectives.commit_driver import CommitDriver, StepFailed
from zbmd.training.bigram import bigram_loss, fit_bigram
from zbmd.training.checkpoint import CHECKPOINT_NAME, load_checkpoint
from zbmd.training.clip import TrainingDiverged
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.corpus import CORPUS_FILE, Corpus, prepare_corpus
from zbmd.training.gpt import GPT
from zbmd.training.journal import WEIGHTS_NAME, Journal
from zbmd.training.ledger import LOG_FORMAT, LogHeader
from zbmd.training.plain import PlainTrainer
from zbmd.training.recipe import Recipe
from zbmd.training.store import PARTS, Store
from zbmd.training.weights import save_weights
from zbmd.training.workload import TrainingWorkload, arena_bytes_needed
from zbmd.training.xp import Array, to_host
from zbmd.transport.errors import UserError
from zbmd.transport.liveness import DeathNotice

FINAL_HELD_OUT_WINDOWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """One training job. `checkpoint_every` and `evaluate_every` are in steps; 0 is never."""

    out: Path
    data: str | None = None
    resume: Path | None = None
    model: GPTConfig = field(default_factory=GPTConfig)
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(steps=300))
    checkpoint_every: int = 50
    evaluate_every: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a finished job says of itself; losses in nats per byte."""

    steps: int
    parameters: int
    loss_last: float
    held_out_loss: float
    held_out_loss_bigram: float
    weights_sha256: str
    directory: str


def open_recipe(options: JobOptions, *, prepare: bool = True) -> Recipe:
    """The job's model, data and settings. With `prepare`, make the corpus file first if it is not there.

    Raises `UserError` for data that is missing, empty or too short, and for a directory closed to us.
    """
    path = options.out / CORPUS_FILE
    if prepare:
        with _only_one(options.out):
            path = prepare_corpus(options.data, options.out)
    return Recipe(GPT(options.model), Corpus(path, context=options.model.context), options.training)


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Let one process of this host at a time into the block."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"cannot use {directory} for the run: {error.strerror}. Name a directory that you may write to "
            "with --out."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def plan_of(recipe: Recipe) -> str:
    """What fixes the bits of a run, as JSON: a log or checkpoint of another plan is never continued."""
    plan = {
        "model": asdict(recipe.model.config),
        "training": asdict(recipe.config),
        "corpus": recipe.corpus.header.digest,
        "reduction": "shard-tree",
    }
    return msgspec.json.encode(plan, order="deterministic").decode()


def weights_sha256(weights: Array) -> str:
    """SHA-256 over the bits of flat float32 weights, padding included, hex."""
    return hashlib.sha256(to_host(weights).data).hexdigest()


def result_of(options: JobOptions, recipe: Recipe, weights: Array, loss_last: float) -> JobResult:
    """Evaluate final `weights` on the held-out text, beside a bigram table of the training text."""
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


def run_plain(options: JobOptions) -> JobResult:
    """The job in this process, without any of the stack: the reference for its bits."""
    recipe = open_recipe(options)
    trainer = PlainTrainer(recipe)
    loss = 0.0
    for _ in range(recipe.config.steps):
        loss = trainer.run_step().loss
    save_weights(options.out / WEIGHTS_NAME, trainer.state.weights, options.model, step=recipe.config.steps)
    return result_of(options, recipe, trainer.state.weights, loss)


async def run(options: JobOptions, *, before_step: Callable[[int], None] | None = None) -> JobResult | None:
    """The job on this rank; the lowest rank of the last epoch returns the result, the others None.

    `before_step(version)` is called on the event loop before each step. Raises `UserError` for what only a
    person can mend: settings, data, a full disk, a state that every holder took with it.
    """
    launched = RankEnvironment.read(os.environ)
    replacement = launched is not None and launched.incarnation > 1
    recipe = open_recipe(options, prepare=not replacement)
    async with join(arena=arena_bytes_needed(recipe)) as node:
        try:
            return await _train(node, options, recipe, before_step)
        except StepFailed as error:
            raise UserError(_advice(str(error), options)) from error
        except TrainingDiverged as error:
            raise UserError(str(error)) from error


def _advice(reason: str, options: JobOptions) -> str:
    checkpoint = options.out / CHECKPOINT_NAME
    if checkpoint.exists():
        return f"{reason}. The last durable checkpoint is {checkpoint}: go on from it with --resume."
    return f"{reason}. No checkpoint had been written yet: start again, with a smaller --checkpoint-every."


async def _train(
    node: Node, options: JobOptions, recipe: Recipe, before_step: Callable[[int], None] | None
) -> JobResult | None:
    layout = recipe.model.layout
    store = Store(layout, lambda size: node.segment.arena.empty((size,), np.float32))
    plan = plan_of(recipe)
    base_version = _initial_state(store, recipe, options, plan)
    header = LogHeader(
        format=LOG_FORMAT,
        run_id=f"{node.job:016x}",
        base_version=base_version,
        plan=plan,
        seed=recipe.config.seed,
    )
    journal = Journal(
        options.out,
        header,
        options.model,
        rank=node.rank,
        report=node.report,
        checkpoint_every=options.checkpoint_every,
    )
    workload = TrainingWorkload(
        node,
        recipe,
        store,
        journal,
        evaluate_every=options.evaluate_every,
        before_step=before_step,
    )
    machine = StepCommit(
        rank=node.rank,
        version=base_version,
        digest=store.digest(store.committed),
        handle=workload.handle(),
        last_version=recipe.config.steps,
        known_version=journal.log.last_version(),
    )
    forget = node.on_peer_lost(
        lambda rank, incarnation, notice: _report_loss(node, rank, incarnation, notice)
    )
    try:
        await CommitDriver(node, machine, workload).run()
    finally:
        forget()
    await journal.settle()
    if machine.members[0].rank != node.rank:
        return None
    result = result_of(options, recipe, store.current.state.weights, journal.last_loss)
    node.report({"kind": "result", **asdict(result)})
    return result


def _report_loss(node: Node, rank: int, incarnation: int, notice: DeathNotice) -> None:
    if not notice.clean:
        node.report(
            {
                "kind": "lost",
                "peer": rank,
                "incarnation": incarnation,
                "at_ns": notice.at_ns,
            }
        )


def _initial_state(store: Store, recipe: Recipe, options: JobOptions, plan: str) -> int:
    """Fill the committed slot: initial weights, or the checkpoint to go on from. Return its version."""
    slot = store.current
    if options.resume is None:
        slot.state.weights[:] = recipe.model.xp.asarray(recipe.model.init(recipe.config.seed))
        return 0
    checkpoint = load_checkpoint(options.resume, plan=plan, elements=PARTS * store.layout.size)
    slot.flat[:] = recipe.model.xp.asarray(checkpoint.flat)
    return checkpoint.version
