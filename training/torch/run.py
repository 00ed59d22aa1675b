"""A training loop that survives losses: `resilient`, and the run that it returns.

Errors of a lost rank end the body of a step at `with run.step()`, where all survivors meet again; the batch
is given again, unless the step was committed. See `transaction` for the protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

from zbmd.actors.rank.member import Worker
from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES, Mode
from zbmd.training.autograd import spans
from zbmd.training.checkpoint.sharded import Piece
from zbmd.training.redundancy.interface import Wish
from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch import batches as loading
from zbmd.training.torch import points, votes
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.ballots import DIGEST_EVERY
from zbmd.training.torch.durable.checkpoints import LoopCheckpoints, Options
from zbmd.training.torch.durable.memory import LoopMemory
from zbmd.training.torch.durable.recorder import Recorder, claiming, plan_of
from zbmd.training.torch.durable.saved import pieces_of, resumed
from zbmd.training.torch.durable.slow_ranks import SlowLoopRanks
from zbmd.training.torch.exchange import Exchange
from zbmd.training.torch.meetings import Meetings, supervised
from zbmd.training.torch.rollback import seed_all
from zbmd.training.torch.state import LoopState, shares_of
from zbmd.training.torch.step import Step, StepAborted, judge_outside, warn_of_missing_votes
from zbmd.training.torch.transfer import Position
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

CallP = ParamSpec("CallP")
ResultT = TypeVar("ResultT")


class Run:
    """A resilient loop over `models`, `optimizers`, and `others` with a `state_dict` (scheduler, scaler).

    seed: of all random numbers in steps; default: that of `torch.manual_seed` on rank 0.
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        others: Sequence[Any],
        seed: int | None,
        options: Options,
    ) -> None:
        (worker, launched), ranks = supervised(), int(dist.get_world_size())
        self._options, self._shrinks = options, 0 < launched.ranks_min < launched.world_size
        self._state = LoopState(
            models,
            optimizers,
            others,
            rank=int(dist.get_rank()),
            ranks=ranks,
            seed=torch.initial_seed() if seed is None else seed,
            mirror=options.mirror,
        )
        self._then: Position | None = None
        """The position once the transaction under way is committed; None between two."""
        self._claimed, self._committed, self._is_step = 0, False, False
        self._updated: set[int] = set()
        """The optimizers that have updated in the step under way, if updates are voted on once made."""
        self._steps_open = 0
        """Calls of `step()` under way: PyTorch calls the hooks for that of a base class, too."""
        self._means: list[dict[str, float]] = []
        """Of each share of the batch of the step under way."""
        self._every: list[tuple[int, Callable[[], object]]] = []
        self._drawn: list[Drawn] = []
        """Of the batch of the step under way: of each share that this rank has."""
        most = launched.world_size if self._shrinks else ranks
        of_batch = most if options.exact is True else int(options.exact) or most
        self._shares = shares_of(self._state, of_batch, exact=options.exact, shrinks=self._shrinks)
        self._deals = False
        """Whether a batch of `batches` is out."""
        self._may_grow = False
        """Whether the batches of the pass under way can be dealt to more ranks."""
        self._grows_after = 0
        """The epoch in which a vote has asked all ranks to take others in; 0: none has."""
        self._recorder: Recorder | None = None
        """Of rank 0, if the loop is recorded."""
        self._checkpoints: LoopCheckpoints | None = None
        self.metrics: dict[str, float] = {}
        """Means over all ranks of what the last committed step gave to `mean`."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        self._plan = plan_of(models, optimizers, self._shares.shares)
        if options.exact or ranks < self._shares.shares:
            self._shares.assign(self._state.rank, ranks)
        self._run_id = f"{worker.job:016x}"
        self._memory = LoopMemory(worker, launched, self._plan.text())
        self._slow = SlowLoopRanks(worker, options.out, options.on_straggler, options.profile_ops)
        for part in (self._memory, self._slow, self._state):
            CONTINUITY.at_leave(part.close)
        self._begin(worker, seed, replaces=CONTINUITY.mode is Mode.ALONE)
        CONTINUITY.enter()

    def _begin(self, worker: Worker, seed: int | None, *, replaces: bool) -> None:
        """Have the state to begin with: of others, from memory, from a checkpoint, or a new one.

        replaces: this rank another one.
        """
        options, state = self._options, self._state
        limit = timedelta(seconds=CONTINUITY.groups[0].limit_s)
        recalls = not replaces and self._memory.agree(Exchange(limit), state.rank)
        fresh, held = replaces or recalls, self._run_id if recalls else ""
        out = None if replaces or state.rank else options.out
        with nullcontext("") if out is None else claiming(out, resume=options.resume, held=held) as taken:
            version, refused = (0, taken) if fresh else self._resumed(seed, taken)
            of = worker, state, self._memory
            self._meetings = Meetings(*of, version=version, fresh=fresh, shrinks=self._shrinks)
            self._meetings.rest = self._close_recorder
            state.keep()
            if replaces:
                faults.hit(points.COMES)
                self._meetings.recover()
            else:
                self._meetings.found(options=options.text(), refusal=refused)
            self._memory.enter(self._meetings.exchange.group, is_sharded=state.shards is not None)
            self._divide_shares()
            self._open_checkpoints(fresh=fresh)  # which reads what steps after the last checkpoint have noted
            self._open_recorder(fresh=fresh)
        if recalls or version:
            self._memory.tell_resumed(self.steps, state.rank, otherwise=options.saves.where)

    @property
    def _own_shares(self) -> tuple[int, ...]:
        """The shares of a batch that this rank computes."""
        return self._shares.own(self._state.rank)

    def _resumed(self, seed: int | None, refused: str) -> tuple[int, str]:
        """Go on from a checkpoint, if that is asked for; see `saved.resumed`."""
        return resumed(self._options, self._state, self._plan, seed, refused)

    def _open_recorder(self, *, fresh: bool) -> None:
        """Be the writer of the records, on rank 0. fresh: another one was."""
        options, state = self._options, self._state
        if options.out is None or state.rank:
            return
        self._recorder = Recorder(
            options.out,
            run_id=self._run_id,
            plan=self._plan,
            seed=state.seed,
            fresh=fresh,
            resumed=state.position.step if options.resume else None,
        )
        CONTINUITY.at_leave(self._recorder.close)
        if fresh:
            self._recorder.amend(state.rows, state.position.step, CONTINUITY.epoch)

    def _open_checkpoints(self, *, fresh: bool) -> None:
        options, state = self._options, self._state
        if options.out is None:
            return
        self._checkpoints = LoopCheckpoints(
            options.saves,
            options.out,
            run_id=self._run_id,
            plan=self._plan.text(),
            first=state.position.step if options.resume else 0,
            begins=not fresh,
            note=lambda *of: None if self._recorder is None else self._recorder.note_pace(*of),
        )
        self._checkpoints.enter(self._meetings.epoch, state.rank)
        CONTINUITY.at_leave(self._checkpoints.close)

    @property
    def steps(self) -> int:
        """The number of committed steps."""
        return self._state.position.step

    @property
    def version(self) -> int:
        """The number of committed transactions: steps, calls of `every`, ends of passes, saves."""
        return self._meetings.machine.version

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
        self._means = self._means or [{}]
        self._means[-1].update({name: float(value) for name, value in values.items()})

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
            if self._state.position.passes <= number:
                yield from self._pass(loader, number)
        if self._options.saves.every or self._asked_to_save():
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last committed step, which is durable when rank 0 goes on.

        All ranks call it behind their last step, or have it called: `run.every(n, run.save)`. Raises
        `UserError` in a step, and in a loop without `out`. A full disk is reported, and ends nothing.
        """
        position, then, checkpoints = self._state.position, self._then, self._checkpoints
        if checkpoints is None or (then is not None and then.step > position.step):
            raise UserError("run.save(): not in a step, and with zbmd.torch.resilient(…, out=DIRECTORY)")
        if then is not None:
            checkpoints.save(self._meetings.exchange.group, position.step, self._pieces)
        elif not position.saved:
            self._transact(position._replace(saved=1), self.save)

    def _pieces(self) -> list[Piece]:
        return pieces_of(self._state, self.version)

    def _pass(self, loader: Any, number: int) -> Iterator[Any]:
        state = self._state
        if state.position.passes < number:  # the last pass was left before its end
            state.position = state.position._replace(passes=number, at=0)
        self._may_grow = loading.has_shares(loader)
        shares = loading.SharesOfPass(
            lambda share: self._opened(loader, number, share),
            lambda share: self._seed_for("batch", self.steps, share=share),
        )
        while True:
            self._call_due()
            self._take_others_in()
            if state.position.passes != number:
                return  # the others have ended the pass while this rank had no part
            self._slow.begin(self.steps + 1)
            self._slow.phase(spans.DATA)
            shares.draw(self._own_shares, state.position.at)
            self._slow.phase(None)
            if not shares.batches:
                break
            version, self._deals = self.version, True
            while self.version == version:
                shares.repeat(self._own_shares)
                marks, drawn = shares.batches[self._shares.number]
                self._drawn[self._shares.number :] = [drawn]
                yield marks.batch
            self._deals = False
        state.end_pass()
        self._transact(state.position._replace(passes=number + 1, at=0), lambda: None)

    def _opened(self, loader: Any, number: int, share: int) -> loading.Source:
        # Not before: a replacement may have votes to give first, and its loader is not where the pass is.
        self._state.loader = loader if loading.has_state(loader) else None
        position, total = self._state.position, self._plan.ranks
        return loading.Source(
            loading.of_share(loader, share, total) if self._shares.is_on else loader,
            number=number,
            skip=position.at,
            seed_for=partial(self._seed_for, share=share),
            step=position.step,
            ranks=total,
            state=self._state.loader_state,
        )

    def _seed_for(self, what: str, number: int, *of: int, share: int) -> None:
        seed_all(self._state.seed, what, number, *of, share)

    def _call_due(self) -> None:
        """Call what `every` has been given and is due now."""
        while True:
            step, done = self.steps, self._state.position.every
            due = [body for steps, body in self._every if step and step % steps == 0]
            if done >= len(due):
                return
            self._transact(self._state.position._replace(every=done + 1), due[done])

    def _transact(self, then: Position, body: Callable[[], object]) -> None:
        """Make a transaction that is no step."""
        while self._state.position < then:  # the others may be further, if this rank had no part for a while
            if not self._meet_again():
                with Step(self, then):
                    body()

    def _asked_to_save(self) -> Wish:
        """Return what signals ask all ranks for, which is dealt with from now on."""
        asked = Wish.NOTHING
        if self._checkpoints is not None:
            asked = Wish(votes.asked_in(self._state.rows)) & (Wish.SAVE | Wish.STOP)
            self._checkpoints.granted(asked)
        return asked

    def _save_if_asked(self) -> None:
        """Save, and end the script, if a rank was asked to. Raises `SystemExit`."""
        if asked := self._asked_to_save():
            self.save()
        if asked & Wish.STOP:
            raise SystemExit

    def begin(self, then: Position | None = None) -> None:
        """A transaction begins: of a step, unless `then` is the position after it."""
        if self._then is not None:
            raise UserError("run.step() in run.step() or in run.every(): steps are not nested")
        if then is None and not self._shares.at:
            self._save_if_asked()
        old = self._state.position
        self._is_step = then is None
        self._then = Position(old.step + 1, old.passes, old.at + 1) if then is None else then
        self._committed, self._steps_open = False, 0
        self._updated.clear()
        if not self._shares.at:
            self._means.clear()
            self._state.keep()
            self._begin_beside(old.step)
            self._state.open(old.step + 1, leaves=self._meetings.machine.leaves)
        share = self._own_shares[self._shares.number]
        if then is None:
            self._slow.begin(old.step + 1)
            self._slow.phase(spans.FORWARD)
            self._shares.begin()
            self._means[self._shares.number :] = [{}]
            self._seed_for("step", old.step, share=share)
        else:
            self._seed_for("every", old.step, old.every, share=share)
        try:
            if then is None:
                faults.hit(points.BEGIN)
                if self._shares.is_on and not self._deals:
                    raise UserError("exact=… and --on-loss shrink take steps over batches of run.batches()")
                if self._state.rehearses or (self._shares.are_alone and not self._shares.is_last):
                    CONTINUITY.rehearse()
                    return
            # A body that has the batch of another share by then must not go on: its operations fail.
            if CONTINUITY.broken is not None and not self._shrinks and not self._shares.at:
                self._meet(self._meetings.recover)
        except BaseException:
            self._then = None
            raise

    def _begin_beside(self, step: int) -> None:
        """A transaction begins beside copies of the state: one that is no step may write all of it."""
        if not self._is_step:
            self._memory.staged()
        if (checkpoints := self._checkpoints) is not None and self._is_step:
            checkpoints.begin_step(step + 1, decides=self._state.rank == 0)
        elif checkpoints is not None:
            checkpoints.staged()

    def end(self, error: BaseException | None) -> bool:
        """Its body has ended; return whether its error is dealt with."""
        try:
            if isinstance(error, StepAborted):
                return True
            if error is not None:
                if CONTINUITY.mode is Mode.ALONE and self._shares.is_on:
                    CONTINUITY.end_rehearsal()
                    return False
                if CONTINUITY.mode is Mode.ALONE and isinstance(error, Exception):
                    self._end_rehearsal()  # a check of what all ranks have computed may fail for one alone
                    return True
                ended = self._meetings.machine.phase is tx.Phase.FAILED  # and its error comes with a loss
                if ended or self._committed or not CONTINUITY.is_of_a_loss(error):
                    return False
                self._meet(self._meetings.recover)
                return True
            if not self._committed:
                try:
                    self._commit(updates=len(self._updated) > 0)
                except StepAborted:
                    return True
            self._reached()
            faults.hit(points.DONE)
            return True
        finally:
            self._then = None
            self._slow.phase(None)
            CONTINUITY.end_tail()

    def _reached(self) -> None:
        """A transaction has ended: after a step, copy it to memory, and begin a checkpoint if one is due."""
        if not self._is_step or self._meetings.is_over or self._meetings.is_left_over:
            return
        state, group = self._state, self._meetings.exchange.group
        self._slow.phase(spans.CHECKPOINT)
        self._memory.keep(state, self.version)
        if self._checkpoints is not None:
            self._checkpoints.reached(group, self.steps, Wish(votes.asked_in(state.rows)), self._pieces)
        self._slow.stepped()

    def _before_update(self, *_: Any) -> None:
        """Vote before the first optimizer of a step updates."""
        if self._then is None and not self._steps_open:
            judge_outside(is_sharded=self._state.shards is not None)
        self._steps_open += 1
        if self._then is None or self._steps_open > 1:
            return
        mirror = None if self._state.shards is None else self._state.shards.mirror
        if not self._committed and mirror is None:
            self._commit(updates=True)
        elif not self._committed and mirror is not None:
            self._repeat_if_alone()
            self._staged()
            mirror.begin(compares=self._compares)
            faults.hit(points.UPDATING)
        elif mirror is not None:
            raise UserError("optimizer.step() after each optimizer has updated: make it a step of its own")
        CONTINUITY.updates = mirror is None
        self._slow.phase(spans.OPTIMIZER)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        """Make the update of the ward as well; or vote, if updates are voted on once they are made."""
        self._steps_open -= 1
        if self._steps_open > 0:
            return
        CONTINUITY.updates, shards = False, self._state.shards
        if shards is not None and self._then is not None:
            if shards.mirror is None and self._committed:
                shards.replay()
            elif shards.mirror is not None:
                self._updated.add(id(optimizer))
                if len(self._updated) == len(self._state.optimizers):
                    self._commit(updates=True)
        self._slow.phase(None)
        faults.hit(points.UPDATED)

    @property
    def _compares(self) -> bool:
        """Whether votes compare what the transaction begins with; after one step unreduced gradients show."""
        return self.version % DIGEST_EVERY == 0 or (self.version == 1 and self._state.shards is None)

    def _repeat_if_alone(self) -> None:
        """End a pass that others do not make: raises `StepAborted`."""
        if CONTINUITY.mode is Mode.ALONE or (self._is_step and not self._shares.is_last):
            self._end_rehearsal()
            raise StepAborted

    def _staged(self) -> None:
        """Wait until what an update writes is copied."""
        self._memory.staged()
        if self._checkpoints is not None:
            self._checkpoints.staged()

    def _commit(self, *, updates: bool = False) -> None:
        """Commit the transaction under way. Raises `StepAborted` if it is to be repeated.

        updates: whether an optimizer updates after it.
        """
        self._repeat_if_alone()
        faults.hit(points.PREPARED)
        state = self._state
        state.find_changed(self._options.exact)
        try:
            if CONTINUITY.broken is not None:
                raise CONTINUITY.broken
            self._slow.phase(spans.CHECKPOINT)
            self._staged()
            state.settle()
            rows = self._vote(updates=updates)
            self._grows_after = self._meetings.epoch if votes.asked_in(rows) & votes.MEET else 0
            self._meetings.do(tx.AllVoted(ballots=tuple(votes.ballot_of(row) for row in rows)))
            state.rows, promoted = rows, False
            faults.hit(points.VOTED)
        except LOSSES as error:
            CONTINUITY.note(error)
            promoted = self._meet(self._meetings.recover)
            if not promoted:
                raise StepAborted from None
        assert self._then is not None
        state.committed(self._then)
        self._committed = True
        self._shares.at = 0
        if not self._meetings.is_over:
            self._use_votes()
        elif self._is_step and (self._means[0] or self._recorder is not None):
            warn_of_missing_votes(self.steps)
        if self._is_step and not promoted and not self._meetings.is_over:
            self._slow.voted(self.steps, state.rows)
        if self._is_step:  # and not a save before one, whose batch is drawn
            self._drawn.clear()
        CONTINUITY.begin_tail(alone=promoted)

    def _use_votes(self) -> None:
        """Do what needs the votes of a transaction that is committed."""
        rows, names = self._state.rows, sorted(self._means[0] if self._means else ())
        self.metrics = votes.means_of(rows, names) or self.metrics
        if self._recorder is not None:
            self._recorder.put(rows, CONTINUITY.epoch)
        if self._checkpoints is not None:
            self._checkpoints.voted(votes.reports_in(rows))

    def _take_others_in(self) -> None:
        """Before the next batch: have ranks that wait take part, if the last vote says so."""
        if self._grows_after == self._meetings.epoch:
            self._state.keep()
            self._meet(self._meetings.grow)
        else:
            self._meet_again()

    def _meet_again(self) -> bool:
        """Between two transactions: meet the others if this rank has promoted since; return whether."""
        if again := self._meetings.machine.meets_again:
            self._state.keep()  # or it would go back to before the step that it has promoted
            self._meet(self._meetings.recover)
        return again

    def _meet(self, meeting: Callable[[], bool]) -> bool:
        """Meet the others; return whether the transaction under way is committed after all."""
        self._memory.staged()
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        promoted = meeting()
        if not self._meetings.is_over and not self._meetings.is_left_over:
            self._memory.enter(self._meetings.exchange.group, is_sharded=self._state.shards is not None)
            self._divide_shares()
            if self._checkpoints is not None:
                self._checkpoints.enter(self._meetings.epoch, self._state.rank)
        return promoted

    def _divide_shares(self) -> None:
        """After a meeting: compute the shares of a batch that are this rank's now, and write the records."""
        self._shares.at = 0
        if self._meetings.divides:
            self._shares.assign(self._state.rank, self._state.ranks)
        self._slow.enter(self._meetings.exchange.group, self._shares.passes(self._state.ranks))
        if not self._meetings.divides:
            return
        if self._state.rank:
            self._close_recorder()
        if self._recorder is None and self._checkpoints is not None:
            self._open_recorder(fresh=True)

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _end_rehearsal(self) -> None:
        """A pass of a step has ended, of one share of a batch, or so that models know their graphs.

        The next one is of the next share, or repeats it with the others.
        """
        CONTINUITY.end_rehearsal()
        self._state.go_back()
        self._state.rehearses = False
        if self._shares.is_on:
            self._shares.at += 1

    def _vote(self, *, updates: bool) -> tuple[bytes, ...]:
        state, shards, checkpoints = self._state, self._state.shards, self._checkpoints
        self._slow.phase(spans.DIGEST)
        digests, copy = state.digests() if updates and self._compares else ((), ())
        self._slow.phase(spans.COMM)
        (action,) = self._meetings.do(tx.Prepared(updates=updates, digests=digests, copy=copy))
        if isinstance(action, tx.Deliver):
            if action.leaves:
                self._memory.left(state, action.version, updates=updates)
            elif shards is not None:
                shards.deliver(self._meetings.exchange.group, self._meetings.exchange.end_ns)
            faults.hit(points.DELIVERED)
            (action,) = self._meetings.do(tx.Delivered())
        assert isinstance(action, tx.Vote)
        noted: votes.Noted | None = None
        if self._then is not None:
            step = self._then.step if self._then.step > self.steps else 0
            drawn = self._drawn if step and self._options.out else ()
            noted = votes.note_for(step, self._means, drawn, self._slow.sample)
        asks = 0 if checkpoints is None else int(checkpoints.wishes)
        if self._deals and self._may_grow and self._meetings.is_offered_more:
            asks |= votes.MEET
        saves = votes.NOTHING_SAVED if checkpoints is None else checkpoints.report
        row = votes.pack(action.ballot, self._means, state.own(), noted, asks=asks, saves=saves)
        return self._meetings.exchange.gather(row, "optimizer.step()")
