"""A resilient loop whose steps a framework makes: it cannot be given a batch again.

Its step consists of parts: passes over micro-batches, clipping. After a loss the parts that have been made
are made again inside the call that failed, up to the vote in the optimizer's hook. They begin at the boundary
of the step, with its random numbers, so they have the bits that they had: what the framework has computed of
the first ones stays right, and it never learns of the loss.

A replacement enters the framework's loop from its top, and gets the framework's own state (`Frame`) beside
that of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.torch.work import as_torch_error
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import Retention
from zbmd.training.torch.batches import Marks
from zbmd.training.torch.durable.checkpoints import Options, Saves
from zbmd.training.torch.meetings import supervised
from zbmd.training.torch.run import Run
from zbmd.training.torch.step import StepAborted
from zbmd.training.torch.transfer import Position
from zbmd.transport.errors import UserError, ZbmdError

ResultT = TypeVar("ResultT")


class Frame(ABC):
    """The state of a framework's loop: has a `state_dict`, and a part that is this rank's own.

    A step leaves it alone until it is over: in between it has the state of the boundary, and keeps what the
    framework has written since.
    """

    def __init__(self) -> None:
        self.in_step = False
        self._boundary: Any = None

    @abstractmethod
    def common(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return what is this rank's own, as it is now."""

    @abstractmethod
    def load_common(self, state: dict[str, Any]) -> None:
        """Go on with what is the same on all ranks."""

    @abstractmethod
    def load_own(self, state: dict[str, Any]) -> None:
        """Go on with what is this rank's own."""

    def enter_step(self) -> None:
        """A step is about to begin: its boundary is here."""
        self.state_dict()
        self.in_step = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state where the transaction under way has begun."""
        if not self.in_step:
            self._boundary = {"common": self.common(), "own": self.own_state()}
        return dict(self._boundary)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in such a state, unless a step is under way."""
        if not self.in_step:
            self.load_common(state["common"])
            self.load_own(state["own"])


class OwnedRun(Run):
    """A run whose steps are made of parts that a framework asks for.

    frame: its state. others: with a `state_dict`, as for `resilient`. first: where the loop begins. Raises
    as `resilient` does.
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        others: Sequence[Any],
        frame: Frame,
        seed: int | None,
        first: Position,
    ) -> None:
        self._frame, self._first = frame, first
        self._parts: list[Callable[[], Any]] = []
        self._last: Any = None
        """The result of the part that was made again last."""
        none = Saves(where="", every=0, retention=Retention(), codec=Codec.NONE)
        options = Options(out=None, saves=none, resume=False, exact=False)
        super().__init__(models, optimizers, [*others, frame], seed, options)

    @property
    def position(self) -> Position:
        """The place that the committed transactions have reached."""
        return self._state.position

    @position.setter
    def position(self, position: Position) -> None:
        """Begin elsewhere than at the first step."""
        self._state.position = position

    def _resumed(self, seed: int | None, refused: str) -> tuple[int, str]:
        self.position = self._first  # which a replacement gets from the others
        return super()._resumed(seed, refused)

    @property
    def in_step(self) -> bool:
        """Whether a step is under way."""
        return self._frame.in_step

    def seed_for(self, what: str, number: int) -> None:
        """Seed random numbers: of a pass over the data equally on all ranks, else of this rank."""
        self._seed_for(what, number, share=0 if what == "pass" else self._state.rank)

    def begin_step(self) -> None:
        """A step begins."""
        self._parts.clear()
        if not self._frame.in_step:
            self._frame.enter_step()
        self.begin()

    def compute(self, part: Callable[[], ResultT]) -> ResultT:
        """Make a part of the step under way, and again, with all parts before it, if a rank is lost.

        Returns its result. Its arguments have to be what they are when it is made again.
        """
        self._parts.append(part)
        try:
            return part()
        except BaseException as error:
            if not self._repeat(error):
                raise
        again: ResultT = self._last
        return again

    def end_step(self) -> None:
        """The step has ended, with its update and all that follows from it."""
        if self._is_uncommitted:
            self._before_update()
        self.end(None)
        self._frame.in_step = False
        self._parts.clear()

    def transact(self, body: Callable[[], ResultT], *, ends_pass: bool = False) -> ResultT:
        """Make a transaction between steps: `body`, repeated as a whole. Returns its result."""
        at, results = self.position, list[ResultT]()

        def make() -> None:
            results[:] = [body()]

        then = (
            at._replace(passes=at.passes + 1, at=0, every=0) if ends_pass else at._replace(every=at.every + 1)
        )
        self._transact(then, make)
        return results[0]

    @property
    def reduces(self) -> Any:
        """Whether a backward pass reduces gradients now: of DDP, or of each group of FSDP2."""
        shards = self._state.shards
        return self._state.models[0].require_backward_grad_sync if shards is None else shards.modules.flags

    @contextmanager
    def reducing(self, reduces: Any) -> Generator[None]:
        """Meanwhile gradients are reduced or not, as they were when the part was made first."""
        before = self.reduces
        self._set_reduces(reduces)
        try:
            yield
        finally:
            self._set_reduces(before)

    def _set_reduces(self, reduces: Any) -> None:
        if self._state.shards is None:
            self._state.models[0].require_backward_grad_sync = reduces
        else:
            self._state.shards.modules.flags = reduces

    @property
    def _is_uncommitted(self) -> bool:
        return self._then is not None and not self._committed

    def _before_update(self, *given: Any) -> None:
        """Vote, and make the parts again until all votes are seen."""
        while self._is_uncommitted:
            try:
                self._commit(updates=True)
            except StepAborted as aborted:
                if not self._repeat(aborted):
                    raise
        if self._then is None:
            super()._before_update(*given)

    def _repeat(self, error: BaseException) -> bool:
        """The step under way has failed: make its parts again. Returns False if no loss has caused that."""
        while self.end(error):
            self.begin()
            try:
                for part in self._parts:
                    self._last = part()
            except BaseException as raised:
                error = raised
                if not self._is_uncommitted:
                    raise
            else:
                return True
        return False


def repeatable(batch: Any) -> Callable[[], None]:
    """Return what raises `UserError` once code has changed a tensor of a batch in place."""
    marks = Marks(dict(batch) if isinstance(batch, Mapping) else batch)

    def check() -> None:
        if marks.is_changed:
            raise UserError(
                "the code of a step changes a tensor of its batch in place, so the step cannot be repeated: "
                "have it change a copy"
            )

    return check


def require_replacing(who: str) -> None:
    """Raise `UserError` if lost ranks are not replaced: a framework's batches are dealt to all ranks."""
    _, launched = supervised()
    if _shrinks(launched):
        raise UserError(
            f"{who} needs as many ranks as it began with: start the job with --on-loss replace, which is the "
            "default"
        )


def _shrinks(launched: RankEnvironment) -> bool:
    return 0 < launched.ranks_min < launched.world_size


def open_run(
    model: Any, optimizer: Any, others: Sequence[Any], frame: Frame, seed: int | None, first: Position
) -> OwnedRun:
    """Return a run of one model and one optimizer. Raises as `resilient` does."""
    try:
        return OwnedRun([model], [optimizer], others, frame, seed, first)
    except ZbmdError as error:
        if isinstance(error, UserError):
            raise
        raise as_torch_error(error) from error


def require_methods(of: Any, names: Sequence[str], what: str) -> None:
    """Raise `UserError` unless the object has these methods, which a later version may not have."""
    missing = [name for name in names if not callable(getattr(of, name, None))]
    if missing:
        raise UserError(f"{type(of).__name__} has no {missing[0]}(): {what}")
