"""Write the shards of a checkpoint from copies, beside what else the process does: drives `saving`.

A rank writes one shard so, and a snapshot process those of all ranks of its host (`held`). Copies are made by
one thread, written by another: a step that waits for a copy does not wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, assert_never

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import KEEP, Retention, remove_unnamed
from zbmd.training.checkpoint.sharded import (
    WRITTEN_POINT,
    Piece,
    name_written,
    shard_name,
    write_shard_of,
)
from zbmd.training.checkpoint.storage import Storage
from zbmd.training.checkpoint.verified import rehearse
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

STAGED_POINT: Final = faults.declare(
    "shards.staged", "when what a rank writes is copied, before it is written"
)
YIELDING: Final = 10
"""Added to the nice value of a thread that yields: it has a tenth of the share of a rank's, so that it takes
5 % of the two processors of two ranks, and still goes on beside other busy processes."""
NICE_MAX: Final = 19
Told: TypeAlias = saving.TellFailure | saving.TellSuccess | saving.TellDamage


class WriterThreads:
    """Threads that copy, one for each of `copiers`, and one that writes.

    yields: whether that one leaves the processors to ranks, which never wait for it before `hurry`. Not in a
    process of a rank: the interpreter would wait for a thread that does not run.
    """

    def __init__(self, *, copiers: int = 1, yields: bool = False) -> None:
        self.copier = ThreadPoolExecutor(copiers, "zbmd-checkpoint-copy")
        self.writer = ThreadPoolExecutor(1, "zbmd-checkpoint", initializer=self._began if yields else None)
        self._writing = self._nice = 0

    def _began(self) -> None:
        self._writing = threading.get_native_id()
        self._nice = os.getpriority(os.PRIO_PROCESS, self._writing)
        self.hurry(False)

    def hurry(self, hurried: bool = True) -> None:
        """Have the thread that writes run as others do, as far as this process may, or yield again."""
        if self._writing:
            nice = self._nice if hurried else min(self._nice + YIELDING, NICE_MAX)
            with contextlib.suppress(OSError):  # without RLIMIT_NICE; ranks that wait leave it the processors
                os.setpriority(os.PRIO_PROCESS, self._writing, nice)

    def close(self) -> None:
        """Wait for the threads, once they have nothing to do. Idempotent."""
        self.copier.shutdown()
        self.writer.shutdown()


class CopyRoom:
    """Memory for a copy of what a rank writes, used again for the next one."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    def taken(self, wanted: Iterable[tuple[tuple[int, ...], np.dtype[Any]]]) -> Iterator[Array]:
        """Yield arrays of these shapes and dtypes, which are the caller's until `free`."""
        room, self._arrays = self._arrays, []
        for at, (shape, dtype) in enumerate(wanted):
            fits = at < len(room) and room[at].shape == shape and room[at].dtype == dtype
            yield room[at] if fits else np.empty(shape, dtype)

    def copied(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with copies of their arrays, in the dtypes that are written."""
        wanted = [
            (array.shape, array.dtype if piece.dtype is None else np.dtype(piece.dtype))
            for piece in pieces
            for array in piece.arrays
        ]
        copies, found = self.taken(wanted), list[Piece]()
        for piece in pieces:
            arrays = list[Array]()
            for array in piece.arrays:
                arrays.append(next(copies))
                arrays[-1][...] = array
            found.append(replace(piece, arrays=tuple(arrays)))
        faults.hit(STAGED_POINT)
        return found

    def free(self, pieces: Sequence[Piece]) -> None:
        """Take the memory of copies back, which nobody reads any more."""
        self._arrays = [array for piece in pieces for array in piece.arrays]


@dataclass(slots=True)
class Begun:
    """A checkpoint that was begun. shards: the copies of what is written here, by the place of their rank.

    headers: the digests of the headers of those that are durable, "" for one without pieces.
    """

    version: int
    stem: str
    loss_scale: tuple[float, ...]
    shards: Mapping[int, Future[list[Piece]]]
    headers: dict[int, str] = field(default_factory=dict)


class CheckpointWriter:
    """Writes into `storage` what its machine decides. For one thread, beside its own.

    tell: takes what people are to know; ended: called on the writer's thread after each work; freed: takes
    the place and the copies of a shard that is written. fresh: asked whether `checkpoint.json` may
    be replaced, before it is.
    """

    def __init__(
        self,
        storage: Storage,
        plan: str,
        *,
        threads: WriterThreads,
        tell: Callable[[Told], None],
        retention: Retention = KEEP,
        codec: Codec = Codec.NONE,
        ended: Callable[[], None] = lambda: None,
        freed: Callable[[int, Sequence[Piece]], None] = lambda _place, _pieces: None,
        fresh: Callable[[], bool] = lambda: True,
    ) -> None:
        self._storage, self._plan, self._retention, self._codec = storage, plan, retention, codec
        self._threads, self._tell, self._after, self._freed = threads, tell, ended, freed
        self._is_fresh = fresh
        self.machine, self._lock = saving.Saving(), threading.RLock()
        self.begun: Begun | None = None
        self._work: list[Future[None]] = []
        self._wake = threading.Event()
        """Set when a try that waits for its time is to go ahead, or is for nothing."""

    def reached(self, version: int, *, due: bool) -> bool:
        """Return whether a checkpoint of `version` is to be begun: `begin` follows then."""
        with self._lock:
            if not self.machine.handle(saving.Reached(version, due), now_ns=now_ns()):
                return False
            self.begun = None
        self._wake.clear()
        return True

    def begin(self, begun: Begun) -> None:
        """Write this checkpoint as soon as its copies are made."""
        self.note(begun)
        self._submit(self._write, begun, 0)

    def note(self, begun: Begun) -> None:
        """Take part in this checkpoint, whose shard another process writes."""
        self.begun = begun

    def handle(self, event: saving.Event) -> None:
        """Put an event to the machine, and do what it decides."""
        with self._lock:
            actions = self.machine.handle(event, now_ns=now_ns())
        self._perform(actions)

    def hurry(self) -> None:
        """Wait no longer between tries: all wait for this checkpoint."""
        self.handle(saving.Hurry())
        self._wake.set()

    def give_up(self) -> None:
        """Drop the checkpoint under way: the ranks have changed. `handle` a `NewView` to begin again."""
        self.handle(saving.NewView(first=False))
        self._wake.set()

    def settle(self) -> None:
        """Wait until there is nothing to do."""
        while True:
            with self._lock:
                work = [each for each in self._work if not each.done()]
            if not work:
                return
            wait(work)

    # ---- on the threads

    def _write(self, begun: Begun, at_ns: int) -> None:
        if not self._is_time(begun, at_ns):
            return
        wait(begun.shards.values())  # steps wait for copies: nothing is to run beside these
        for place, copied in begun.shards.items():
            if place in begun.headers:
                continue
            try:
                pieces = copied.result()
            except MemoryError as error:
                reason = f"there is no memory for a copy of the state ({error})."
                self._ended(begun, saving.Failed(begun.version, reason, final=True))
                return
            except (ValueError, OSError) as error:
                self._ended(begun, saving.Failed(begun.version, str(error), final=True))
                return
            try:
                header = write_shard_of(self._storage, begun.stem, place, pieces, self._codec)
            except (UserError, OSError, MemoryError, ValueError) as error:
                self._ended(begun, saving.Failed(begun.version, str(error)))
                return
            faults.hit(WRITTEN_POINT)
            self._freed(place, pieces)
            begun.headers[place] = header
        header = next((one for one in begun.headers.values() if one), "")
        self._ended(begun, saving.Wrote(begun.version, bool(header), int(header or "0", 16)))

    def _publish(self, begun: Begun, action: saving.Publish) -> None:
        # The first try goes ahead also if a rank is lost meanwhile: all ranks have written this version.
        if action.at_ns > now_ns() and not self._is_time(begun, action.at_ns):
            return
        if not self._is_fresh():
            reason = "a later one was written meanwhile."
            self._ended(begun, saving.Failed(begun.version, reason, final=True))
            return
        try:
            name_written(
                self._storage,
                begun.stem,
                {place: f"{header:016x}" for place, header in action.headers},
                version=begun.version,
                plan=self._plan,
                loss_scale=begun.loss_scale,
                retention=self._retention,
            )
        except (UserError, OSError) as error:
            self._ended(begun, saving.Failed(begun.version, str(error)))
            return
        self._ended(begun, saving.Published(begun.version))

    def _rehearse(self, begun: Begun, version: int) -> None:
        for place, header in begun.headers.items():
            name = shard_name(begun.stem, place)
            if header and (problem := rehearse(self._storage, name, header)):
                self.handle(saving.FoundDamaged(version, problem))

    def _is_time(self, begun: Begun, at_ns: int) -> bool:
        """Wait until `at_ns`, or until that is not awaited; return whether the checkpoint is still wanted."""
        wait_ns = at_ns - now_ns()
        if wait_ns > 0:
            self._wake.wait(wait_ns / 1e9)
        return begun is self.begun and self.machine.pending == begun.version

    def _ended(self, begun: Begun, event: saving.Wrote | saving.Published | saving.Failed) -> None:
        """Take the end of work on a checkpoint, unless another one, of the same version maybe, was begun."""
        with self._lock:
            actions = self.machine.handle(event, now_ns=now_ns()) if begun is self.begun else []
        self._perform(actions)
        self._after()

    # ---- the machine

    def _submit(self, work: Callable[..., None], *given: object) -> None:
        with self._lock:
            self._work = [each for each in self._work if not each.done()]
            self._work.append(self._threads.writer.submit(work, *given))

    def _perform(self, actions: Sequence[saving.Action]) -> None:
        begun = self.begun
        for action in actions:
            if isinstance(action, Told):
                self._tell(action)
                continue
            assert begun is not None, "a checkpoint was begun"
            match action:
                case saving.Write(at_ns=at_ns):
                    self._submit(self._write, begun, at_ns)
                case saving.Publish():
                    self._submit(self._publish, begun, action)
                case saving.Remove():
                    self._submit(remove_unnamed, self._storage, begun.stem)
                case saving.Rehearse():
                    self._submit(self._rehearse, begun, action.version)
                case saving.Stage():
                    raise AssertionError("it is performed where the state is")
                case _:
                    assert_never(action)
