"""Writes the shards that ranks ask for, from the memory that is held, on threads of the snapshot process.

    collecting: copied as ranks ask ──all of the host have asked──▶ writing ──step committed──▶ published
                                                                       └──▶ given up, or dropped

A checkpoint that all ranks have asked for is finished, whoever is lost then. One that a rank was lost before
it could ask for never begins to be written: the next one takes its place. One is written at a time.

What is written waits until its step is in the commit log (`commitment`), which the rank at the lowest place
of the host says, or the log itself once nobody will say more.

If other processes write the shards of other ranks, each of them writes a part of the index when its shards
are durable, and the whole once it finds all parts (`gathering`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, assert_never

import numpy as np

from zbmd.actors.snapshots.holder import HeldMemory
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.blocks import DTYPES
from zbmd.training.checkpoint.held import commitment, gathering
from zbmd.training.checkpoint.held.commitment import Commitment
from zbmd.training.checkpoint.held.gathering import Gathering
from zbmd.training.checkpoint.held.messages import (
    Ask,
    Decided,
    Event,
    Heard,
    Save,
    SaveShard,
    arguments_of,
    decode_asked,
    encode,
)
from zbmd.training.checkpoint.held.shared import Published, Shared
from zbmd.training.checkpoint.index import Retention, remove_unnamed
from zbmd.training.checkpoint.sharded import Piece
from zbmd.training.checkpoint.storage import storage_of
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
from zbmd.transport.native._native import now_ns

WAITING_MAX: Final = 2
"""Of one rank: shards that are not ended. Ranks begin one checkpoint at a time, but for a new view."""
READ_BYTES: Final = 64 << 20
"""Of one read: the kernel returns at most 2 GiB."""
COPIERS_MAX: Final = 4
"""Threads that copy: a few have all of the memory's bandwidth."""
COUNTER: Final = 8
HELD_POINT: Final = faults.declare("shards.held", "when all shards of a host are durable, before its step is")


@dataclass(slots=True)
class _Checkpoint:
    """One checkpoint. clients, ranks: that asked, by place; copies: what they are to write."""

    first: SaveShard
    clients: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    copies: dict[int, Future[list[Piece]]] = field(default_factory=dict)
    writer: CheckpointWriter | None = None
    hurried: bool = False
    is_durable: bool = False
    """Whether all shards of this host are."""
    is_last: bool = True
    """Whether nothing waits for it: a newer one, or the end of the process."""
    said: deque[commitment.Event] = field(default_factory=deque)
    """Not taken yet."""
    wake: threading.Event = field(default_factory=threading.Event)
    """Set when one of these three has changed."""

    @property
    def teller(self) -> int:
        """The client that hears of failures: all ranks would say the same."""
        return self.clients[min(self.clients)]

    def speaks(self, client: int) -> bool:
        """Return whether a client is the rank that says what becomes of the step."""
        return self.clients.get(self.first.homes[self.first.place]) == client

    def say(self, event: commitment.Event) -> None:
        """Take what is known of its step. For any thread."""
        if event not in self.said:
            self.said.append(event)
        self.wake.set()


class HeldCheckpoints:
    """See the module. A `HolderWork`. logged: whether a commit log has a version."""

    def __init__(self, held: HeldMemory, logged: Callable[[Path, int], bool]) -> None:
        copiers = min(COPIERS_MAX, len(os.sched_getaffinity(0)))
        self._held, self._logged, self._lock = held, logged, threading.Lock()
        self._threads = WriterThreads(copiers=copiers, yields=True)
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
            case Decided(stem=stem, is_committed=is_committed):
                if arguments is not None:
                    raise RemoteProtocolError("a decision with a descriptor")
                for one in self._of(stem):
                    if one.speaks(client):
                        one.say(commitment.Committed() if is_committed else commitment.Withdrawn())
            case Save():
                if arguments is None:
                    raise RemoteProtocolError("a shard without its description")
                request, attached = arguments_of(arguments)
                self._save(client, request, arguments, attached)

    def leave(self, client: int) -> None:
        """See `HolderWork`."""
        for one in self._of(None):
            if one.speaks(client):
                one.say(commitment.Deserted())

    def hasten(self) -> None:
        """See `HolderWork`."""
        with self._lock:
            self._leave_soon()

    def _leave_soon(self) -> None:
        """Wait for the parts of other hosts, and for the words of ranks, no longer."""
        for one in self._complete:
            one.is_last = False
            one.say(commitment.Deserted())

    def _of(self, stem: str | None) -> list[_Checkpoint]:
        """Return the checkpoints of this name that are not over; None: of any."""
        with self._lock:
            every = [*self._complete, *([] if self._collecting is None else [self._collecting])]
        return [one for one in every if stem in (None, one.first.stem)]

    def _tell(self, client: int, stem: str, event: Event, header: int = 0, reason: str = "") -> None:
        self._held.post(client, encode(Heard(stem, event, header, reason)))

    def _hurry(self, stem: str, *, hurry: bool) -> None:
        every = self._of(stem) if hurry else []
        with self._lock:
            for one in every:
                one.hurried = True
                one.wake.set()
                self._threads.hurry()
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
        if one is None or one.first.stem != request.stem:
            one = self._collecting = _Checkpoint(request)
        if one.first.checkpoint() != request.checkpoint() or request.place in one.clients:
            raise RemoteProtocolError(f"rank {request.rank} asks for another {request.stem} than the others")
        room = self._rooms.setdefault(request.rank, CopyRoom())
        copied = self._threads.copier.submit(
            _copied, os.dup(memory), span[0], arguments, attached, request, room
        )
        one.clients[request.place], one.ranks[request.place] = client, request.rank
        one.copies[request.place] = copied
        if len(one.clients) == len(request.here):
            self._collecting = None
            with self._lock:
                self._leave_soon()
                self._complete.append(one)
            self._held.busy(True)
            self._threads.writer.submit(self._begin, one)
        copied.add_done_callback(lambda _: self._tell(client, request.stem, Event.COPIED))

    # ---- on the writer's thread

    def _begin(self, one: _Checkpoint) -> None:
        with self._lock:
            self._threads.hurry(one.hurried)
        first = one.first
        try:
            storage = storage_of(first.storage)
        except UserError as error:
            for client in one.clients.values():
                reason = str(error) if client == one.teller else ""
                self._tell(client, first.stem, Event.GAVE_UP, reason=reason)
            self._over(one)
            return
        before = Published.of(storage)
        writer = one.writer = CheckpointWriter(
            storage,
            first.plan,
            threads=self._threads,
            tell=partial(self._told, one),
            retention=Retention(first.keep, first.every),
            codec=first.codec,
            ended=partial(self._ended, one, Shared(storage, first, before)),
            freed=partial(self._freed, one),
            fresh=lambda: Published.of(storage).leaves(first.version, before),
        )
        writer.handle(saving.NewView(first=first.together))
        writer.reached(first.version, due=True)
        if one.hurried:
            writer.hurry()
        writer.begin(Begun(first.version, first.stem, first.loss_scale, one.copies))

    def _ended(self, one: _Checkpoint, shared: Shared) -> None:
        """Work on a checkpoint has ended: it votes for all shards, or looks for those of other hosts."""
        writer, first = one.writer, one.first
        assert writer is not None and writer.begun is not None, "it has begun"
        report, headers = writer.machine.report, writer.begun.headers
        match report.progress:
            case saving.Progress.WROTE | saving.Progress.NO_SHARD:
                if writer.machine.pending is not None and not one.is_durable:
                    one.is_durable = True
                    self._threads.writer.submit(self._hold_back, one, shared, headers)
            case saving.Progress.PUBLISHED:
                for place, client in one.clients.items():
                    self._tell(client, first.stem, Event.PUBLISHED, int(headers[place] or "0", 16))
                writer.handle(saving.Voted((report,) * first.places))
                self._threads.writer.submit(self._over, one)  # after a rehearsal
            case saving.Progress.GAVE_UP:
                self._give_up(one, "it is given up")
                if not first.together:  # nor can others publish it: they have no part of this host
                    self._threads.writer.submit(remove_unnamed, shared.storage, first.stem)
                writer.handle(saving.Voted((report,) * first.places))
                self._threads.writer.submit(self._over, one)
            case _:
                pass

    def _give_up(self, one: _Checkpoint, reason: str) -> None:
        for client in one.clients.values():
            told = reason if client == one.teller else ""
            self._tell(client, one.first.stem, Event.GAVE_UP, reason=told)

    # ---- until its step is committed

    def _hold_back(self, one: _Checkpoint, shared: Shared, headers: Mapping[int, str]) -> None:
        """Drive a `Commitment`; then publish the checkpoint, or the part of this host."""
        machine, writer, first = Commitment(), one.writer, one.first
        faults.hit(HELD_POINT)
        while not machine.is_decided:
            one.wake.wait()
            one.wake.clear()
            while one.said:
                for action in machine.handle(one.said.popleft()):
                    if action is commitment.Action.READ_LOG:
                        is_logged = self._logged(Path(first.log), first.version)
                        one.said.appendleft(commitment.Judged(is_logged))
        assert writer is not None, "it has written"
        if machine.state is commitment.State.DROPPED:
            if first.together:
                remove_unnamed(shared.storage, first.stem)
            writer.give_up()
            self._give_up(one, "")
            self._over(one)
        elif first.together:
            writer.handle(saving.Voted(tuple(_reports(headers, first.places))))
        else:
            self._gather(one, shared, headers)

    # ---- with other hosts

    def _gather(self, one: _Checkpoint, shared: Shared, headers: Mapping[int, str]) -> None:
        """Drive a `Gathering`: put the part of this host, and publish the whole once all parts are there."""
        machine, is_last, hurried = Gathering(), True, False
        actions = machine.begin(now_ns=now_ns())
        event: gathering.Event
        while (task := self._announced(one, actions, headers)) is not None:
            if is_last != one.is_last:
                is_last, event = False, gathering.Superseded()
            elif hurried != one.hurried:
                hurried, event = True, gathering.Hurry()
            elif (wait_ns := task.at_ns - now_ns()) > 0:
                one.wake.wait(wait_ns / 1e9)
                one.wake.clear()
                actions = [task]
                continue
            else:
                event = shared.done(task.task, headers)
            actions = machine.handle(event, now_ns=now_ns())
        self._over(one)

    def _announced(
        self, one: _Checkpoint, actions: Sequence[gathering.Action], headers: Mapping[int, str]
    ) -> gathering.Do | None:
        """Tell the ranks what they are to know; return what is to be done next."""
        found: gathering.Do | None = None
        for action in actions:
            match action:
                case gathering.Do():
                    found = action
                case gathering.TellPart() | gathering.TellPublished():
                    kind = Event.WROTE if isinstance(action, gathering.TellPart) else Event.PUBLISHED
                    for place, client in one.clients.items():
                        self._tell(client, one.first.stem, kind, int(headers[place] or "0", 16))
                case gathering.TellFailure(reason=reason, gave_up=True):
                    self._give_up(one, reason)
                case gathering.TellFailure(reason=reason):
                    self._tell(one.teller, one.first.stem, Event.FAILED, reason=reason)
                case _:
                    assert_never(action)
        return found

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


def _reports(headers: Mapping[int, str], places: int) -> Iterator[saving.Report]:
    for place in range(places):
        header = headers[place]
        yield saving.Report(
            saving.Progress.WROTE if header else saving.Progress.NO_SHARD, int(header or "0", 16)
        )
