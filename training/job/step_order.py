"""The order of a step, for every trainer: gradient, results and votes of all ranks, update.

A trainer computes the gradient and the update as it likes. The moments at which others learn of them, and at
which the hook is called, are the same for all: redundancy and the commit log depend on that.

    the hook applies first   gradient ─▶ overwrites ─▶ update ─▶ prepared ─▶ results and votes ─▶ committed
    otherwise                gradient ─▶ results and votes ─▶ overwrites ─▶ update
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd import spans
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, no_sample
from zbmd.training.job.task import ResultRow, StepResult, Trainer
from zbmd.training.step.memory_estimate import naming_step
from zbmd.training.step.step_hook import NO_HOOK, VOTE_NUMBERS, StepHook, Vote

_NOTHING: npt.NDArray[np.float64] = np.zeros(0)


class Told(NamedTuple):
    """Losses and samples of all shards in a step, and the votes and times of ranks."""

    losses: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]
    votes: list[Vote]
    busy_ns: tuple[int, ...]
    beside: list[npt.NDArray[np.float64]]


class Computed(NamedTuple):
    """Costs and norm of the gradient of a step. norm: of all of it; skipped: attempts that overflowed."""

    norm: float
    loss_scale: float = 1.0
    skipped: int = 0
    compute_ns: int = 0
    waited_ns: int = 0


class AllBegun:
    """Tells `watch` once that all ranks have begun the step, so that each holds `version`, that before it.

    begun: an operation that ends when they have; None if the trainer calls `tell`.
    """

    def __init__(self, watch: StepHook, version: int, begun: Future[None] | None) -> None:
        self._watch, self._version, self._begun = watch, version, begun
        self._told = False

    def look(self) -> None:
        """Tell it if it is so by now. Raises as the operation."""
        if self._begun is not None and self._begun.done():
            self.wait()

    def wait(self) -> None:
        """Tell it as soon as it is so."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with spans.COMM:
                begun.result()
            self.tell()

    def tell(self) -> None:
        """Tell it: it is so."""
        if not self._told:
            self._told = True
            self._watch.all_hold(self._version)


class LateBegun(AllBegun):
    """An `AllBegun` of a state that is copied from a device meanwhile: all have it when they `meet`.

    meets: settles, and returns an operation as of `AllBegun`. All ranks call `meet`, at one place among their
    operations.
    """

    def __init__(self, watch: StepHook, version: int, meets: Callable[[], Future[None]]) -> None:
        super().__init__(watch, version, None)
        self._meets: Callable[[], Future[None]] | None = meets

    def meet(self) -> None:
        """Begin the operation, unless it has begun. Raises as settling."""
        meets, self._meets = self._meets, None
        if meets is not None:
            self._begun = meets()

    def wait(self) -> None:
        """See `AllBegun`."""
        self.meet()
        super().wait()


class OrderedSteps(Trainer):
    """A trainer's steps in the order of all. row: the layout of results.

    Once a rank has its gradient, others receive its `_losses`, `_consumed` and `_busy_ns`.
    """

    groups: MeshGroups
    row: ResultRow

    def __init__(self) -> None:
        self.sample = no_sample()
        self.samples = np.zeros((0, SAMPLE_NUMBERS))
        self._watch: StepHook = NO_HOOK
        self._begun = AllBegun(NO_HOOK, 0, None)
        self._told: Told | None = None
        """Losses and samples of the step under way."""
        self._votes: list[Vote] | None = None
        self._reporters: Sequence[int] = ()
        """The place in the world of the rank that reports each logical shard."""
        self._consumed: Mapping[int, npt.NDArray[np.int64]] = {}
        """Ids of the samples that this rank consumed in the last attempt, by logical shard."""
        self._busy_ns = 0

    def run_step(self, watch: StepHook = NO_HOOK) -> StepResult:
        """See `Trainer`."""
        self._watch, self._told, self._votes = watch, None, None
        with naming_step(self.groups.worker.rank, self.step):
            try:
                self._begun = self._begins()
                return self._in_order(watch, self._differentiate())
            except BaseException as error:
                self._abandon(error)
                raise

    def _begins(self) -> AllBegun:
        """Return what tells the hook that all have begun the step."""
        return AllBegun(self._watch, self.step, self._all_begin())

    def _all_begin(self) -> Future[None] | None:
        """Return an operation that ends when all have begun it, if the hook asks for one."""
        watch, world = self._watch, self.groups.world
        if watch is NO_HOOK or watch.applies_first or self._notices_begin:
            return None
        end_ns = world.deadline_ns()
        return world.submit(lambda c: c.barrier(deadline_ns=end_ns))

    def _in_order(self, watch: StepHook, made: Computed) -> StepResult:
        self._begun.wait()
        if watch.applies_first:
            watch.overwrites()
            self._update(made)
            watch.prepared()
            votes = self._vote()
            done = self._result(made)
            watch.updated(done)
            watch.voted(votes)
        else:
            if self._told is None:
                self._share()
            done = self._result(made)
            watch.overwrites()
            self._update(made)
            watch.updated(done)
        self.step = done.version
        self._end_step()
        return done

    def _vote(self) -> list[Vote]:
        """Tell all ranks this one's vote on what is prepared, and its results, if it has not told them."""
        watch, world = self._watch, self.groups.world
        if self._told is None:
            return self._share().votes
        mine = watch.vote()
        with spans.COMM:
            return list(world.blocking.all_gather(mine)) if world.size > 1 else [mine]

    def _share(self, beside: npt.NDArray[np.float64] = _NOTHING, *, votes: bool = True) -> Told:
        """Tell all ranks this one's vote, once a step, and losses and samples of its shards: one operation.

        beside: more numbers for all ranks to see, as many on each. Raises as the operation.
        """
        watch, row, world = self._watch, self.row, self.groups.world
        at, each, votes = VOTE_NUMBERS + row.shards, row.samples, votes and self._votes is None
        busy = at + row.shards * each
        measured = slice(busy + 1, busy + 1 + SAMPLE_NUMBERS)
        mine = np.zeros(measured.stop + len(beside))
        if votes:
            with spans.COMM:  # it may wait for the copy of a state
                mine[:VOTE_NUMBERS] = watch.vote().view(np.float64)
        for shard, loss in self._losses.items():
            mine[VOTE_NUMBERS + shard] = loss
        for shard, ids in self._consumed.items():
            mine[at + shard * each :][:each] = ids
        mine[busy], mine[measured], mine[measured.stop :] = float(self._busy_ns), self.sample, beside
        with spans.COMM:
            every = world.blocking.all_gather(mine) if world.size > 1 else mine[np.newaxis]
        self.samples = np.array([one[measured] for one in every])
        who = list(enumerate(self._reporters))
        told = self._told = Told(
            losses=tuple(float(every[place][VOTE_NUMBERS + shard]) for shard, place in who),
            samples=tuple(
                tuple(every[place][at + shard * each :][:each].astype(np.int64).tolist())
                for shard, place in who
            ),
            votes=[one[:VOTE_NUMBERS].view(np.uint64) for one in every],
            busy_ns=tuple(int(one[busy]) for one in every),
            beside=[one[measured.stop :] for one in every],
        )
        if votes:
            self._votes = told.votes
            if not watch.applies_first:
                watch.voted(told.votes)
        return told

    def _result(self, made: Computed) -> StepResult:
        told = self._told
        assert told is not None, "results are shared by now"
        return StepResult(
            version=self.step + 1,
            losses=told.losses,
            samples=told.samples,
            grad_norm=made.norm,
            compute_ns=made.compute_ns,
            waited_ns=made.waited_ns,
            busy_ns=told.busy_ns if any(told.busy_ns) else (),
            loss_scale=made.loss_scale,
            skipped=made.skipped,
        )

    # ---- what a trainer does

    @property
    def _notices_begin(self) -> bool:
        """Whether the gradient's own operations show that all have begun: `_begun.tell` is called then."""
        return False

    @property
    @abstractmethod
    def _losses(self) -> Mapping[int, float]:
        """The parts in the loss of the logical shards whose loss is known here."""

    @abstractmethod
    def _differentiate(self) -> Computed:
        """Compute the gradient; all ranks together. Raises `TrainingDiverged` on all alike."""

    @abstractmethod
    def _update(self, made: Computed) -> None:
        """Write the next version into the slot that is not in use, and use that."""

    def _end_step(self) -> None:
        """Do what follows the update, once the hook knows of it."""

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """Give up the step: others wait for this rank no longer, and nothing of it is under way."""
