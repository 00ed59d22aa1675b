"""Writes the shards that ranks ask for, from the memory that is held, on threads of the snapshot process.

    collecting: copied as ranks ask ──all ranks have asked──▶ writing ──▶ published, or given up

A checkpoint that all ranks have asked for is finished, whoever is lost then. One that a rank was lost before
it could ask for never begins to be written: the next one takes its place. One is written at a time.

If other processes write the shards of other ranks, each shard is written as soon as it is asked for, and its
rank hears of it: the ranks' votes decide.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from zbmd.actors.snapshots.holder import HeldMemory
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import DTYPES
from zbmd.training.checkpoint.held.messages import (
    Ask,
    Event,
    Heard,
    Save,
    SaveShard,
    arguments_of,
    decode_asked,
    encode,
)
from zbmd.training.checkpoint.index import Retention, read_index
from zbmd.training.checkpoint.sharded import Piece
from zbmd.training.checkpoint.storage import Storage, storage_of
from zbmd.training.checkpoint.writer import (
    STAGED_POINT,
    Begun,
    CheckpointWriter,
    CopyRoom,
    Told,
    WriterThreads,
)
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.memory.kept import span_of

WAITING_MAX: Final = 2
"""Of one rank: shards that are not ended. Ranks begin one checkpoint at a time, but for a new view."""
READ_BYTES: Final = 64 << 20
"""Of one read: the kernel returns at most 2 GiB."""
COUNTER: Final = 8


@dataclass(slots=True)
class _Checkpoint:
    """One checkpoint. clients, ranks: that asked, by place; copies: what they are to write."""

    first: SaveShard
    clients: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    copies: dict[int, Future[list[Piece]]] = field(default_factory=dict)
    writer: CheckpointWriter | None = None
    hurried: bool = False

    @property
    def teller(self) -> int:
        """The client that hears of failures: all ranks would say the same."""
        return self.clients[min(self.clients)]


class HeldCheckpoints:
    """See the module. A `HolderWork`."""

    def __init__(self, held: HeldMemory) -> None:
        self._held, self._threads, self._lock = held, WriterThreads(), threading.Lock()
        self._collecting: _Checkpoint | None = None
        self._complete: deque[_Checkpoint] = deque()
        self._rooms: dict[int, CopyRoom] = {}
        """Memory of copies, by rank."""

    def take(self, client: int, payload: bytes, arguments: int | None) -> None:
        """See `HolderWork`."""
        match decode_asked(payload):
            case Ask(stem=stem, hurry=hurry):
                if arguments is not None:
                    raise RemoteProtocolError("a question with a descriptor")
                self._hurry(stem, hurry=hurry)
                self._tell(client, stem, Event.ALIVE)
            case Save():
                if arguments is None:
                    raise RemoteProtocolError("a shard without its description")
                request, attached = arguments_of(arguments)
                self._save(client, request, arguments, attached)

    def _tell(self, client: int, stem: str, event: Event, header: int = 0, reason: str = "") -> None:
        self._held.post(client, encode(Heard(stem, event, header, reason)))

    def _hurry(self, stem: str, *, hurry: bool) -> None:
        with self._lock:
            begun = [*self._complete, *([] if self._collecting is None else [self._collecting])]
            every = [one for one in begun if hurry and one.first.stem == stem]
            for one in every:
                one.hurried = True
        for one in every:
            if one.writer is not None:
                one.writer.hurry()

    # ---- copies

    def _save(self, client: int, request: SaveShard, arguments: int, attached: int) -> None:
        memory = self._held.memory.get(request.rank)
        span = None if memory is None else span_of(memory, request.block)
        with self._lock:
            waiting = sum(request.rank in one.ranks.values() for one in self._complete)
        if memory is None or span is None or waiting >= WAITING_MAX:
            os.close(arguments)
            self._tell(client, request.stem, Event.REFUSED)
            return
        _check_spans(request, span[1])
        one = self._collecting
        if one is None or one.first.stem != request.stem or not request.together:
            one = self._collecting = _Checkpoint(request)
        if one.first.checkpoint() != request.checkpoint() or request.place in one.clients:
            raise RemoteProtocolError(f"rank {request.rank} asks for another {request.stem} than the others")
        room = self._rooms.setdefault(request.rank, CopyRoom())
        copied = self._threads.copier.submit(
            _copied, os.dup(memory), span[0], arguments, attached, request, room
        )
        one.clients[request.place], one.ranks[request.place] = client, request.rank
        one.copies[request.place] = copied
        if not request.together or len(one.clients) == request.places:
            self._collecting = None
            with self._lock:
                self._complete.append(one)
            self._held.busy(True)
            self._threads.writer.submit(self._begin, one)
        copied.add_done_callback(lambda _: self._tell(client, request.stem, Event.COPIED))

    # ---- on the writer's thread

    def _begin(self, one: _Checkpoint) -> None:
        first = one.first
        try:
            storage = storage_of(first.storage)
        except UserError as error:
            for client in one.clients.values():
                reason = str(error) if client == one.teller else ""
                self._tell(client, first.stem, Event.GAVE_UP, reason=reason)
            self._over(one)
            return
        seen = _published(storage)
        writer = one.writer = CheckpointWriter(
            storage,
            first.plan,
            threads=self._threads,
            tell=partial(self._told, one),
            retention=Retention(first.keep, first.every),
            codec=first.codec,
            ended=partial(self._ended, one),
            freed=partial(self._freed, one),
            fresh=lambda: (now := _published(storage)) == seen or now[0] <= first.version,
        )
        writer.handle(saving.NewView(first=first.together))
        writer.reached(first.version, due=True)
        if one.hurried:
            writer.hurry()
        writer.begin(Begun(first.version, first.stem, first.loss_scale, one.copies))

    def _ended(self, one: _Checkpoint) -> None:
        """Work on a checkpoint has ended: it votes for all shards, or its ranks hear of theirs."""
        writer, first = one.writer, one.first
        assert writer is not None and writer.begun is not None, "it has begun"
        report, headers = writer.machine.report, writer.begun.headers
        match report.progress:
            case saving.Progress.WROTE | saving.Progress.NO_SHARD if not first.together:
                for place, client in one.clients.items():
                    self._tell(client, first.stem, Event.WROTE, int(headers[place] or "0", 16))
                self._over(one)
            case saving.Progress.WROTE | saving.Progress.NO_SHARD:
                if writer.machine.pending is not None:
                    writer.handle(saving.Voted(tuple(_reports(headers, first.places))))
            case saving.Progress.PUBLISHED:
                for place, client in one.clients.items():
                    self._tell(client, first.stem, Event.PUBLISHED, int(headers[place] or "0", 16))
                writer.handle(saving.Voted((report,) * first.places))
                self._threads.writer.submit(self._over, one)  # after a rehearsal
            case saving.Progress.GAVE_UP:
                for client in one.clients.values():
                    reason = "it is given up" if client == one.teller else ""
                    self._tell(client, first.stem, Event.GAVE_UP, reason=reason)
                writer.handle(saving.Voted((report,) * first.places))
                self._threads.writer.submit(self._over, one)
            case _:
                pass

    def _told(self, one: _Checkpoint, told: Told) -> None:
        match told:
            case saving.TellFailure(reason=reason):
                self._tell(one.teller, one.first.stem, Event.FAILED, reason=reason)
            case saving.TellDamage(reason=reason):
                self._tell(one.teller, one.first.stem, Event.DAMAGED, reason=reason)
            case saving.TellSuccess():
                pass  # its rank knows that it had failed

    def _over(self, one: _Checkpoint) -> None:
        with self._lock:
            self._complete.remove(one)
            self._held.busy(bool(self._complete))

    def _freed(self, one: _Checkpoint, place: int, pieces: Sequence[Piece]) -> None:
        self._rooms[one.ranks[place]].free(pieces)


def _copied(
    memory: int, base: int, arguments: int, attached: int, request: SaveShard, room: CopyRoom
) -> list[Piece]:
    """Return copies of what a rank is to write, and close both descriptors.

    base: where its block begins in `memory`. Raises `ValueError` if it was overwritten meanwhile, as only a
    replacement of a dead rank does, and OSError.
    """
    try:
        wanted = [((span.count,), DTYPES[span.dtype]) for piece in request.pieces for span in piece.spans]
        copies, found = room.taken(wanted), list[Piece]()
        for piece in request.pieces:
            arrays = list[Array]()
            for span in piece.spans:
                arrays.append(next(copies))
                fd, begin = (arguments, attached) if span.attached else (memory, base)
                _read(arrays[-1], fd, begin + span.at)
            dtype = DTYPES[piece.dtype] if piece.dtype else None
            found.append(Piece(piece.name, piece.cut, tuple(arrays), piece.names, dtype))
        if int.from_bytes(os.pread(memory, COUNTER, base + request.counter), "little") != request.count:
            raise ValueError(f"rank {request.rank} was lost, and its state overwritten before it was copied")
        faults.hit(STAGED_POINT)
        return found
    finally:
        os.close(memory)
        os.close(arguments)


def _read(into: Array, fd: int, at: int) -> None:
    room = into.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(room):
        count = os.preadv(fd, [room[done : done + READ_BYTES]], at + done)
        if not count:
            raise ValueError("the memory of a rank is shorter than it was")
        done += count


def _check_spans(request: SaveShard, nbytes: int) -> None:
    """Raise `RemoteProtocolError` unless all that is to be copied lies in the block of the rank."""
    ends = [span.at + span.nbytes for piece in request.pieces for span in piece.spans if not span.attached]
    if max(*ends, request.counter + COUNTER, 0) > nbytes:
        raise RemoteProtocolError(f"rank {request.rank} asks for memory beyond its {nbytes} bytes")


def _published(storage: Storage) -> tuple[int, str]:
    """Return the version and stem of the checkpoint that is published; 0 if there is none."""
    try:
        names = read_index(storage)
    except UserError:
        return 0, ""
    return names.version, names.stem


def _reports(headers: dict[int, str], places: int) -> Iterator[saving.Report]:
    for place in range(places):
        header = headers[place]
        yield saving.Report(
            saving.Progress.WROTE if header else saving.Progress.NO_SHARD, int(header or "0", 16)
        )
