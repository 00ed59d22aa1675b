"""The interface between a job and what it trains: a `Task` makes the `Trainer` of this rank.

The job knows epochs, votes, the ledger and files; the task knows a model, its data and a mesh. Whatever the
job does, it does for every task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.sharded import Piece, SavedState
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.stragglers.samples import Sample
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.profiler.lines import ActivationPeak
from zbmd.training.profiler.profiler import Profiler
from zbmd.training.redundancy.interface import SegmentedState
from zbmd.training.redundancy.stamped import Note, StampedSlots
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.step.step_hook import StepHook

ResultT_co = TypeVar("ResultT_co", covariant=True)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step, the same on all ranks but for times. version: how many steps are done with it.

    losses: the parts of the logical shards in the training loss, nats per token; samples: the ids of what
    each shard consumed, as told by who computed it; grad_norm: unclipped. loss_scale: what the gradients were
    multiplied by; skipped: attempts that overflowed, so far. compute_ns: forwards and backwards, with the
    waits along `pp` and `tp`; waited_ns: after that, for reductions; busy_ns: of each rank, `compute_ns`
    without the waits along `pp`; empty if that is not known.
    """

    version: int
    losses: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]
    grad_norm: float
    loss_scale: float = 1.0
    skipped: int = 0
    compute_ns: int = 0
    waited_ns: int = 0
    busy_ns: tuple[int, ...] = ()

    @property
    def loss(self) -> float:
        """The training loss: the shards' parts, added in their order."""
        return sum(self.losses)


class ResultRow(msgspec.Struct, frozen=True):
    """The layout of a step's result as numbers, for `shards` logical shards of `samples` samples each."""

    shards: int
    samples: int

    @property
    def numbers(self) -> int:
        """Length of a row."""
        return 6 + self.shards * (1 + self.samples)

    def encoded(self, done: StepResult | None) -> Note:
        """Return (numbers,) float64, without `busy_ns`; zeros for None."""
        row = np.zeros(self.numbers)
        if done is not None:
            row[:4] = done.version, done.grad_norm, done.loss_scale, done.skipped
            row[4:6] = done.compute_ns, done.waited_ns
            row[6 : 6 + self.shards] = done.losses
            row[6 + self.shards :] = np.array(done.samples).reshape(-1)
        return row

    def decoded(self, row: Sequence[float]) -> StepResult | None:
        """Return the result in a row; None for zeros, or a row of another shape."""
        if len(row) != self.numbers or row[0] < 1 or not all(map(math.isfinite, row)):
            return None
        losses, ids = row[6 : 6 + self.shards], np.array(row[6 + self.shards :]).astype(np.int64)
        return StepResult(
            version=int(row[0]),
            losses=tuple(losses),
            samples=tuple(map(tuple, ids.reshape(self.shards, self.samples).tolist())),
            grad_norm=row[1],
            loss_scale=row[2],
            skipped=int(row[3]),
            compute_ns=int(row[4]),
            waited_ns=int(row[5]),
        )


class Trainer(Protocol):
    """One rank's part in the training of a task; for the training thread. *: all ranks together."""

    step: int
    """The version in use: how many steps have led to it."""
    file: StateFile | None
    """The file of the state, if it is offloaded."""
    kept: StampedSlots | None
    """The slots of the state, if they outlive this rank otherwise."""

    sample: Sample
    """This rank's sample of its last step: all ranks receive it with the results of the next one."""
    samples: npt.NDArray[np.float64]
    """(ranks, `SAMPLE_NUMBERS`) of all ranks, received in the last step."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Return how many logical shards each rank of the view computes."""
        ...

    def rebalance(self, shares: Sequence[int]) -> bool:
        """* Compute so many logical shards on each rank from the next step on, until the next view; same
        bits.

        Return whether that is possible: on all ranks alike, and otherwise nothing is changed.
        """
        ...

    @property
    def shard(self) -> SegmentedState:
        """The state of this rank, as memory. It holds the first version only after `begin_anew`."""
        ...

    @property
    def held_most(self) -> ActivationPeak | None:
        """The peak of this rank's activations in the last step; None if nothing of this view is known."""
        ...

    @property
    def scale(self) -> tuple[float, ...]:
        """Loss scale of the next step, and attempts that overflowed so far; empty where there is none."""
        ...

    def tensors(self, version: int) -> Iterable[HeldTensor]:
        """Yield this rank's weights of a version, which is in use or was last."""
        ...

    def supervised(self, actors: ModelActors) -> None:
        """Compute by actors from now on. On the event loop, before the first step."""
        ...

    def begin_from(self, saved: SavedState) -> None:
        """Begin with the version in a checkpoint, which is read when that is needed."""
        ...

    def enter(self, groups: MeshGroups, version: int) -> None:
        """* Go on in the groups of a new view; the slot in use holds `version`."""
        ...

    def run_step(self, watch: StepHook) -> StepResult:
        """* Run one step.

        Raises `PeerLost` or `OperationAborted` when a rank is lost, `DeadlineExceeded` when one stands still,
        `StepOutOfMemory` on this rank, and `TrainingDiverged` on all alike. The slot in use is then that
        before the step or, where others had not come so far, that after it: see
        `zbmd.training.redundancy.machine`. Go on with `enter`.
        """
        ...

    def held_out_loss(self, *, windows_max: int) -> float:
        """* Return the mean loss on at most so many held-out windows; its bits depend on no mesh of `dp`."""
        ...

    def pieces(self) -> list[Piece]:
        """* Return this rank's share of a checkpoint."""
        ...

    def close(self, *, gave_up: bool = False) -> None:
        """Leave the neighbours' memory; with `gave_up` who waits there for this rank waits no longer.

        Idempotent.
        """
        ...


class Task(Protocol, Generic[ResultT_co]):
    """A model with its data, to be trained. All ranks call its methods together, on the training thread."""

    plan: str
    """The inputs that determine the bits of the run, as text: the log and checkpoints name it."""
    seed: int
    steps: int
    """To be done in all."""
    row: ResultRow
    windows: int
    """Held-out windows of an evaluation."""
    resizes: bool
    """Whether a sharded state is recut for each number of ranks: shards are `ResizableState`."""

    def state_keys(self, groups: MeshGroups) -> Sequence[int]:
        """Return the keys of all ranks' shards, in the order of ranks; empty: all differ."""
        ...

    def fits(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks can train, while others are lost or have not come yet."""
        ...

    def active(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of these ranks that train, ascending; the others wait for another view."""
        return tuple(ranks)

    async def groups(self, world: Group) -> MeshGroups:
        """Return this rank's groups. On the event loop."""
        ...

    def agree(self, world: Group) -> None:
        """Learn in a new view what its members know and a newcomer does not."""
        ...

    def trainer(self, groups: MeshGroups) -> Trainer:
        """Return this rank's trainer, whose state is not initialised. Called by each for itself.

        That is once, unless the task `resizes`. Its slots may lie in `kept_slots`.
        """
        ...

    def actors(self, trainer: Trainer) -> ModelActors | None:
        """Return the actors that are to compute; None: the trainer computes by itself. On the event loop."""
        ...

    def copies(self, trainer: Trainer) -> list[Array]:
        """Return room for two states of any rank, that peers can read."""
        ...

    def metrics(self, done: StepResult) -> Mapping[str, float]:
        """Return what else is noted of a step, by name."""
        ...

    def profiler(self, out: Path) -> Profiler:
        """Return the profiler of the run."""
        ...

    def reached(self, trainer: Trainer, *, is_first: bool) -> None:
        """* All ranks have come to the trainer's step, again after a loss."""
        return  # a task may have nothing to do then

    def finish(
        self, trainer: Trainer, last: StepResult | None, held_out_loss: float, *, is_first: bool
    ) -> ResultT_co | None:
        """Save the results of the run, whose last step is safe; return the result on the first rank."""
        ...
