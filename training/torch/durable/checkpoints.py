"""The checkpoints of a loop, written beside its steps, and what signals ask for.

They are those of any job (`job.checkpoints`): between two steps a thread begins to copy what this rank is to
write (`saved.pieces_of`), which no step writes before its vote; another thread writes the copy. Votes say how
far each rank has come, and rank 0 publishes what all have written.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.group.group import Group
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import Retention
from zbmd.training.checkpoint.pace import Every
from zbmd.training.checkpoint.sharded import Piece, last_in
from zbmd.training.checkpoint.storage import Storage, storage_of, url_of
from zbmd.training.job.checkpoints import Checkpoints, Version
from zbmd.training.job.paced import NotePace, PaceClock, Pacing, require_every
from zbmd.training.job.signals import SIGNALS, signals_taken
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.redundancy.interface import Wish
from zbmd.training.run.ledger import LOG_NAME
from zbmd.transport.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The checkpoints of a loop: where, each how many steps, which of them are kept, and how written."""

    where: str
    every: Every
    retention: Retention
    codec: Codec

    @property
    def storage(self) -> Storage:
        """The directory, or the prefix of an object store."""
        return storage_of(self.where)

    def index(self, name: str) -> str:
        """Return the path or URL of the index of that name."""
        return self.storage.where(name)

    def check(self) -> None:
        """Raise `UserError` for what is out of range, by the names of `resilient`."""
        require_every(self.every, "zbmd.torch.resilient(checkpoint_every=…)")
        if self.retention.keep < 1:
            raise UserError(
                f"zbmd.torch.resilient(keep_checkpoints=…): expected at least 1, got {self.retention.keep}"
            )
        if self.retention.every < 0:
            raise UserError(
                f"zbmd.torch.resilient(keep_every=…): expected 0 or more steps, got {self.retention.every}"
            )

    def text(self) -> str:
        """Return the options as a script spells them; a directory may have another name on each host."""
        to = url_of(self.where) or "a directory"
        kept = f"keep_checkpoints={self.retention.keep}, keep_every={self.retention.every}"
        return (
            f"checkpoint_to={to}, checkpoint_every={self.every}, {kept}, checkpoint_codec={self.codec.value}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a loop; see `resilient`. out: None: it leaves no files; profile_ops: 0: of no step."""

    out: Path | None
    saves: Saves
    resume: bool
    exact: bool | int
    mirror: bool = False
    on_straggler: OnStraggler = OnStraggler.WARN
    profile_ops: int = 0

    def text(self) -> str:
        """Return the options as a script spells them; the directory may have another name on each host."""
        loop = f"resume={self.resume}, exact={self.exact}, mirror={self.mirror}"
        saves = f"out={self.out is not None}, {self.saves.text()}"
        return f"{saves}, {loop}, on_straggler={self.on_straggler.value}"


class LoopCheckpoints:
    """This rank's part in the checkpoints of a loop. Used by the thread that trains.

    run_id, plan: of the loop. out: has the records; first: the step that the loop begins with. begins: this
    rank replaces no other. note: see `PaceClock`.
    """

    def __init__(
        self, saves: Saves, out: Path, *, run_id: str, plan: str, first: int, begins: bool, note: NotePace
    ) -> None:
        launched = RankEnvironment.read(os.environ)
        hosts = 1 if launched is None else launched.hosts
        self._storage, self._run_id = saves.storage, run_id
        pacing = Pacing(saves.every, partial(PaceClock, out, first, hosts=hosts, begins=begins), note=note)
        self._checkpoints = Checkpoints(
            self._storage,
            plan,
            pacing,
            log=out / LOG_NAME,
            retention=saves.retention,
            codec=saves.codec,
            hosts=hosts,
        )
        self._wishes = Wish.NOTHING
        """Requests of this rank to all, of signals."""
        self._asks = Wish.NOTHING
        """Requests of this rank for a checkpoint, in the step under way."""
        self._signals = Signals(self._ask)

    def _ask(self, wish: Wish) -> None:
        self._wishes |= wish

    def close(self) -> None:
        """End what is being written, and take no more signals. Idempotent."""
        self._signals.close()
        self._checkpoints.close()

    def enter(self, epoch: int, rank: int) -> None:
        """Begin with the ranks of an epoch, of which this one is `rank`; it needs no call of all."""
        words = f"{self._run_id}/{epoch}"
        self._checkpoints.enter_by(hashlib.blake2b(words.encode(), digest_size=8).digest(), rank)

    def abandon(self) -> None:
        """A rank is lost: whoever replaces it writes nothing of the checkpoint under way."""
        self._checkpoints.abandon()

    # Votes.

    @property
    def wishes(self) -> Wish:
        """Requests of this rank to all, for its vote."""
        return self._wishes | self._asks

    @property
    def report(self) -> saving.Report:
        """This rank's part in its vote."""
        return self._checkpoints.report

    def begin_step(self, step: int, *, decides: bool) -> None:
        """Step `step` begins. decides: whether this rank says when a measured checkpoint is due."""
        self._asks = self._checkpoints.begin_step(step, decides=decides) & ~Wish.UNHELD

    def granted(self, asked: Wish) -> None:
        """All ranks deal with these requests now."""
        self._wishes &= ~asked

    def voted(self, reports: Sequence[saving.Report]) -> None:
        """A transaction is committed by votes that say this."""
        self._checkpoints.reported(reports)

    def staged(self) -> None:
        """Wait until the state of the last checkpoint is copied: it may change then."""
        self._checkpoints.staged()

    # Writing.

    def reached(self, world: Group, step: int, asked: Wish, pieces: Callable[[], Sequence[Piece]]) -> None:
        """All ranks have ended step `step`: begin a checkpoint, if one is due. asked: in the votes for it."""
        self._checkpoints.reached(world, Version(step, (), pieces), asked=asked, waits=False)

    def save(self, world: Group, step: int, pieces: Callable[[], Sequence[Piece]]) -> None:
        """Write a checkpoint of `step`, and wait for it; all ranks together. Raises as operations of `world`.

        One that cannot be written is reported.
        """
        saved = self._checkpoints.reached(world, Version(step, (), pieces), asked=Wish.NOTHING, waits=True)
        if world.rank == 0:
            what = f"saved: {last_in(self._storage)}" if saved else "not saved: see above"
            print(f"step {step} {what}", file=sys.stderr, flush=True)


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
