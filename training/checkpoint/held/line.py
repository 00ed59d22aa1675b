"""A rank's connection to the snapshot process of its host: have it write the rank's shard of a checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from zbmd.actors.snapshots.client import HolderLine, find_holders
from zbmd.actors.snapshots.messages import Look, Refused, Work
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.blocks import DTYPE_NAMES
from zbmd.training.checkpoint.held.messages import (
    Ask,
    Decided,
    Event,
    Heard,
    HeldPiece,
    Save,
    SaveShard,
    Span,
    decode_heard,
    encode,
    put_arguments,
)
from zbmd.training.checkpoint.sharded import Piece
from zbmd.transport.errors import PeerLost, RemoteProtocolError
from zbmd.transport.memory.kept import file_of
from zbmd.transport.native._native import address_of

LOOK_S: Final = 1.0
"""Seconds between two looks for a process: it comes after the first step, or in the place of another one."""
LOOK_SHARE: Final = 50
"""Looks take at most a time in so many: a process of another run that stands still answers none."""
SILENT_S: Final = 5.0
"""A process that has not sent anything for so long is asked whether it lives,"""
SILENT_TIMES: Final = 4
"""and so often, before it is given up, and killed: it must not write later."""
ENDS: Final = (Event.WROTE, Event.PUBLISHED, Event.GAVE_UP)
QUEUE_MAX: Final = 64
"""Messages that are taken at once."""


class HeldLine:
    """Has the shards of one rank written by the process that holds its memory. For the thread that trains.

    rank: its number; job: of the process, None: it may have any; memory: the block of its memory that the
    snapshot process has, and in which its state lies; file: the identity of all of that memory, see
    `file_of`.
    """

    def __init__(self, rank: int, memory: Array, file: tuple[int, int], *, job: int | None) -> None:
        self._job = job
        self.rank, self._file, self._begin, self._nbytes = rank, file, address_of(memory), memory.nbytes
        self._line: HolderLine | None = None
        self._holder = 0
        self._next_s = 0.0
        """When to look for a process again."""
        self._stem = ""
        self._heard: list[Heard] = []
        """Not taken yet."""
        self._is_copied = self._has_ended = True
        self._is_lost = False
        """Whether the process was lost with the shard; another one, found since, knows nothing of it."""

    @property
    def is_there(self) -> bool:
        """Whether the process can be asked for a shard. Looks for one now and then."""
        if self._line is not None:
            self._hear(0.0)
        if self._line is None and time.monotonic() >= self._next_s:
            began_s = time.monotonic()
            self._line = self._found()
            took_s = time.monotonic() - began_s
            self._next_s = began_s + took_s + max(LOOK_S, LOOK_SHARE * took_s)
        return self._line is not None

    @property
    def holder(self) -> int:
        """The job's number of the process, which no other host's has, but for a new one after a loss here.

        0: there is none.
        """
        return 0 if self._line is None else self._holder

    def _found(self) -> HolderLine | None:
        """Return a connection to the process that holds this very memory."""
        for address in find_holders(job=self._job):
            with contextlib.suppress(PeerLost, RemoteProtocolError, OSError), contextlib.ExitStack() as undo:
                line = HolderLine(address.name)
                undo.callback(line.close)
                held = line.snapshots(Look())
                if isinstance(held, Refused):
                    continue
                with contextlib.closing(held):
                    memory = held.memory.get(self.rank)
                    if memory is not None and file_of(memory) == self._file:
                        undo.pop_all()
                        self._holder = address.job
                        return line
        return None

    def save(self, request: SaveShard, pieces: Sequence[Piece]) -> bool:
        """Ask for a shard of these pieces; return whether that was sent. The memory stays until `staged`.

        request: without pieces. Arrays that do not lie in the memory are copied, and sent with it.
        """
        self._heard.clear()
        self._stem, self._is_copied, self._has_ended = request.stem, False, False
        self._is_lost = self._line is None
        if self._line is None:
            return False
        with _described(request, pieces, self._span) as arguments:
            try:
                self._line.send(Work(payload=encode(Save())), arguments)
            except PeerLost:
                self._lose()
        return self._line is not None

    def _span(self, array: Array) -> Span | None:
        """Return where an array lies in the memory; None if it does not lie there."""
        at = address_of(array) - self._begin
        inside = array.flags.c_contiguous and at >= 0 and at + array.nbytes <= self._nbytes
        return Span(at, array.size, DTYPE_NAMES[array.dtype]) if inside else None

    def staged(self) -> bool:
        """Wait until the memory is copied; return False if the process is lost before."""
        return self._wait(lambda: self._is_copied, hurry=False)

    def decided(self, *, is_committed: bool) -> None:
        """Say that the step of the shard is committed, or that the ranks went back behind it."""
        self._send(Decided(self._stem, is_committed))

    def settle(self) -> bool:
        """Wait for the end of the shard, for which all ranks wait; return False if the process is lost."""
        self._ask(hurry=True)
        return self._wait(lambda: self._has_ended, hurry=True)

    def heard(self) -> list[Heard]:
        """Return what was sent since the last call, of the shard that was asked for last."""
        self._hear(0.0)
        heard, self._heard = self._heard, []
        return heard

    @property
    def lost(self) -> bool:
        """Whether the shard that was asked for has not ended, and will not."""
        return self._is_lost

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._lose()

    def _wait(self, until: Callable[[], bool], *, hurry: bool) -> bool:
        silent = 0
        while self._line is not None and not self._is_lost and not until():
            if self._hear(SILENT_S):
                silent = 0
                continue
            silent += 1
            if silent > SILENT_TIMES:
                self._line.kill()
                self._lose()
            else:
                self._ask(hurry=hurry)
        return until()

    def _ask(self, *, hurry: bool) -> None:
        self._send(Ask(self._stem, hurry))

    def _send(self, what: Ask | Decided) -> None:
        if self._line is not None:
            try:
                self._line.send(Work(payload=encode(what)))
            except PeerLost:
                self._lose()

    def _hear(self, wait_s: float) -> bool:
        """Take what was sent, and wait for the first of it; return whether there was anything."""
        found = False
        for _ in range(QUEUE_MAX):
            line = self._line
            try:
                payload = None if line is None else line.worked(0.0 if found else wait_s)
                if payload is None:
                    break
                found = True
                self._take(decode_heard(payload))
            except (PeerLost, RemoteProtocolError):
                self._lose()
        return found

    def _take(self, heard: Heard) -> None:
        if heard.stem != self._stem:
            return
        if heard.event is Event.REFUSED:
            self._lose()
            return
        self._is_copied = self._is_copied or heard.event is Event.COPIED or heard.event in ENDS
        self._has_ended = self._has_ended or heard.event in ENDS
        if heard.event not in (Event.COPIED, Event.ALIVE):
            self._heard.append(heard)

    def _lose(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line, self._next_s = None, time.monotonic() + LOOK_S
            self._is_lost = self._is_lost or not self._has_ended


@contextlib.contextmanager
def _described(
    request: SaveShard, pieces: Sequence[Piece], span_of: Callable[[Array], Span | None]
) -> Iterator[int]:
    """Yield a memfd with the request, and with those arrays that do not lie in memory that is held."""
    held, apart, attached = list[HeldPiece](), list[Array](), 0
    for piece in pieces:
        spans = list[Span]()
        for array in piece.arrays:
            span = span_of(array)
            if span is None:
                span = Span(attached, array.size, DTYPE_NAMES[array.dtype], attached=True)
                apart.append(array)
                attached += array.nbytes
            spans.append(span)
        dtype = "" if piece.dtype is None else DTYPE_NAMES[np.dtype(piece.dtype)]
        names = tuple(piece.names)[: len(spans)]
        held.append(HeldPiece(piece.name, piece.cut, names, dtype, tuple(spans)))
    request = msgspec.structs.replace(request, pieces=tuple(held), attached=attached)
    memory = os.memfd_create("zbmd-shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.seek(put_arguments(memory, request))
            for array in apart:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        yield memory
    finally:
        os.close(memory)
