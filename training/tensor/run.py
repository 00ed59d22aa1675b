"""A recipe on this rank: data, model, steps, evaluation, checkpoints and records."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from zbmd.actors.member import INBOX_BYTES_DEFAULT, Node, join
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group import Group, group
from zbmd.training.adamw import AdamWState
from zbmd.training.checkpoint import CHECKPOINT_NAME, Checkpoint, load_checkpoint, save_checkpoint
from zbmd.training.clip import TrainingDiverged
from zbmd.training.config import GPTConfig
from zbmd.training.corpus import Corpus, prepare_corpus
from zbmd.training.gpt import GPT
from zbmd.training.hugging_face import load_gpt2, save_gpt2
from zbmd.training.job import weights_sha256
from zbmd.training.journal import WEIGHTS_NAME
from zbmd.training.mesh import Mesh
from zbmd.training.optim import MuonConfig
from zbmd.training.recipe import Recipe
from zbmd.training.tensor.axes import require_axes
from zbmd.training.tensor.groups import MeshGroups
from zbmd.training.tensor.model import PartOfGPT
from zbmd.training.tensor.options import TrainOptions
from zbmd.training.tensor.records import Records, require_board
from zbmd.training.tensor.stages import STATE_ARRAYS, RankBytes, bytes_needed
from zbmd.training.tensor.trainer import MeshStep, MeshTrainer
from zbmd.training.token_corpus import TokenCorpus, prepare_tokens
from zbmd.training.weights import save_weights
from zbmd.training.xp import Array
from zbmd.transport._native import now_ns
from zbmd.transport.errors import PeerLost, UserError

TELL_EVERY_STEPS = 10
ARENA_SPARE_BYTES = 4 << 20
HUGGING_FACE_DIRECTORY = "gpt2"


class TrainResult(msgspec.Struct, kw_only=True):
    """What a finished run says of itself; losses in nats per token."""

    steps: int
    mesh: str
    parameters: int
    loss_last: float
    held_out_loss: float
    tokens_per_s: float
    weights_sha256: str
    directory: str


def prepare(options: TrainOptions, world_size: int) -> tuple[Mesh, GPTConfig, Corpus]:
    """The mesh, the model with its vocabulary, and the data of a recipe; made, if they are not there.

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
    if isinstance(options.training.optimizer, MuonConfig) and mesh.size("tp") > 1:
        raise UserError("Muon needs whole matrices, and tp cuts them: choose another optimizer, or tp=1.")
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
    _bytes_needed(options, mesh, model)
    return mesh, model, corpus


def _bytes_needed(options: TrainOptions, mesh: Mesh, config: GPTConfig) -> RankBytes:
    """What any rank needs. Raises `UserError` for a model or a batch that the mesh does not divide."""
    ranks = mesh.size("tp")
    model = GPT(config) if ranks == 1 else PartOfGPT(config, 0, ranks)
    itemsize = np.dtype(options.precision).itemsize
    return bytes_needed(model, options.training, mesh, options.stages, itemsize=itemsize)


async def run(options: TrainOptions) -> TrainResult | None:
    """The recipe on this rank; the first returns the result.

    Raises `UserError` for what only a person can mend, and `PeerLost` when a rank is lost: go on from the
    last checkpoint then.
    """
    launched = RankEnvironment.read(os.environ)
    mesh, model, corpus = prepare(options, 1 if launched is None else launched.world_size)
    needed = _bytes_needed(options, mesh, model)
    arena, inbox_bytes = needed.arena + ARENA_SPARE_BYTES, needed.inbox + INBOX_BYTES_DEFAULT
    async with join(arena=arena, inbox_bytes=inbox_bytes) as node:
        world = await group(node)
        try:
            groups = await MeshGroups.of(world, mesh)
            try:
                return await asyncio.to_thread(_Run(node, world, groups, options, model, corpus).run)
            finally:
                await groups.close()
        except TrainingDiverged as error:
            raise UserError(str(error)) from error
        finally:
            await world.close()


class _Run:
    """One rank's run; for one thread."""

    def __init__(
        self,
        node: Node,
        world: Group,
        groups: MeshGroups,
        options: TrainOptions,
        config: GPTConfig,
        corpus: Corpus,
    ) -> None:
        self.options = options
        self.config = config
        self.world = world
        self.is_first = node.rank == world.members[0]
        recipe = Recipe(groups.model(config, recompute=options.recompute), corpus, options.training)
        arena = node.segment.arena

        def empty(size: int, dtype: Any) -> Array:
            return arena.empty((size,), dtype)

        self.trainer = MeshTrainer(
            recipe,
            groups,
            stages=options.stages,
            dtype=np.dtype(options.precision),
            empty=empty,
            overlap=options.overlap,
        )
        self._start()

    def run(self) -> TrainResult | None:
        options, trainer = self.options, self.trainer
        with contextlib.ExitStack() as stack:
            records = None
            if self.is_first:
                records = stack.enter_context(Records(options.out, tensorboard=options.tensorboard))
            held_out, step, began_ns, first = 0.0, None, now_ns(), trainer.step
            while trainer.step < options.training.steps:
                step = self._step(records)
                if self._due(options.evaluate_every):
                    held_out = self._evaluate(records)
                if self._due(options.checkpoint_every):
                    self._checkpoint()
            took_s = max(1e-9, (now_ns() - began_ns) / 1e9)
        weights = trainer.weights().astype(np.float32)
        if self.is_first:
            self._save(weights)
        self._leave()
        trainer.close()
        if not self.is_first:
            return None
        done = (trainer.step - first) * self._tokens_per_step
        return TrainResult(
            steps=trainer.step,
            mesh=str(trainer.groups.mesh),
            parameters=GPT(self.config).layout.parameter_count,
            loss_last=0.0 if step is None else step.loss,
            held_out_loss=held_out,
            tokens_per_s=round(done / took_s, 1),
            weights_sha256=weights_sha256(weights),
            directory=str(options.out),
        )

    @property
    def _tokens_per_step(self) -> int:
        return self.options.training.global_batch * self.config.context

    def _due(self, every: int) -> bool:
        done = self.trainer.step
        return done == self.options.training.steps or (every > 0 and done % every == 0)

    def _step(self, records: Records | None) -> MeshStep:
        began_ns = now_ns()
        step = self.trainer.run_step()
        if records is not None:
            values = {
                "loss": step.loss,
                "grad_norm": step.grad_norm,
                "learning_rate": self.trainer.recipe.learning_rate(step.step),
                "tokens_per_s": self._tokens_per_step / max(1e-9, (now_ns() - began_ns) / 1e9),
                "waited_ms": step.waited_ns / 1e6,
            }
            records.put(self.trainer.step, **values)
            if self._due(TELL_EVERY_STEPS):
                records.tell(self.trainer.step, **values)
        return step

    def _evaluate(self, records: Records | None) -> float:
        loss = self.trainer.held_out_loss(windows_max=self.options.evaluate_windows)
        if records is not None:
            records.put(self.trainer.step, held_out_loss=loss)
            records.tell(self.trainer.step, held_out_loss=loss)
        return loss

    # ---- what is kept

    @property
    def _plan(self) -> str:
        """What fixes the bits, but for the mesh: a run may go on with another one."""
        plan = {
            "model": asdict(self.config),
            "training": asdict(self.options.training),
            "corpus": self.trainer.recipe.corpus.header.digest,
        }
        return msgspec.json.encode(plan, order="deterministic").decode()

    def _start(self) -> None:
        """Take the weights or the checkpoint that the recipe begins with."""
        trainer, options = self.trainer, self.options
        if options.weights is not None:
            trainer.begin_with(load_gpt2(options.weights)[0])
        elif options.resume is not None:
            size = GPT(self.config).layout.size
            found = load_checkpoint(options.resume, plan=self._plan, elements=STATE_ARRAYS * size)
            trainer.begin_with(*np.split(found.flat, STATE_ARRAYS))
            trainer.step = found.version

    def _checkpoint(self) -> None:
        if self.options.precision != "float32":
            return
        flat = np.concatenate([self.trainer.whole(array) for array in _arrays(self.trainer.state)])
        if self.is_first:
            made = Checkpoint(version=self.trainer.step, plan=self._plan, flat=flat)
            save_checkpoint(self.options.out / CHECKPOINT_NAME, made)

    def _save(self, weights: Array) -> None:
        save_weights(self.options.out / WEIGHTS_NAME, weights, self.config, step=self.trainer.step)
        if self.config.family == "gpt2" and self.config.activation == "gelu":
            save_gpt2(self.options.out / HUGGING_FACE_DIRECTORY, weights, self.config)

    def _leave(self) -> None:
        """Return once all are done: a group that closes ends the operations of slower members."""
        with contextlib.suppress(OperationAborted, PeerLost):
            self.world.blocking.barrier()


def _arrays(state: AdamWState) -> tuple[Array, Array, Array]:
    return state.weights, state.mean, state.square
