"""The checkpoints of a loop, written beside its steps, and what signals ask for.

Between two steps a rank copies what it is to write (`saved.pieces_of`); a thread writes the copy. Once that
is durable, the rank's votes say so. When the votes of a commit all do, rank 0 names the shards: all ranks
have then committed the step whose state that is, and rank 0 has logged it. A replacement of rank 0 gets these
votes from a survivor, and names the shards if its predecessor did not live to do it.

A loss ends a checkpoint that is not named: the survivors then ask for another one, after the next step.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog

from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import Piece, checkpoint_in, name_written, read_names, write_shard_of
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.job.paced import PaceClock
from zbmd.training.job.signals import SIGNALS, signals_taken
from zbmd.training.redundancy.interface import Wish
from zbmd.training.torch import points
from zbmd.training.torch.state import LoopState
from zbmd.training.torch.votes import Wrote
from zbmd.transport import kill_points as faults

log = structlog.stdlib.get_logger("zbmd.torch")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that was begun, and is not named yet. wrote: the digest of its shard.

    told: whether a line says so once it is named.
    """

    stem: str
    step: int
    wrote: Future[str]
    told: bool


class LoopCheckpoints:
    """This rank's part in the checkpoints of a loop, in the directory `out`, which all ranks share.

    run_id, plan: of the loop. every: in steps; 0: only when asked for. Used by the thread that trains.
    """

    def __init__(self, out: Path, *, run_id: str, plan: str, state: LoopState, every: int) -> None:
        self._out, self._run_id, self._plan, self._state, self._every = out, run_id, plan, state, every
        self.clock: PaceClock | None = None
        """Of rank 0, which asks all ranks for a checkpoint when one is due."""
        self._pending: _Pending | None = None
        self._naming: Future[None] | None = None
        self._is_failing = False
        self._pool = ThreadPoolExecutor(1, "zbmd-checkpoint")
        self.wishes = Wish.NOTHING
        """Requests of this rank to all: of signals, and for a checkpoint after one that a loss ended."""
        self._signals = Signals(self._ask)

    def _ask(self, wish: Wish) -> None:
        self.wishes |= wish

    def close(self) -> None:
        """End what is being written, and take no more signals. Idempotent."""
        self._signals.close()
        self._pool.shutdown()

    # Writing.

    @property
    def wrote(self) -> Wrote | None:
        """Return what this rank has written, for its votes; None: nothing, or not yet."""
        naming, pending = self._naming, self._pending
        if naming is not None and naming.done() and (error := naming.exception()) is not None:
            return Wrote("", 0, "", str(error))
        if pending is None or not pending.wrote.done():
            return None
        if (error := pending.wrote.exception()) is not None:
            return Wrote(pending.stem, pending.step, "", str(error))
        return Wrote(pending.stem, pending.step, pending.wrote.result())

    def reached(self, step: int, asked: Wish, pieces: Callable[[], Sequence[Piece]], epoch: int) -> None:
        """All ranks have ended step `step`: begin a checkpoint, if one is due.

        asked: by all ranks, in the votes for it. pieces: returns what this rank writes. One that is due while
        another is being written follows that.
        """
        if asked & (Wish.SAVE | Wish.CHECKPOINT) or (self._every and step % self._every == 0):
            if self._pending is None:
                self.begin(step, pieces, epoch, told=bool(asked & Wish.SAVE))
            else:
                self.wishes |= Wish.SAVE
        if self.clock is not None:
            self.clock.stepped()
            if self.clock.is_due(step + 1):
                self.wishes |= Wish.CHECKPOINT

    def begin(
        self, step: int, pieces: Callable[[], Sequence[Piece]], epoch: int, *, told: bool = False
    ) -> None:
        """Begin to write a checkpoint, in the place of any other that is not named. told: see `_Pending`."""
        self.wishes &= ~(Wish.SAVE | Wish.CHECKPOINT)
        words = f"{self._run_id}/{step}/{epoch}"
        stem = f"checkpoint-{step}-{hashlib.blake2b(words.encode(), digest_size=8).hexdigest()}"
        if self._pending is not None and self._pending.stem == stem:
            return
        if self.clock is None:
            copied = pieces()
        else:
            self.clock.begun(step)
            with self.clock.stalling():
                copied = pieces()
        wrote = self._pool.submit(self._write, stem, copied)
        self._pending = _Pending(stem, step, wrote, told)

    def _write(self, stem: str, pieces: Sequence[Piece]) -> str:
        faults.hit(points.WRITE)
        return write_shard_of(Directory(self._out), stem, self._state.rank, pieces)

    def settle(self) -> None:
        """Wait until this rank has written, and named, what it is to. Its votes have the errors."""
        if self._pending is not None:
            wait([self._pending.wrote])
        if self._naming is not None:
            wait([self._naming])

    def require_named(self) -> None:
        """Wait until the last checkpoint is named, if that is for this rank; report it if that has failed."""
        if self._naming is not None and (error := self._naming.exception()) is not None:
            self._failed(str(error))

    def abandon(self) -> None:
        """A rank is lost: whoever replaces it writes nothing of the checkpoint under way."""
        if self.clock is not None:
            self.clock.cut()
        if self._pending is not None:
            self._pending = None
            self.wishes |= Wish.SAVE

    # Commits.

    def committed(self, written: Sequence[Wrote]) -> None:
        """A transaction is committed by votes that say this. A checkpoint that failed is dropped."""
        if not written:
            return
        stem, step = written[0].stem, written[0].step
        if failed := next((each for each in written if each.failed), None):
            if self._pending is not None and self._pending.stem == failed.stem:
                self._pending = None
            if not failed.stem:
                self._naming = None
            self._failed(failed.failed)
            return
        if any(each.stem != stem for each in written):
            return
        told = False
        if self._pending is not None and self._pending.stem == stem:
            told, self._pending = self._pending.told, None
            if self.clock is not None:
                self.clock.written(beside=True)
        if self._state.rank == 0:
            headers = {place: each.digest for place, each in enumerate(written) if each.digest}
            self._naming = self._pool.submit(self._name, stem, step, headers, told)

    def _failed(self, reason: str) -> None:
        """Report, on rank 0 and once until it succeeds again, that checkpoints cannot be written."""
        if self._state.rank == 0 and not self._is_failing:
            what = reason.removesuffix(".")
            _tell(f"a checkpoint could not be written: {what}. The last one stays, and the loop goes on.")
        self._is_failing = True

    def _name(self, stem: str, step: int, headers: Mapping[int, str], told: bool) -> None:
        """Name the shards of a checkpoint, unless this or a later one is named already. On the thread."""
        faults.hit(points.WRITTEN)
        path = checkpoint_in(self._out)
        names = None if path is None else read_names(path)
        if names is None or (
            names.version <= step and not any(name.startswith(stem) for name in names.files)
        ):
            name_written(Directory(self._out), stem, headers, version=step, plan=self._plan)
            faults.hit(points.NAMED)
        if self._is_failing:
            self._is_failing = False
            _tell(f"the checkpoint of step {step} is written, after failures")
        if told:
            _tell(f"step {step} saved: {self._out / SHARDS_NAME}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Signals:
    """The handlers of `SIGNALS`, until `close`: those that are left to their defaults, in the main thread.

    A forked child that inherits them, such as the worker of a loader, dies of these signals as before.
    """

    def __init__(self, ask: Callable[[Wish], None]) -> None:
        self._pid, self._ask = os.getpid(), ask
        self._taken = [number for number in signals_taken() if number in SIGNALS]
        for number in self._taken:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._ask(SIGNALS[signal.Signals(number)])
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Leave them to their defaults again. Idempotent."""
        while self._taken:
            signal.signal(self._taken.pop(), signal.SIG_DFL)
