"""Checkpoints of a run, written beside the steps that follow them: drives `checkpoint.saving`.

The slot of a version is as it was until the update of the second step after it. Until then what this rank is
to write is copied, by the snapshot process of its host, which then writes it (`checkpoint.held`), or, where
one of the ranks has none, by a thread of the rank, and written by another one (`checkpoint.writer`). That
update waits for this copy alone: an update reads and writes all of the state, as a copy does, so a copy has
the time of at least two. Votes of steps carry how far each rank has come, and whether all have a snapshot
process. That publishes nothing before a rank has said that the step is committed: the one that writes the
commit log once it has, on other hosts the one at the lowest place.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.held.line import HeldLine
from zbmd.training.checkpoint.held.messages import Event, Heard, SaveShard
from zbmd.training.checkpoint.index import Retention
from zbmd.training.checkpoint.sharded import Piece, last_in, stem_of
from zbmd.training.checkpoint.storage import Storage, url_of
from zbmd.training.checkpoint.writer import Begun, CheckpointWriter, CopyRoom, Told, WriterThreads
from zbmd.training.job.paced import Pacing
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.interface import Agenda, Wish
from zbmd.training.redundancy.stamped import STATE_BLOCK, StampedSlots

ROUNDS_MAX: Final = 4
"""Exchanges until a checkpoint that all wait for is published or given up: two, and one for each failure."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the state, to be saved. pieces: returns this rank's share; all ranks call it together."""

    number: int
    loss_scale: tuple[float, ...]
    pieces: Callable[[], Sequence[Piece]]


class Checkpoints:
    """Writes the checkpoints of a run into the storage that all ranks share. For the training thread.

    Until a checkpoint is published, the previous one counts. Failures are reported, and end nothing. plan: of
    what is trained; log: of its steps; hosts: of the job.
    """

    def __init__(
        self,
        storage: Storage,
        plan: str,
        pacing: Pacing,
        *,
        log: Path,
        retention: Retention,
        codec: Codec,
        hosts: int,
    ) -> None:
        self._storage, self._plan, self._pacing, self._log = storage, plan, pacing, log
        self._retention, self._codec, self._hosts = retention, codec, hosts
        self._threads, self._room = WriterThreads(), CopyRoom()
        self._writer = CheckpointWriter(
            storage,
            plan,
            threads=self._threads,
            tell=self._tell,
            retention=retention,
            codec=codec,
            freed=lambda _, pieces: self._room.free(pieces),
        )
        self._token = b""
        self._kept: StampedSlots | None = None
        self._line: HeldLine | None = None
        self._all_held = False
        """Whether all ranks have a snapshot process, as far as all know alike."""
        self._is_held = False
        """Whether such processes write the checkpoint that was begun last."""
        self._speaks = False
        """Whether this rank is to say what becomes of its step, and has not yet."""
        self._committed = 0
        """The last version that is committed, as far as this rank knows."""
        self._place = 0

    def state_in(self, kept: StampedSlots | None, worker: Worker) -> None:
        """Have the snapshot process of this host write what lies in `kept`, if that outlives this rank."""
        self._kept, self._line = kept, None
        file = worker.segment.kept_file
        if kept is not None and file is not None:
            job = worker.job if self._hosts == 1 else None
            self._line = HeldLine(worker.rank, kept.memory, file, job=job)

    # ---- votes

    @property
    def report(self) -> saving.Report:
        """Return this rank's part in the next vote."""
        self._listen()
        return self._writer.machine.report

    def begin_step(self, step: int, *, decides: bool) -> Wish:
        """Step `step` begins; return what to ask all ranks for. decides: whether this rank sets the pace."""
        wish = Wish.NOTHING
        if self._pacing.begin_step(step, decides=decides) or self._writer.machine.asks:
            wish |= Wish.CHECKPOINT
        return wish if self._is_there() else wish | Wish.UNHELD

    def voted(self, agreed: Agenda) -> None:
        """Take what all ranks have reported in the votes of a step."""
        self._all_held = not agreed.wishes & Wish.UNHELD
        self.reported(agreed.saved)

    def reported(self, reports: Sequence[saving.Report]) -> None:
        """Take the reports of all ranks."""
        self._writer.handle(saving.Voted(tuple(reports)))
        machine = self._writer.machine
        self._pacing.look(pending=machine.pending, published=machine.published)

    # ---- epochs

    def enter(self, world: Group, version: int) -> None:
        """Begin in a new view, with `version`; all members together. Raises as the group."""
        begun = self._writer.begun
        if begun is not None and version < begun.version:
            self._decided(is_committed=False)
        self.committed(version - 1)  # whoever holds a version knows that those before it are
        mine = [secrets.randbits(64), self._is_there()]
        every = world.blocking.all_gather(np.array(mine, np.uint64))
        self._all_held = bool(all(each[1] for each in every))
        self.enter_by(every[0][:1].tobytes(), world.rank)

    def enter_by(self, token: bytes, place: int) -> None:
        """Begin in a new view. token: of the view, on all its members alike; place: of this one."""
        self._token, self._place = token, place
        self._writer.handle(saving.NewView(first=place == 0))

    def committed(self, version: int) -> None:
        """All have voted for `version`, and it is in the commit log if this rank writes that."""
        begun, self._committed = self._writer.begun, max(version, self._committed)
        if begun is not None and self._committed >= begun.version:
            self._decided(is_committed=True)

    def _decided(self, *, is_committed: bool) -> None:
        if self._speaks and self._is_held and self._line is not None:
            self._speaks = False
            self._line.decided(is_committed=is_committed)

    def abandon(self) -> None:
        """Drop a checkpoint that is not published, once nothing reads the state any more.

        A snapshot process finishes one that all ranks have asked for, if its step is committed.
        """
        self._stage()
        self._writer.give_up()
        self._pacing.cut()

    def close(self) -> None:
        """Stop the threads."""
        self.abandon()
        self._threads.close()
        if self._line is not None:
            self._line.close()

    # ---- checkpoints

    def reached(self, world: Group, version: Version, *, asked: Wish, waits: bool) -> bool:
        """All ranks hold `version`: begin a checkpoint if one is due.

        asked: in the votes for it. waits: one is due, and all wait until it is durable. Returns whether it is
        then. Raises as the group.
        """
        due = waits or bool(asked & Wish.CHECKPOINT) or self._pacing.is_due(version.number)
        if not waits:
            self._begin(world, version, due=due, held=self._all_held)
            return False
        self._end(world)
        # Also one that is published already: a rank that has replaced another does not know of that.
        self._begin(world, version, due=due, held=self._all_held)
        is_published = self._end(world)
        if not is_published and self._writer.machine.lost:
            self._begin(world, version, due=True, held=False)
            is_published = self._end(world)
        return is_published

    def _begin(self, world: Group, version: Version, *, due: bool, held: bool) -> None:
        number = version.number
        if self._writer.machine.pending is None:
            self._stage()  # one that was dropped may still be copied
        if not self._writer.reached(number, due=due):
            return
        self._pacing.begun(number)
        # Two writers of one version in one view have files of their own: one may go on when the other begins.
        kind = b"held" if held else b""
        name = hashlib.blake2b(self._token + number.to_bytes(8, "little") + kind, digest_size=8).digest()
        stem = stem_of(number, int.from_bytes(name, "little"))
        self._is_held, pieces = held, list(version.pieces())
        if held:
            with self._pacing.stalling():
                self._hand_over(world, Begun(number, stem, version.loss_scale, {}), pieces)
            return
        copied = self._threads.copier.submit(self._room.copied, pieces)
        self._writer.begin(Begun(number, stem, version.loss_scale, {world.rank: copied}))

    def staged(self, slot: int | None = None) -> None:
        """Wait until the state of the last checkpoint is copied: it may change then. slot: which may, all."""
        begun = self._writer.begun
        if begun is not None and slot in (None, begun.version % SLOTS):
            with spans.CHECKPOINT, self._pacing.stalling():
                self._stage()

    def _stage(self) -> None:
        begun = self._writer.begun
        if begun is None:
            return
        if self._is_held and self._line is not None:
            self._line.staged()
            self._listen()
        wait(begun.shards.values())

    def _end(self, world: Group) -> bool:
        """Wait for the checkpoint under way, if there is one; all members together.

        Returns whether the last checkpoint that was begun is published. Raises as the group.
        """
        writer = self._writer
        with self._pacing.stalling():
            for _ in range(ROUNDS_MAX):
                if writer.machine.pending is None:
                    break
                writer.hurry()
                if self._is_held and self._line is not None:
                    self._line.settle()
                writer.settle()
                report = self.report
                every = world.blocking.all_gather(np.array([report.progress, report.header], np.uint64))
                self.reported([saving.Report(saving.Progress(int(each[0])), int(each[1])) for each in every])
            writer.settle()
        begun = writer.begun
        return begun is not None and writer.machine.published == begun.version

    # ---- the snapshot process

    def _is_there(self) -> bool:
        return self._line is not None and self._line.is_there

    def _hand_over(self, world: Group, begun: Begun, pieces: Sequence[Piece]) -> None:
        line, kept = self._line, self._kept
        assert line is not None and kept is not None, "all ranks have a snapshot process"
        self._writer.note(begun)
        homes = self._homes(world)
        if any(homes):
            self._writer.settle()  # a publication by this rank comes before those of the next checkpoint
            self._writer.handle(saving.Apart(begun.version))
        where, retention = self._storage.where(), self._retention
        counter, count = kept.begun(begun.version % SLOTS)
        request = SaveShard(
            version=begun.version,
            stem=begun.stem,
            rank=line.rank,
            place=world.rank,
            homes=homes,
            block=STATE_BLOCK,
            counter=counter,
            count=count,
            storage=where if url_of(where) else os.path.abspath(where),
            log=os.path.abspath(self._log),
            plan=self._plan,
            loss_scale=begun.loss_scale,
            keep=retention.keep,
            every=retention.every,
            codec=self._codec,
            pieces=(),
        )
        line.save(request, pieces)
        self._speaks = homes[world.rank] == world.rank
        self.committed(self._committed)
        self._listen()

    def _homes(self, world: Group) -> tuple[int, ...]:
        """Return for each rank the lowest one with the same snapshot process. Raises as the group."""
        if self._hosts == 1:
            return (0,) * world.size
        assert self._line is not None, "all ranks have a snapshot process"
        every = world.blocking.all_gather(np.array([self._line.holder], np.uint64)).reshape(-1).tolist()
        # The shard of a rank whose process is lost meanwhile is of no host: it is never written.
        return tuple(every.index(holder) if holder else place for place, holder in enumerate(every))

    def _listen(self) -> None:
        """Take what the snapshot process has said of the checkpoint under way."""
        line, begun = self._line, self._writer.begun
        if line is None or begun is None or not self._is_held:
            return
        for heard in line.heard():
            self._hear(begun, heard)
        if line.lost:
            self._writer.handle(saving.WriterLost(begun.version))

    def _hear(self, begun: Begun, heard: Heard) -> None:
        writer, version = self._writer, begun.version
        match heard.event:
            case Event.WROTE:
                begun.headers[self._place] = f"{heard.header:016x}" if heard.header else ""
                writer.handle(saving.Wrote(version, bool(heard.header), heard.header))
            case Event.PUBLISHED:
                writer.handle(saving.Published(version))
            case Event.FAILED:
                writer.handle(saving.Failed(version, heard.reason, retried=True))
            case Event.GAVE_UP if heard.reason:
                writer.handle(saving.Failed(version, heard.reason, final=True))
            case Event.DAMAGED:
                writer.handle(saving.FoundDamaged(version, heard.reason))
            case Event.GAVE_UP | Event.COPIED | Event.REFUSED | Event.ALIVE:
                pass  # another rank votes on it, or the line has taken it
            case _:
                assert_never(heard.event)

    # ---- what people hear

    def _tell(self, told: Told) -> None:
        match told:
            case saving.TellFailure(version=version, reason=reason):
                last = last_in(self._storage)
                kept = "There is none yet" if last is None else f"The last one, {last}, stays"
                _say(
                    f"the checkpoint of step {version} could not be written: {reason.removesuffix('.')}. "
                    f"{kept}; the run goes on, and tries again."
                )
            case saving.TellSuccess(version=version):
                _say(f"the checkpoint of step {version} is written, after failures")
            case saving.TellDamage(version=version, reason=reason):
                _say(f"the checkpoint of step {version} is damaged: {reason}. Another one is written.")
            case _:
                assert_never(told)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
