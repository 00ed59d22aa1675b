"""The recipe of `zbmd train`: all options that each rank receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import KEEP_DEFAULT, Retention
from zbmd.training.checkpoint.pace import AUTO, Every
from zbmd.training.checkpoint.storage import storage_of
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.mesh import SHARDED_AXIS, Mesh
from zbmd.training.job.paced import require_every
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.ops.cuda.table import MatmulPrecision
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, Precision, storage_dtype
from zbmd.training.sharded.stages import Stages
from zbmd.training.zero.options import STAGES, ZeroOptions
from zbmd.transport.errors import UserError
from zbmd.transport.host.threads import THREADS_MAX

Tokens = Literal["bytes", "bpe"]
TOKENS: tuple[Tokens, ...] = ("bytes", "bpe")
StepGraph = Literal["fused", "tape"]
STEP_GRAPHS: tuple[StepGraph, ...] = ("fused", "tape")
PRECISIONS: tuple[Precision, ...] = ("float32", "float64", "bfloat16", "float16")

RECIPE_NAME: Final = "recipe.toml"
"""In the directory of a run: its settings."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe. `*_every` are in steps, 0: only at the end; `auto`: at the
    pace that the run measures. The vocabulary of `model` is that of the tokens.

    `data`: what to train on; None: the source of Python's own library.
    `loss_scale`: the initial scale of float16. `weights`: a GPT-2 in Hugging Face's layout to start from.
    `zero`: the stage that shards the state, along `fsdp` or, in a mesh without it, along `dp`; 0 for none,
    and 3 if the mesh has `fsdp`. `prefetch`: units that stage 3 gathers ahead. `balance`: divide layers over
    stages by what they cost. `resume`: a checkpoint to continue from.
    `checkpoint_to`: a directory or URL for checkpoints, in the place of `out`; `keep_checkpoints`: the last
    ones that are kept; `keep_every`: in steps, those that are kept for ever; `checkpoint_codec`: none or
    zstd. `overwrite`: start over in the directory of a run that has ended. `redundancy`: how the state of a
    rank survives it, see `zbmd.training.sharded.redundancy`. `offload`: a folder, on a disk of each host,
    for files with the ranks' states. `actors`: whether supervised actors compute; `plain`: whether one
    process computes, without any of the stack. `threads`: of
    BLAS in each rank; the bits depend on it. `on_straggler`: what is done about a slow rank.
    `profile_ops`: the ops of each so-many-th step are profiled; 0: of none. `sample_every`: the model writes
    a text each so-many-th step; 0: none. `device`: cpu, cuda, cuda:N or auto, see
    `zbmd.training.sharded.devices`. `graph`: what a GPU computes: fused graphs of a step, or the ops of
    its tape, one by one; the bits differ. `matmul_precision`: what linear layers multiply in on a GPU.
    """

    out: Path
    data: str | None = None
    mesh: str = "dp=-1"
    model: GPTConfig = GPTConfig()
    training: TrainingConfig = TrainingConfig(steps=300)
    tokens: Tokens = "bytes"
    vocabulary: int = 1024
    tokenizer: Path | None = None
    precision: Precision = "float32"
    loss_scale: float = SCALE_FIRST
    recompute: bool = False
    actors: bool = False
    plain: bool = False
    threads: int = 1
    overlap: bool = True
    schedule: str = "1f1b"
    chunks: int = 1
    balance: bool = False
    zero: int = 0
    prefetch: int = 1
    weights: Path | None = None
    resume: Path | None = None
    overwrite: bool = False
    offload: Path | None = None
    evaluate_every: int = 50
    evaluate_windows: int = 64
    checkpoint_every: Every = AUTO
    checkpoint_to: str = ""
    keep_checkpoints: int = KEEP_DEFAULT
    keep_every: int = 0
    checkpoint_codec: str = Codec.NONE.value
    tensorboard: bool = False
    redundancy: str = "auto"
    on_straggler: str = OnStraggler.WARN.value
    profile_ops: int = 0
    sample_every: int = 0
    device: str = "cpu"
    graph: StepGraph = "fused"
    matmul_precision: MatmulPrecision = "default"

    def __post_init__(self) -> None:
        if not self.zero and f"{SHARDED_AXIS}=" in self.mesh:
            msgspec.structs.force_setattr(self, "zero", STAGES[-1])

    def shards_over_all(self, mesh: Mesh) -> bool:
        """Return whether no two ranks of `mesh` hold the same, since its state is sharded along `dp`."""
        return self.zero > 0 and not mesh.has_shards_alike

    def recuts(self, mesh: Mesh) -> bool:
        """Return whether a state is re-sharded, or read from files, when `mesh` shrinks along `dp`."""
        return self.shards_over_all(mesh) or self.offload is not None

    @property
    def spare_gradients(self) -> int:
        """Return for how many gradients a rank has room beyond those of even shares."""
        return int(self.on_straggler == OnStraggler.REBALANCE.value)

    @property
    def retention(self) -> Retention:
        """Return which checkpoints are kept."""
        return Retention(self.keep_checkpoints, self.keep_every)

    @property
    def stages(self) -> Stages:
        """Return how the model passes through the stages along `pp`."""
        return Stages(schedule=self.schedule, chunks=self.chunks, balance=self.balance)

    @property
    def zero_options(self) -> ZeroOptions:
        """Return how the state is sharded. Raises `UserError` for what there is not."""
        if self.precision == "float64":
            raise UserError("--zero keeps states in float32: choose another --precision.")
        return ZeroOptions(
            stage=self.zero,
            storage=self.precision,
            prefetch=self.prefetch,
            loss_scale=self.loss_scale,
        )

    def encode(self) -> str:
        """Return the recipe as JSON."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def decode(cls, text: str) -> TrainOptions:
        """Decode the result of `encode`. Raises `UserError` for anything else."""
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=_path)
        except ValueError as error:
            raise UserError(f"invalid recipe ({error}): start it with zbmd train.") from None

    def check(self) -> None:
        """Raise `UserError` for what cannot go together."""
        if self.overwrite and self.resume is not None:
            raise UserError("--overwrite and --resume exclude each other: give one of them.")
        if self.weights is not None and self.resume is not None:
            raise UserError("--weights and --resume exclude each other: give one of them.")
        if self.precision == "float64" and (self.checkpoint_every or self.resume is not None):
            raise UserError("checkpoints hold float32: with --precision float64 give --checkpoint-every 0.")
        if self.offload is not None and self.precision == "float64":
            raise UserError("--offload keeps states in float32: choose another --precision.")
        if self.zero not in (0, *STAGES):
            raise UserError(f"--zero: expected one of 0, 1, 2, 3, got {self.zero}")
        if self.zero:
            self.zero_options  # noqa: B018 -- it raises
        if self.plain and (self.zero or self.offload or self.actors or self.precision == "float64"):
            raise UserError("--plain is one bare loop: omit --zero, --offload, --actors and float64.")
        if self.tokens == "bpe" and self.data is None:
            raise UserError("--tokens bpe: expected --data, a file, a directory or a glob to train on.")
        if self.on_straggler not in {one.value for one in OnStraggler}:
            raise UserError(f"--on-straggler: expected warn, rebalance or replace, got {self.on_straggler!r}")
        if self.matmul_precision != "default" and not self.device.startswith("cuda"):
            raise UserError(
                f"--matmul-precision {self.matmul_precision} has kernels for GPUs alone: expected --device "
                f"cuda, got {self.device}"
            )
        self.retention.check()
        storage_of(self.checkpoint_to or self.out)
        LossScale.of(storage_dtype(self.precision), first=self.loss_scale)
        require_every(self.checkpoint_every, "--checkpoint-every")
        if self.evaluate_every < 0:
            raise UserError(f"evaluate_every is {self.evaluate_every}: it must be 0 or more.")
        if self.sample_every < 0:
            raise UserError(f"sample_every is {self.sample_every}: it must be 0 or more.")
        if not 1 <= self.threads <= THREADS_MAX:
            raise UserError(f"--threads: expected 1 to {THREADS_MAX}, got {self.threads}")
        if self.evaluate_windows < 1:
            raise UserError(f"evaluate_windows is {self.evaluate_windows}: it must be at least 1.")


def _path(kind: type, value: Any) -> Any:
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return Path(value)
