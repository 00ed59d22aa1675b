"""Checkpoints of a run, written beside the steps that follow them: drives `checkpoint.saving`.

The slot of a version is as it was until the second step after it. Beside the next step a thread copies what
this rank is to write, and the step after that waits for this copy alone; another thread writes the copy.
Votes of steps carry how far each rank has come.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final, assert_never

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import KEEP, Retention, remove_unnamed
from zbmd.training.checkpoint.sharded import (
    WRITTEN_POINT,
    Piece,
    last_in,
    name_written,
    shard_name,
    stem_of,
    write_shard_of,
)
from zbmd.training.checkpoint.storage import Storage
from zbmd.training.checkpoint.verified import rehearse
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

STAGED_POINT = faults.declare("shards.staged", "when what a rank writes is copied, before it writes it")
ROUNDS_MAX: Final = 4
"""Exchanges until a checkpoint that all wait for is published or given up: two, and one for each failure."""


@dataclass(slots=True)
class _Begun:
    """The checkpoint that was begun last. copied: its pieces, once they are a copy."""

    version: int
    stem: str
    loss_scale: tuple[float, ...]
    place: int
    copied: Future[list[Piece]]


class Checkpoints:
    """Writes the checkpoints of a run into `storage`, which all ranks share. For the training thread.

    Until a checkpoint is published, the previous one counts. Failures are reported, and end nothing.
    """

    def __init__(
        self, storage: Storage, plan: str, *, retention: Retention = KEEP, codec: Codec = Codec.NONE
    ) -> None:
        self._storage, self._plan, self._retention, self._codec = storage, plan, retention, codec
        self._machine, self._lock = saving.Saving(), threading.Lock()
        self._begun: _Begun | None = None
        self._token = b""
        self._copier = ThreadPoolExecutor(1, "zbmd-checkpoint-copy")
        self._writer = ThreadPoolExecutor(1, "zbmd-checkpoint")
        self._work: list[Future[None]] = []
        self._wake = threading.Event()
        """Set when a try that waits for its time is to go ahead, or is for nothing."""
        self._room: list[Array] = []
        """Memory of the last copy, for the next one."""

    @property
    def report(self) -> saving.Report:
        """Return this rank's part in the next vote."""
        return self._machine.report

    @property
    def pending(self) -> int | None:
        """Return the version of the checkpoint under way; None for none."""
        return self._machine.pending

    @property
    def published(self) -> int | None:
        """Return the last version whose checkpoint is published, as all ranks know."""
        return self._machine.published

    @property
    def asks(self) -> bool:
        """Return whether this rank asks all for a checkpoint."""
        return self._machine.asks

    def enter(self, world: Group) -> None:
        """Begin in a new view; all members together. Raises as the group."""
        token = np.array([secrets.randbits(64) if world.rank == 0 else 0], np.uint64)
        self._token = world.blocking.broadcast(token, 0).tobytes()
        self._handle(saving.NewView(first=world.rank == 0))

    def reached(
        self,
        world: Group,
        version: int,
        *,
        due: bool,
        pieces: Callable[[], Sequence[Piece]],
        loss_scale: tuple[float, ...],
    ) -> bool:
        """All ranks hold `version`: begin a checkpoint if one is due; return whether that was done.

        pieces: what this rank writes.
        """
        with self._lock:
            if not self._machine.handle(saving.Reached(version, due), now_ns=now_ns()):
                return False
            self._begun = None
        self._wake.clear()
        name = hashlib.blake2b(self._token + version.to_bytes(8, "little"), digest_size=8).digest()
        copied = self._copier.submit(self._copy, list(pieces()))
        begun = self._begun = _Begun(
            version, stem_of(version, int.from_bytes(name, "little")), loss_scale, world.rank, copied
        )
        self._submit(self._write, begun, 0)
        return True

    def staged(self) -> None:
        """Wait until the state of the last checkpoint is copied: it may change then."""
        if self._begun is not None:
            wait([self._begun.copied])

    def voted(self, reports: Sequence[saving.Report]) -> None:
        """Take what all ranks have reported in the votes of a step."""
        self._perform(self._handle(saving.Voted(tuple(reports))))

    def end(self, world: Group) -> bool:
        """Wait for the checkpoint under way, if there is one; all members together.

        Returns whether the last checkpoint that was begun is published. Raises as the group.
        """
        for _ in range(ROUNDS_MAX):
            if self._machine.pending is None:
                break
            self._handle(saving.Hurry())
            self._wake.set()
            self._settle()
            report = self.report
            every = world.blocking.all_gather(np.array([report.progress, report.header], np.uint64))
            self.voted([saving.Report(saving.Progress(int(each[0])), int(each[1])) for each in every])
        self._settle()
        return self._begun is not None and self._machine.published == self._begun.version

    def abandon(self) -> None:
        """Drop a checkpoint that is not published, once nothing reads the state any more."""
        self.staged()
        self._handle(saving.NewView(first=False))
        self._wake.set()

    def close(self) -> None:
        """Stop the threads."""
        self.abandon()
        self._copier.shutdown()
        self._writer.shutdown()

    # ---- on the threads

    def _copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        with self._lock:
            room, self._room = self._room, []
        copies, at = list[Piece](), 0
        for piece in pieces:
            arrays = list[Array]()
            for array in piece.arrays:
                dtype = array.dtype if piece.dtype is None else np.dtype(piece.dtype)
                fits = at < len(room) and room[at].shape == array.shape and room[at].dtype == dtype
                copy = room[at] if fits else np.empty(array.shape, dtype)
                copy[...] = array
                arrays.append(copy)
                at += 1
            copies.append(replace(piece, arrays=tuple(arrays)))
        faults.hit(STAGED_POINT)
        return copies

    def _write(self, begun: _Begun, at_ns: int) -> None:
        if not self._is_time(begun, at_ns):
            return
        try:
            pieces = begun.copied.result()
        except MemoryError as error:
            reason = f"there is no memory for a copy of the state ({error})."
            self._ended(begun, saving.Failed(begun.version, reason, final=True))
            return
        try:
            header = write_shard_of(self._storage, begun.stem, begun.place, pieces, self._codec)
        except (UserError, OSError, MemoryError, ValueError) as error:
            self._ended(begun, saving.Failed(begun.version, str(error)))
            return
        faults.hit(WRITTEN_POINT)
        with self._lock:
            self._room = [array for piece in pieces for array in piece.arrays]
        self._ended(begun, saving.Wrote(begun.version, bool(header), int(header or "0", 16)))

    def _publish(self, begun: _Begun, action: saving.Publish) -> None:
        # The first try goes ahead also if a rank is lost meanwhile: all ranks have written this version.
        if action.at_ns > now_ns() and not self._is_time(begun, action.at_ns):
            return
        try:
            name_written(
                self._storage,
                begun.stem,
                {rank: f"{header:016x}" for rank, header in action.headers},
                version=begun.version,
                plan=self._plan,
                loss_scale=begun.loss_scale,
                retention=self._retention,
            )
        except (UserError, OSError) as error:
            self._ended(begun, saving.Failed(begun.version, str(error)))
            return
        self._ended(begun, saving.Published(begun.version))

    def _rehearse(self, begun: _Begun, action: saving.Rehearse) -> None:
        name = shard_name(begun.stem, begun.place)
        if problem := rehearse(self._storage, name, f"{action.header:016x}"):
            self._perform(self._handle(saving.FoundDamaged(action.version, problem)))

    def _is_time(self, begun: _Begun, at_ns: int) -> bool:
        """Wait until `at_ns`, or until that is not awaited; return whether the checkpoint is still wanted."""
        wait_ns = at_ns - now_ns()
        if wait_ns > 0:
            self._wake.wait(wait_ns / 1e9)
        return begun is self._begun and self._machine.pending == begun.version

    def _ended(self, begun: _Begun, event: saving.Wrote | saving.Published | saving.Failed) -> None:
        """Take the end of work on a checkpoint, unless another one, of the same version maybe, was begun."""
        with self._lock:
            actions = self._machine.handle(event, now_ns=now_ns()) if begun is self._begun else []
        self._perform(actions)

    # ---- the machine

    def _handle(self, event: saving.Event) -> list[saving.Action]:
        with self._lock:
            return self._machine.handle(event, now_ns=now_ns())

    def _submit(self, work: Callable[..., None], *given: object) -> None:
        with self._lock:
            self._work = [each for each in self._work if not each.done()]
            self._work.append(self._writer.submit(work, *given))

    def _settle(self) -> None:
        """Wait until the threads have nothing to do."""
        while work := [each for each in self._work if not each.done()]:
            wait(work)

    def _perform(self, actions: Sequence[saving.Action]) -> None:
        begun = self._begun
        assert begun is not None or not actions, "a checkpoint was begun"
        for action in actions:
            assert begun is not None
            match action:
                case saving.Write(at_ns=at_ns):
                    self._submit(self._write, begun, at_ns)
                case saving.Publish():
                    self._submit(self._publish, begun, action)
                case saving.Remove():
                    self._submit(remove_unnamed, self._storage, begun.stem)
                case saving.TellFailure(version=version, reason=reason):
                    self._tell_failure(version, reason)
                case saving.TellSuccess(version=version):
                    _tell(f"the checkpoint of step {version} is written, after failures")
                case saving.Rehearse():
                    self._submit(self._rehearse, begun, action)
                case saving.TellDamage(version=version, reason=reason):
                    _tell(f"the checkpoint of step {version} is damaged: {reason}. Another one is written.")
                case saving.Stage():
                    raise AssertionError("it is performed where the state is")
                case _:
                    assert_never(action)

    def _tell_failure(self, version: int, reason: str) -> None:
        last = last_in(self._storage)
        kept = "There is none yet" if last is None else f"The last one, {last}, stays"
        _tell(
            f"the checkpoint of step {version} could not be written: {reason.removesuffix('.')}. {kept}; the "
            "run goes on, and tries again."
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
