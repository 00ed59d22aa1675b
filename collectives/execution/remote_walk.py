"""Walks one program when some members are on other hosts; the compiled stepper says what may fire.

The instructions between two waits are taken as a batch. What is read of members on other hosts is asked for
at once: the wait before was the last thing that could have made it ready. A copy is received where it
belongs, if nothing else of the batch touches that; what is to be reduced is received beside it, and reduced
natively in the order of the program.

A member may overwrite what we read of it once we have notified somebody: so each notification waits until
everything that was asked for before it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np

from zbmd.collectives.execution.plan import Plan
from zbmd.collectives.execution.remote_fetch import STAGING_BYTES_MAX, Driver, Ended, Fetch, Fetched, Fetcher
from zbmd.collectives.execution.remote_sending import Outgoing
from zbmd.collectives.native._program import BLOCKED, DONE, Stepper
from zbmd.collectives.native._remote_stepper import RemoteGroup
from zbmd.collectives.native._stepper import STATUS_DONE, STATUS_LOST
from zbmd.collectives.programs.program import (
    INBOX,
    PUB,
    SCRATCH,
    Copy,
    Finish,
    Notify,
    Operand,
    Put,
    Reduce,
    Wait,
)
from zbmd.collectives.programs.reductions import itemsize, slot_itemsize
from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.native._native import address_of
from zbmd.transport.rdma.remote_memory import RemoteMemory

SentT = TypeVar("SentT")
ROWS_MAX: Final = 256
"""Instructions performed by one native call."""


@dataclass(slots=True)
class _Move:
    """An instruction that moves data, with its operands: addresses, or fetches. b: 0 but in a reduce."""

    instruction: Put | Reduce | Copy | Finish
    dst: int
    a: int | Fetched
    b: int | Fetched
    count: int
    done_by_fetch: bool = False
    """It is a copy, and is received where it belongs."""


class Walk:
    """One run of a plan; `channel` is the group's, `dtype` a code. kill_index: where to die, or -1."""

    def __init__(
        self,
        plan: Plan,
        group: RemoteGroup,
        fetcher: Fetcher,
        outgoing: Outgoing,
        *,
        driver: Driver,
        remote: Mapping[int, RemoteMemory],
        channel: int,
        dtype: int,
        deadline_ns: int,
        kill_index: int,
    ) -> None:
        self._plan = plan
        self._group = group
        self._fetcher = fetcher
        self._outgoing = outgoing
        self._driver = driver
        self._remote = remote
        self._channel = channel
        self._itemsize = itemsize(dtype)
        self._slot_itemsize = slot_itemsize(dtype)
        self._deadline_ns = deadline_ns
        self._kill_index = kill_index
        self._rows = np.zeros((ROWS_MAX, 5), np.uint64)
        self._rows_used = 0
        self._flying: list[Fetch] = []
        """Copies that are not known to have come."""

    def run(self) -> None:
        """Walk to the end of the program. Raises `Ended`."""
        instructions, group = self._plan.program.instructions, self._group
        stepper = Stepper(self._plan.encoding)
        received = np.zeros(self._plan.program.n, np.uint64)
        while (at := stepper.next(received)) != DONE:
            begin = stepper.pc
            group.at(begin)
            if begin == self._kill_index:
                group.die()
            instruction = instructions[begin]
            if at == BLOCKED and isinstance(instruction, Wait):
                peer, count = instruction.peer, instruction.count
                self._driver.until(partial(group.has_told, peer, count), far=peer in self._remote)
                self._require(group.wait(instruction.peer, instruction.count, self._deadline_ns))
                received[instruction.peer] = instruction.count
                continue
            end = begin + 1
            if not isinstance(instruction, Wait):
                end = self._end_of_batch(begin)
                self._batch(begin, end)
            for _ in range(begin, end):
                stepper.advance()
        group.at(len(instructions))
        self._settle()

    def _end_of_batch(self, begin: int) -> int:
        instructions = self._plan.program.instructions
        for end in range(begin + 1, len(instructions)):
            if end == self._kill_index or isinstance(instructions[end], Wait):
                return end
        return len(instructions)

    def _batch(self, begin: int, end: int) -> None:
        """Perform instructions begin..end-1, none of which waits."""
        instructions, group = self._plan.program.instructions, self._group
        moves = {
            index: _Move(instruction, *group.place(self._plan.native, index))
            for index in range(begin, end)
            if isinstance(instruction := instructions[index], Put | Reduce | Copy | Finish)
        }
        direct = self._may_land_directly(moves.values())
        while begin < end:
            steps: list[tuple[int, _Move | None]] = []
            while begin < end and self._fetcher.staged_bytes < STAGING_BYTES_MAX:
                move = moves.get(begin)
                if move is not None:
                    self._add_fetches(move, direct=direct)
                steps.append((begin, move))
                begin += 1
            self._perform(steps)

    def _perform(self, steps: list[tuple[int, _Move | None]]) -> None:
        instructions = self._plan.program.instructions
        asked = self._fetcher.ask()
        if not all(move is not None and move.done_by_fetch for _, move in steps):
            self._settle()
        self._flying += [fetch for fetch in asked if fetch.direct]
        for index, move in steps:
            instruction = instructions[index]
            if move is not None and not isinstance(instruction, Put):
                if not move.done_by_fetch and move.count:
                    self._row(index, move.dst, move.a, move.b, move.count)
                continue
            self._flush()
            self._settle()
            self._group.at(index)
            if isinstance(instruction, Notify):
                self._notify(instruction.peer)
            elif move is not None:
                self._put(index, move)
        self._flush()

    # -- operands ------------------------------------------------------------------------------------

    def _is_remote(self, operand: Operand) -> bool:
        return operand.rank in self._remote and operand.buffer != PUB

    def _nbytes(self, operand: Operand, count: int) -> int:
        """Bytes of so many elements: a 16-bit float is wider in a slot."""
        return count * (self._slot_itemsize if operand.buffer in (SCRATCH, INBOX) else self._itemsize)

    def _lands(self, instruction: Put | Reduce | Copy | Finish) -> bool:
        """Whether it is a copy from another host whose bytes are those of its destination."""
        if not isinstance(instruction, Copy) or not self._is_remote(instruction.src):
            return False
        return self._nbytes(instruction.dst, 1) == self._nbytes(instruction.src, 1)

    def _add_fetches(self, move: _Move, *, direct: bool) -> None:
        """Have the operands fetched that are on other hosts."""
        for name, operand in _sources(move.instruction):
            if move.count and self._is_remote(operand):
                move.done_by_fetch = direct and self._lands(move.instruction)
                at = move.a if name == "a" else move.b
                assert isinstance(at, int)
                fetched = self._fetcher.add(
                    operand.rank,
                    operand.buffer,
                    at,
                    move.count * self._itemsize,
                    move.dst if move.done_by_fetch else 0,
                )
                setattr(move, name, fetched)

    def _may_land_directly(self, moves: Iterable[_Move]) -> bool:
        """Whether every copy from another host can be received in place, whenever it comes."""
        ranges = [(fetch.address, fetch.address + fetch.nbytes, True) for fetch in self._flying]
        for move in moves:
            instruction = move.instruction
            if not (isinstance(instruction, Put) and instruction.dst.rank in self._remote):
                nbytes = self._nbytes(instruction.dst, move.count)
                ranges.append((move.dst, move.dst + nbytes, self._lands(instruction)))
            for name, operand in _sources(instruction):
                if not self._is_remote(operand):
                    at = move.a if name == "a" else move.b
                    assert isinstance(at, int)
                    ranges.append((at, at + self._nbytes(operand, move.count), False))
        return _apart(sorted(ranges))

    # -- doing it ------------------------------------------------------------------------------------

    def _row(self, index: int, dst: int, a: int | Fetched, b: int | Fetched, count: int) -> None:
        """Perform instruction `index`, with others, before anybody can tell that it is not done."""
        missing = [x.fetch for x in (a, b) if isinstance(x, Fetched) and not self._fetcher.is_here(x.fetch)]
        if missing or self._rows_used == ROWS_MAX:
            self._flush()
        for operand in (a, b):
            if isinstance(operand, Fetched):
                self._fetcher.wait((operand.fetch,))
        at = [x.address if isinstance(x, Fetched) else x for x in (a, b)]
        self._rows[self._rows_used] = dst, *at, count, index
        self._rows_used += 1

    def _flush(self) -> None:
        """Perform what is due."""
        rows, self._rows_used = self._rows_used, 0
        if rows:
            self._require(self._group.perform(self._plan.native, self._rows, rows))

    def _settle(self) -> None:
        """Wait for all copies."""
        flying, self._flying = self._flying, []
        self._fetcher.wait(flying)

    def _put(self, index: int, move: _Move) -> None:
        instruction = move.instruction
        assert isinstance(instruction, Put)
        peer, nbytes = instruction.dst.rank, self._nbytes(instruction.dst, move.count)
        if peer not in self._remote or not nbytes:
            if nbytes:
                self._row(index, move.dst, move.a, 0, move.count)
                self._flush()
            self._notify(peer)
            return
        assert isinstance(move.a, int), "a put sends what is here"
        place = self._outgoing.take(nbytes)
        data = place.array[:nbytes]
        if nbytes == self._nbytes(instruction.src, move.count):
            data.data[:] = self._group.window(move.a, nbytes).cast("B")
        else:  # 16-bit floats, which are wider in a slot
            self._row(index, address_of(data), move.a, 0, move.count)
            self._flush()
        value = self._group.tell(peer)
        region = self._fetcher.region(peer, INBOX, writable=True)
        place.transfer = reach(peer, lambda: region.put(data, move.dst, channel=self._channel, value=value))

    def _notify(self, peer: int) -> None:
        value = self._group.tell(peer)
        if peer in self._remote:
            try:
                reach(peer, lambda: self._remote[peer].notify(self._channel, value))
            except Ended:
                if not self._group.has_closed(peer):  # else its part is done, and it waits for nothing
                    raise

    def _require(self, status: int) -> None:
        if status != STATUS_DONE:
            raise Ended(status)


def reach(place: int, send: Callable[[], SentT]) -> SentT:
    """Send something to the member at `place`, on another host; raises `Ended` if it is gone."""
    try:
        return send()
    except (PeerLost, LinkClosed):
        raise Ended(STATUS_LOST, place) from None


def _sources(instruction: Put | Reduce | Copy | Finish) -> tuple[tuple[str, Operand], ...]:
    if isinstance(instruction, Reduce):
        return ("a", instruction.a), ("b", instruction.b)
    return (("a", instruction.src),)


def _apart(ranges: list[tuple[int, int, bool]]) -> bool:
    """Whether no range that lands (True) overlaps any other; sorted by their beginnings."""
    any_end = landing_end = 0
    for begin, end, lands in ranges:
        if begin < end and begin < (any_end if lands else landing_end):
            return False
        any_end = max(any_end, end)
        landing_end = max(landing_end, end) if lands else landing_end
    return True
