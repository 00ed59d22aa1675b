"""A training loop that survives losses: `resilient`, and the run that it returns.

Errors of a lost rank end the body of a step at `with run.step()`, where all survivors meet again; the batch
is given again, unless the step was committed. See `transaction` for the protocol.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import structlog

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES, LoopLost, Mode, Standing
from zbmd.collectives.torch.rendezvous import come_together
from zbmd.collectives.torch.work import as_torch_error
from zbmd.collectives.torch.world import world
from zbmd.training.run.journal import captured_machine
from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch import batches as loading
from zbmd.training.torch import points, votes
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.ddp import KeptBuckets
from zbmd.training.torch.exchange import Exchange
from zbmd.training.torch.fsdp import has_shards
from zbmd.training.torch.recorder import Recorder, plan_of, refusal
from zbmd.training.torch.rollback import Boundary, seed_all
from zbmd.training.torch.shards import Shards
from zbmd.training.torch.transfer import Carried, described, give, own_tensors, take
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

log: Final = structlog.stdlib.get_logger("zbmd.torch")

AGAIN_MAX: Final = 64
"""Meetings after one loss, before the loop gives up."""
CallP = ParamSpec("CallP")
ResultT = TypeVar("ResultT")


class StepAborted(BaseException):
    """Ends the body of a step that is to be repeated; `with run.step()` takes it."""


class Position(NamedTuple):
    """The place that the committed transactions have reached.

    step: committed steps. passes: over the data. at: steps in the pass under way. every: calls of `run.every`
    that are done after the last step.
    """

    step: int = 0
    passes: int = 0
    at: int = 0
    every: int = 0


class Step:
    """`with run.step():` the body is one step, which is repeated if a rank is lost before its commit."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run.end(error)


class Run:
    """A resilient loop over `models`, `optimizers`, and `others` with a `state_dict` (scheduler, scaler).

    seed: of all random numbers in steps; default: that of `torch.manual_seed` on rank 0. out: see `recorder`.
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        others: Sequence[Any],
        seed: int | None,
        out: Path | None,
    ) -> None:
        worker = world().worker
        launched = RankEnvironment.read(os.environ) is not None
        if worker is None or not launched or not dist.is_initialized() or not CONTINUITY.groups:
            raise UserError(
                'zbmd.torch.resilient() needs dist.init_process_group("zbmd") before it, and ranks that are '
                "supervised: start them by `zbmd-node run SCRIPT`, or under torchrun, srun or mpirun by "
                "`python -m zbmd.torch.run SCRIPT` (torchrun -m zbmd.torch.run SCRIPT)"
            )
        if CONTINUITY.standing is Standing.IN_LOOP:
            raise UserError("zbmd.torch.resilient() was called twice: a process has one resilient loop")
        self._models, self._optimizers = models, optimizers
        self._rank, self._seed = int(dist.get_rank()), torch.initial_seed() if seed is None else seed
        self._timeout = timedelta(seconds=CONTINUITY.groups[0].limit_s)
        self._exchange, self._ranks = Exchange(self._timeout), int(dist.get_world_size())
        self._boundary = Boundary(models, optimizers, others)
        self._position, self._claimed = Position(), 0
        self._then: Position | None = None
        """The position once the transaction under way is committed; None between two."""
        self._committed = False
        self._has_stepped = self._rehearses = False
        self._rows: tuple[bytes, ...] = ()
        self._means: dict[str, float] = {}
        self._every: list[tuple[int, Callable[[], object]]] = []
        self._loader: Any = None
        self._loader_state: Any = None
        self._voted_state: Any = None
        """Of the loader, behind the batch of the step under way."""
        self._drawn = Drawn()
        """Of the batch of the step under way."""
        self._out = out
        self._recorder: Recorder | None = None
        """Of rank 0, if the loop is recorded."""
        self.metrics: dict[str, float] = {}
        """Means over all ranks of what the last committed step gave to `mean`."""
        fresh = CONTINUITY.mode is Mode.ALONE
        self._shards = Shards(models, optimizers, self._rank, self._ranks) if has_shards(models) else None
        machine = tx.Transactions(fresh=fresh, sharded=self._shards is not None)
        self._machine = captured_machine(
            worker, tx.TRANSACTION, "loop", machine, tx.transaction_config(machine)
        )
        self._state = machine
        self._buckets = KeptBuckets(list(models))
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        self._keep()
        if fresh:
            self._recover()
        else:
            self._found()
        if out is not None and self._rank == 0:
            plan = plan_of(models, optimizers, self._ranks)
            self._recorder = Recorder(
                out, run_id=f"{worker.job:016x}", plan=plan, seed=self._seed, fresh=fresh
            )
            CONTINUITY.at_leave(self._recorder.close)
            if fresh:
                self._recorder.amend(self._rows, self._position.step, CONTINUITY.epoch)
        CONTINUITY.enter()

    # What scripts use.

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return self._position.step

    @property
    def version(self) -> int:
        """The number of committed transactions: steps, calls of `every`, ends of passes."""
        return self._state.version

    def step(self) -> Step:
        """Return the context of one step."""
        return Step(self)

    def call(self, body: Callable[CallP, ResultT], *args: CallP.args, **kwargs: CallP.kwargs) -> ResultT:
        """Make one step of `body`, called until it is committed; return its result."""
        version, results = self.version, list[ResultT]()
        while self.version == version:
            with self.step():
                results[:] = [body(*args, **kwargs)]
        return results[0]

    def mean(self, **values: Any) -> None:
        """Have `metrics` hold the means of these numbers over all ranks, once the step is committed."""
        self._means.update({name: float(value) for name, value in values.items()})

    def every(self, steps: int, body: Callable[[], object]) -> None:
        """Call `body` after each `steps` committed steps, on all ranks: to evaluate, or to save.

        It may use collectives. It is called again, as a whole, if a rank is lost in it, then also on the
        replacement. Raises `UserError` in a step.
        """
        if steps < 1 or self._then is not None:
            raise UserError(f"run.every({steps}, …): every 1 step or more, and before the loop")
        self._every.append((steps, body))

    def batches(self, loader: Any, *, epochs: int = 1) -> Iterator[Any]:
        """Yield the batches of `epochs` passes over `loader`, each once for every committed step.

        Calls `set_epoch` of samplers. A replacement continues with the step under way. Raises `UserError` for
        a loader that can be iterated once only.
        """
        loading.check(loader)
        for _ in range(epochs):
            number, self._claimed = self._claimed, self._claimed + 1
            if self._position.passes <= number:
                yield from self._pass(loader, number)

    # Passes.

    def _pass(self, loader: Any, number: int) -> Iterator[Any]:
        if self._position.passes < number:  # the last pass was left before its end
            self._position = self._position._replace(passes=number, at=0)
        self._loader = loader if loading.has_state(loader) else None
        source = self._opened(loader, number)
        while True:
            self._call_due()
            self._seed_for("batch", self._position.step)
            batch = next(source, self)
            if batch is self:
                break
            version, marks = self.version, loading.Marks(batch)
            while self.version == version:
                if marks.is_changed:
                    source = self._opened(loader, number)
                    self._seed_for("batch", self._position.step)
                    marks = loading.Marks(next(source))
                self._drawn = source.drawn
                yield marks.batch
        self._loader = self._loader_state = self._voted_state = None
        self._transact(self._position._replace(passes=number + 1, at=0), lambda: None)

    def _opened(self, loader: Any, number: int) -> loading.Source:
        position = self._position
        return loading.Source(
            loader,
            number=number,
            skip=position.at,
            seed_for=self._seed_for,
            step=position.step,
            ranks=self._ranks,
            state=self._loader_state,
        )

    def _seed_for(self, what: str, number: int) -> None:
        seed_all(self._seed, what, number, self._rank)

    def _call_due(self) -> None:
        """Call what `every` has been given and is due now."""
        while True:
            step, done = self._position.step, self._position.every
            due = [body for steps, body in self._every if step and step % steps == 0]
            if done >= len(due):
                return
            self._transact(self._position._replace(every=done + 1), due[done])

    def _transact(self, then: Position, body: Callable[[], object]) -> None:
        """Make a transaction that is no step."""
        while self._position != then:
            self.begin(then)
            error: BaseException | None = None
            try:
                body()
            except BaseException as raised:
                error = raised
                if not self.end(error):
                    raise
            else:
                self.end(None)

    # One transaction.

    def begin(self, then: Position | None = None) -> None:
        """A transaction begins: of a step, unless `then` is the position after it."""
        if self._then is not None:
            raise UserError("run.step() in run.step() or in run.every(): steps are not nested")
        old = self._position
        self._then = old._replace(step=old.step + 1, at=old.at + 1, every=0) if then is None else then
        self._committed = False
        self._means.clear()
        self._keep()
        self._seed_for("step" if then is None else "every", self.version)
        try:
            if then is None:
                faults.hit(points.BEGIN)
                if self._rehearses:
                    CONTINUITY.rehearse()
                    return
            if CONTINUITY.broken is not None:
                self._recover()
        except BaseException:
            self._then = None
            raise

    def end(self, error: BaseException | None) -> bool:
        """Its body has ended; return whether its error is dealt with."""
        try:
            if isinstance(error, StepAborted):
                return True
            if error is not None:
                if CONTINUITY.mode is Mode.ALONE and isinstance(error, Exception):
                    self._end_rehearsal()  # a check of what all ranks have computed may fail for one alone
                    return True
                if self._committed or not self._is_of_a_loss(error):
                    return False
                self._recover()
                return True
            if not self._committed:
                try:
                    self._commit()
                except StepAborted:
                    return True
            faults.hit(points.DONE)
            return True
        finally:
            self._then = None
            CONTINUITY.end_tail()

    @staticmethod
    def _is_of_a_loss(error: BaseException) -> bool:
        """Whether an error follows from a loss; out of `backward()` its type and its cause are gone."""
        seen: set[int] = set()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, LOSSES):
                CONTINUITY.note(cause)
                return True
            seen.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        return CONTINUITY.broken is not None and isinstance(error, Exception)

    def _before_update(self, *_: Any) -> None:
        """Vote before the first optimizer of a step updates."""
        if self._then is None:
            if self._shards is not None:
                raise UserError(
                    "optimizer.step() outside of run.step(): its update would miss the copy of the shard"
                )
            if CONTINUITY.standing is Standing.IN_LOOP:
                warnings.warn(
                    "optimizer.step() outside of run.step(): its update is lost on a rank that is replaced",
                    RuntimeWarning,
                    stacklevel=3,
                )
        elif not self._committed:
            self._commit(updates=True)

    def _after_update(self, *_: Any) -> None:
        """Make the update of the ward as well."""
        if self._shards is not None and self._then is not None and self._committed:
            self._shards.replay()
        faults.hit(points.UPDATED)

    def _commit(self, *, updates: bool = False) -> None:
        """Commit the transaction under way. Raises `StepAborted` if it is to be repeated.

        updates: whether an optimizer updates after it.
        """
        if CONTINUITY.mode is Mode.ALONE:
            self._end_rehearsal()
            raise StepAborted
        faults.hit(points.PREPARED)
        self._boundary.find_changed()
        try:
            if CONTINUITY.broken is not None:
                raise CONTINUITY.broken
            rows = self._vote(updates=updates)
            self._do(tx.AllVoted(ballots=tuple(votes.ballot_of(row) for row in rows)))
            self._rows, promoted = rows, False
            faults.hit(points.VOTED)
        except LOSSES as error:
            CONTINUITY.note(error)
            promoted = self._recover()
            if not promoted:
                raise StepAborted from None
        assert self._then is not None
        self._has_stepped = self._has_stepped or self._then.step > self._position.step
        self._position, self._committed, self._loader_state = self._then, True, self._voted_state
        self.metrics = votes.means_of(self._rows, sorted(self._means)) or self.metrics
        if self._recorder is not None:
            self._recorder.put(self._rows, CONTINUITY.epoch)
        self._drawn = Drawn()
        CONTINUITY.begin_tail(alone=promoted)

    def _end_rehearsal(self) -> None:
        """A step was made alone, so that models know their graphs: repeat it with the others."""
        CONTINUITY.end_rehearsal()
        self._go_back()
        self._rehearses = False

    def _go_back(self, flags: Sequence[bool] = ()) -> None:
        """Be where the transaction under way began."""
        self._boundary.go_back()
        self._buckets.reset(flags)
        if self._shards is not None:
            self._shards.modules.reset()
        # A model that has not made a whole step would make other calls than the others in its first one.
        self._rehearses = self._buckets.learn and not self._has_stepped

    def _vote(self, *, updates: bool) -> tuple[bytes, ...]:
        compares = updates and self._state.version % tx.DIGEST_EVERY == 0
        digest = self._buckets.digest() if compares else tx.NO_DIGEST
        shard, copy = self._shards.digests() if compares and self._shards is not None else ((), ())
        (action,) = self._do(tx.Prepared(digest=digest, updates=updates, shard=shard, copy=copy))
        if isinstance(action, tx.Deliver):
            assert self._shards is not None
            self._shards.deliver(self._exchange.group, self._exchange.end_ns)
            faults.hit(points.DELIVERED)
            (action,) = self._do(tx.Delivered())
        assert isinstance(action, tx.Vote)
        if self._loader is not None:
            self._voted_state = loading.state_of(self._loader)
        own = {
            "buffers": {n: b for n, b in self._boundary.buffers() if n in self._boundary.changing},
            "loader": None if self._loader is None else self._voted_state,
        }
        noted: votes.Noted | None = None
        if self._out is not None and self._then is not None:
            step = self._then.step if self._then.step > self._position.step else 0
            noted = votes.Noted(step, tuple(sorted(self._means)), self._drawn if step else Drawn())
        return self._exchange.gather(votes.pack(action.ballot, self._means, own, noted))

    def _keep(self) -> None:
        """Keep what the transaction that begins may change."""
        self._boundary.keep()
        self._buckets.keep()
        if self._shards is not None:
            self._shards.modules.keep()

    # Losses.

    def _found(self) -> None:
        """The first ranks of the run: they have the same model, and draw from the same seed."""
        names = [described(name, tensor) for name, tensor in own_tensors(self._models)]
        refused = refusal(self._out) if self._out is not None and self._rank == 0 else ""
        try:
            records = self._out is not None
            self._seed = self._exchange.found(names, self._seed, records=records, refusal=refused)
            if self._shards is not None:
                self._perform(self._do(self._met()))
        except LOSSES as error:
            CONTINUITY.note(error)
            CONTINUITY.enter()
            self._recover()

    def _recover(self) -> bool:
        """Meet the others in a new view; return whether the transaction under way is committed after all.

        Raises `LoopLost`, and what cannot be mended by meeting again.
        """
        began = now_ns()
        for _ in range(AGAIN_MAX):
            try:
                self._do(tx.Cut())
                come_together(self._timeout)
                faults.hit(points.MEET)
                promoted = self._perform(self._do(self._met()))
                if self._state.phase in (tx.Phase.MEETING, tx.Phase.FRESH):
                    continue  # ranks that were behind promote, and then meet again
            except LOSSES as error:
                CONTINUITY.note(error)
                log.info("a rank was lost while the loop recovered: meet again", reason=str(error))
            else:
                after_ms = (now_ns() - began) / 1e6
                log.info("the loop goes on", step=self.steps, promoted=promoted, after_ms=round(after_ms, 1))
                return promoted
        raise LoopLost(f"{AGAIN_MAX} meetings after a loss have failed")

    def _met(self) -> tx.Met:
        return tx.Met(place=self._rank, reports=self._exchange.reports(self._state.report))

    def _perform(self, actions: Sequence[tx.Action]) -> bool:
        promoted, version = False, -1
        for action in actions:
            match action:
                case tx.Share(source=source):
                    self._share(source)
                    promoted = self._perform(self._do(tx.Shared()))
                case tx.Promote():
                    promoted = True
                case tx.Repeat():
                    self._go_back()
                case tx.Give(to=places):
                    self._give(places)
                case tx.Take(source=source):
                    self._taken(self._take(source))
                case tx.Move():
                    version = self._move(action, version)
                case tx.Meet():
                    break
                case _:
                    raise AssertionError(f"{action} came after a meeting")
        if self._state.phase is tx.Phase.TAKING and version >= 0:
            self._taken(version)
        return promoted

    def _move(self, move: tx.Move, version: int) -> int:
        """Send or receive; return the version that has come, or else `version`."""
        shards = self._shards
        assert shards is not None
        if move.source == self._rank:
            if move.what is tx.What.REST:
                self._give([move.target])
            else:
                shards.send(self._exchange.group, move.what, move.target)
        elif move.what is tx.What.REST:
            return self._take(move.source)
        else:
            shards.receive(self._exchange.group, move.what, move.source)
            if move.what is tx.What.COPY and not self._state.fresh:
                self._do(tx.Kept())
        return version

    def _do(self, event: tx.Event) -> list[tx.Action]:
        """Have the machine take an event; return its actions. Raises the error of a failure."""
        actions = self._machine.handle(event, now_ns=now_ns())
        for action in actions:
            if isinstance(action, tx.Fail):
                shards, number = self._shards, action.parameter
                first = "" if shards is None or number is None else f"{shards.name_of(number)}: "
                raise LoopLost(action.reason) if action.lost else UserError(first + action.reason)
        return list(actions)

    def _share(self, source: int) -> None:
        """Have all ranks hold the votes of the last commit."""
        rows = self._exchange.share(self._rows if self._rank == source else (), source)
        if self._state.voted:
            self._rows = rows

    def _give(self, places: Sequence[int]) -> None:
        carried = Carried(
            version=self.version,
            seed=self._seed,
            position=tuple(self._position),
            rows=self._rows,
            flags=tuple(self._buckets.flags),
        )
        own, moments = self._own_tensors, self._shards is None
        for place in places:
            give(self._exchange.group, place, own, self._optimizers, self._boundary, carried, moments=moments)

    @property
    def _own_tensors(self) -> list[tuple[str, Any]]:
        return own_tensors(self._models, parameters=self._shards is None)

    def _take(self, source: int) -> int:
        """Receive the state, but for shards; return its version."""
        carried = take(self._exchange.group, source, self._own_tensors, self._optimizers, self._boundary)
        self._seed, self._position = carried.seed, Position(*carried.position)
        self._rows = carried.rows
        if carried.rows:
            own = votes.own_of(carried.rows[self._rank])
            found = dict(self._boundary.buffers())
            with torch.inference_mode():
                for name, value in own["buffers"].items():
                    found[name].detach().copy_(value)
            self._loader_state = self._voted_state = own["loader"]
        self._keep()
        self._go_back(carried.flags)
        self._keep()
        return carried.version

    def _taken(self, version: int) -> None:
        self._do(tx.Taken(version=version))
        faults.hit(points.TAKE)


def resilient(
    model: Any,
    optimizer: Any,
    *others: Any,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Run:
    """Return a run whose steps survive the loss of ranks; see docs/GUIDE_TORCH.md.

        run = zbmd.torch.resilient(model, optimizer, scheduler)
        for x, y in run.batches(loader, epochs=10):
            with run.step():
                ...
                optimizer.step()

    model, optimizer: one, or a list. others: what else has a `state_dict`: schedulers, a `GradScaler`. seed:
    of random numbers in steps; default: that of `torch.manual_seed` on rank 0. out: a directory, which rank 0
    writes the commit log and the metrics of the loop to, for `zbmd ledger`. All ranks call it, after all
    process groups are made. Raises `UserError` for what cannot be continued, and `DistBackendError`.
    """
    models = [*model] if isinstance(model, list | tuple) else [model]
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for each in others:
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise UserError(
                f"{type(each).__name__} has no state_dict and load_state_dict: it cannot be continued"
            )
    try:
        return Run(models, optimizers, others, seed, None if out is None else Path(out))
    except ZbmdError as error:
        if isinstance(error, UserError):
            raise
        raise as_torch_error(error) from error
