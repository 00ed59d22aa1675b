"""The meetings of a loop's ranks: before the first step, and after a loss, when state moves.

`transaction` decides; here is done what it asks for, between the ranks that have met.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import structlog

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker
from zbmd.collectives.algorithms.shard_tree import whole_of
from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES, LoopLost, Standing
from zbmd.collectives.torch.rendezvous import come_together
from zbmd.collectives.torch.world import ScriptsEnded, world
from zbmd.training.run.journal import captured_machine
from zbmd.training.torch import points
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.durable.memory import LoopMemory
from zbmd.training.torch.encoding import from_blob, to_blob
from zbmd.training.torch.exchange import Exchange
from zbmd.training.torch.fsdp.division import Move, What
from zbmd.training.torch.state import LoopState
from zbmd.training.torch.transfer import described, own_tensors
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import DeadlineExceeded, UserError
from zbmd.transport.native._native import now_ns

dist: Any = importlib.import_module("torch.distributed")

log: Final = structlog.stdlib.get_logger("zbmd.torch")

AGAIN_MAX: Final = 64
"""Meetings after one loss, before the loop gives up; for a rank without a part, time limits that it waits."""
WAITS_MAX: Final = 1 << 16
"""Views of one recovery in which a rank may have no part."""


class Meetings:
    """Those of one rank, whose state is `state`. version: that it begins with. fresh: it replaces another.

    memory: has what a fresh rank may recall. shrinks: whether the loop goes on with any number of ranks.
    """

    def __init__(
        self,
        worker: Worker,
        state: LoopState,
        memory: LoopMemory,
        *,
        version: int,
        fresh: bool,
        shrinks: bool,
    ) -> None:
        self._worker, self._state, self._shrinks, self._memory = worker, state, shrinks, memory
        self.rest: Callable[[], object] = lambda: None
        """Gives up what a rank without a part must not have."""
        self.divides = False
        """Whether the loop has had other ranks than at its beginning, so that shares are divided."""
        self._timeout = timedelta(seconds=CONTINUITY.groups[0].limit_s)
        self.exchange = Exchange(self._timeout)
        memory.leave(state)
        if not fresh:
            memory.found(self.exchange.group, state, version)
        self.machine = tx.Transactions(
            version=version,
            fresh=fresh,
            sharded=state.shards is not None,
            place=state.rank,
            size=state.ranks,
            held=memory.held if fresh else (),
            distinct=0 if state.shards is None else state.shards.distinct,
            outlives=not fresh and memory.outlives(version),
        )
        self._captured = captured_machine(
            worker, tx.TRANSACTION, "loop", self.machine, tx.transaction_config(self.machine)
        )

    def do(self, event: tx.Event) -> list[tx.Action]:
        """Have the machine take an event; return its actions. Raises the error of a failure."""
        actions = self._captured.handle(event, now_ns=now_ns())
        for action in actions:
            if isinstance(action, tx.Fail):
                number = action.parameter
                first = "" if number is None else f"{self._state.name_of(number)}: "
                raise LoopLost(action.reason) if action.lost else UserError(first + action.reason)
        return list(actions)

    @property
    def is_offered_more(self) -> bool:
        """Whether there are ranks that wait to take part, and can."""
        latest = self._worker.latest
        offered = whole_of(len(latest.members), CONTINUITY.replica)
        return self._shrinks and latest.epoch > self.epoch and offered > self._state.ranks

    @property
    def is_left_over(self) -> bool:
        """Whether this rank has no part any more, or will have none after its step."""
        return self._state.rank >= self._state.ranks

    @property
    def is_over(self) -> bool:
        """Whether others have finished their scripts: nobody meets again, and this rank has not all votes."""
        return self.machine.phase is tx.Phase.ENDED

    @property
    def epoch(self) -> int:
        """The epoch of the view in which all have met last."""
        return self.exchange.group.epoch

    def found(self, *, options: str, refusal: str) -> None:
        """Meet as the first ranks of the run, which have the same model, and draw from the same seed.

        options, refusal: see `Exchange.found`.
        """
        state = self._state
        names = [described(name, tensor) for name, tensor in own_tensors(state.models)]
        try:
            state.seed = self.exchange.found(
                names, state.seed, options=options, version=self.machine.version, refusal=refusal
            )
            while self.machine.phase in (tx.Phase.MEETING, tx.Phase.FRESH):
                self._perform(self.do(self._met()))
        except LOSSES as error:
            CONTINUITY.note(error)
            CONTINUITY.enter()
            self.recover()

    def grow(self) -> bool:
        """Between two steps: meet in a view with more ranks. Returns what `recover` does."""
        epoch = self.epoch
        try:
            self.exchange.gather(b"")  # nobody gives its groups up while another one ends the step
        except LOSSES as error:
            CONTINUITY.note(error)
        faults.hit(points.GROWS)
        return self.recover(after=epoch)

    def recover(self, *, after: int = 0) -> bool:
        """Meet the others in a new view; return whether the transaction under way is committed after all.

        A rank without a part in the view waits for another one. after: see `come_together`. Raises
        `LoopLost`, and what cannot be mended by meeting again; `SystemExit` if the others finish meanwhile.
        """
        try:
            self.exchange.with_all = True
            promoted = self._recovered(after)
            for _ in range(WAITS_MAX):
                if self.machine.phase is not tx.Phase.WAITING:
                    return promoted
                self.rest()
                ranks, of = self._state.ranks, CONTINUITY.replica
                log.info("this rank waits: it completes no replica", ranks=ranks, replica=of)
                promoted = self._recovered(self.epoch, waits=True)
        finally:
            self.exchange.with_all = False
        raise LoopLost(f"this rank was left over by whole replicas {WAITS_MAX} times")

    def _recovered(self, after: int, *, waits: bool = False) -> bool:
        """Meet until all have come to an end; see `recover`. waits: see `come_together`."""
        began, group, again = now_ns(), self.exchange.group, waits
        voters = [each for each in group.view.ids if each.rank in group.members]
        for _ in range(AGAIN_MAX):
            try:
                self.do(tx.Cut(outlives=self._memory.outlives(self.machine.version)))
                before = self.exchange.group.members
                base = come_together(self._timeout, shrinks=self._shrinks, after=after, waits=again)
                self.divides = self.divides or (base.members != before and not self.machine.fresh)
                self._state.rank = int(base.rank)
                self._state.ranks = whole_of(int(base.size), CONTINUITY.replica)
                if again and not self.is_left_over and self._state.shards is not None:
                    self._state.shards.come_back(self._state.rank, self._state.ranks)
                again = again and self.is_left_over
                faults.hit(points.MEET)
                promoted = self._perform(self.do(self._met()))
                if self.machine.phase in (tx.Phase.MEETING, tx.Phase.FRESH):
                    continue  # ranks that were behind promote, and then meet again
            except DeadlineExceeded as error:
                if not again:
                    raise
                log.info("this rank still waits: it completes no replica", reason=str(error))
            except ScriptsEnded as error:
                if waits:
                    log.info("the loop ended while this rank waited, without a part in it")
                    raise SystemExit from None
                self.do(tx.Ended(lost=bool(error.lost_of(voters)), reason=str(error)))
                log.info("the loop ends: others have seen its last votes, and finished", reason=str(error))
                self._state.rows = ()
                return True
            except LOSSES as error:
                CONTINUITY.note(error)
                log.info("a rank was lost while the loop recovered: meet again", reason=str(error))
            else:
                after_ms, step = (now_ns() - began) / 1e6, self._state.position.step
                log.info("the loop goes on", step=step, promoted=promoted, after_ms=round(after_ms, 1))
                return promoted
        raise LoopLost(f"{AGAIN_MAX} meetings after a loss have failed")

    def _met(self) -> tx.Met:
        reports, self.divides = self.exchange.reports(self.machine.report, divides=self.divides)
        return tx.Met(place=self._state.rank, reports=reports)

    def _perform(self, actions: Sequence[tx.Action]) -> bool:
        promoted, version = False, -1
        for action in actions:
            match action:
                case tx.Share(source=source):
                    self._share(source)
                    promoted = self._perform(self.do(tx.Shared()))
                case tx.Promote():
                    promoted = True
                case tx.Repeat():
                    self._settle()
                    self._state.go_back()
                case tx.Recall(held=held):
                    self._memory.recall(held, self._state)
                    faults.hit(points.RECALLED)
                    self._perform(self.do(tx.Recalled()))
                case tx.Give(to=places):
                    self._state.give(self.exchange.group, places, self.machine.version)
                case tx.Take(source=source):
                    self._taken(self._state.take(self.exchange.group, source))
                case Move():
                    version = self._move(action, version)
                case tx.Divide():
                    self._divide(action)
                case tx.Adopt():
                    self._adopt()
                case tx.Meet() | tx.Wait():
                    break
                case _:
                    raise AssertionError(f"{action} came after a meeting")
        if self.machine.phase is tx.Phase.TAKING and version >= 0:
            self._taken(version)
        return promoted

    def _move(self, move: Move, version: int) -> int:
        """Send or receive; return the version that has come, or else `version`."""
        shards, group = self._state.shards, self.exchange.group
        assert shards is not None
        if move.what is What.LEFT:
            self._memory.recall_shard(move.version, self._state)
            faults.hit(points.RECALLED)
        elif move.source == self._state.rank:
            if move.what is What.REST:
                self._state.give(group, [move.target], self.machine.version)
            else:
                shards.send(group, move.what, move.target)
        elif move.what is What.REST:
            return self._state.take(group, move.source)
        else:
            shards.receive(group, move.what, move.source)
            if move.what is What.COPY and not self.machine.fresh:
                self.do(tx.Kept())
        return version

    def _divide(self, action: tx.Divide) -> None:
        """Have this rank's part of the next division; the old one counts until all have theirs."""
        shards = self._state.shards
        assert shards is not None
        blob = to_blob(shards.contents(), "moments") if self._state.rank == action.source else b""
        contents = from_blob(self.exchange.gather(blob)[action.source], "what a state consists of")
        group, end_ns = self.exchange.group, self.exchange.end_ns
        shards.divide(group, end_ns, action.division, action.holders, contents)
        faults.hit(points.DIVIDED)
        (agree,) = self.do(tx.Divided())
        assert isinstance(agree, tx.Agree)
        self.exchange.gather(b"")
        faults.hit(points.AGREED)
        self._perform(self.do(tx.Agreed()))

    def _adopt(self) -> None:
        shards, division = self._state.shards, self.machine.division
        assert shards is not None and division is not None
        shards.adopt(division)
        log.info("the state is divided again", ranks=division.size, place=division.place)
        self._settle()

    def _settle(self) -> None:
        if self._state.shards is not None:
            self._state.shards.settle(self._state.rank, self._state.ranks)

    def _share(self, source: int) -> None:
        """Have all ranks hold the votes of the last commit."""
        rows = self.exchange.share(self._state.rows if self._state.rank == source else (), source)
        if self.machine.voted:
            self._state.rows = rows

    def _taken(self, version: int) -> None:
        self.do(tx.Taken(version=version))
        self._memory.replaced(self.exchange.group, self._state, version)
        faults.hit(points.TAKE)


def supervised() -> tuple[Worker, RankEnvironment]:
    """Return this rank's worker and its launcher's settings. Raises `UserError` if it can have no loop."""
    worker = world().worker
    launched = RankEnvironment.read(os.environ)
    if worker is None or launched is None or not dist.is_initialized() or not CONTINUITY.groups:
        raise UserError(
            'zbmd.torch.resilient() needs dist.init_process_group("zbmd") before it, and ranks that are '
            "supervised: start them by `zbmd-node run SCRIPT`, or under torchrun, srun or mpirun by "
            "`python -m zbmd.torch.run SCRIPT` (torchrun -m zbmd.torch.run SCRIPT)"
        )
    if CONTINUITY.standing is Standing.IN_LOOP:
        raise UserError("zbmd.torch.resilient() was called twice: a process has one resilient loop")
    return worker, launched
