"""Proves a set of programs right before anything runs.

The programs of all ranks run once, symbolically: a place holds an expression over contributions, and
every access carries a vector clock. Waiting for a peer's k-th notification always meets the same notify,
so control does not depend on timing: one run finds every deadlock, and one happens-before relation finds
every data race (epochs as in Flanagan and Freund, "FastTrack", PLDI 2009).

What is proved: each output holds each contribution exactly once, in the promised order, the same on all
ranks; no deadlock; no data race under put / notify / wait, where the completion of a rank counts as a write
to all its buffers but `pub`, since the caller may reuse them; no slot is overwritten before it was consumed;
notifications balance, so counters of the next operation begin where these end; every operand is in bounds and
accessible, and what is read of another's `pub` is sent to the reader. A reduction writes `out` last of all on
its chunk, for there averages are divided and 16-bit floats rounded; what another rank has reduced is finished
there, once, and lacks nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from zbmd.collectives.errors import Flaw, VerificationError
from zbmd.collectives.programs.program import (
    BUFFERS,
    INBOX,
    MAX_RANKS,
    OUT,
    PUB,
    SCRATCH,
    Copy,
    Finish,
    Instruction,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
)
from zbmd.collectives.programs.spec import Spec, Tree


def verify(programs: Sequence[Program], spec: Spec) -> None:
    """Raise `VerificationError` unless `programs` (of ranks 0..n-1) achieve `spec` in every execution."""
    _check_headers(programs, spec)
    writable = {output.place for output in spec.outputs}
    for program in programs:
        bounds = _Bounds(programs, program.rank, writable, spec.sent)
        for index, instruction in enumerate(program.instructions):
            bounds.check(index, instruction)
    run = _Run(programs, spec)
    run.to_the_end()
    run.check_balance()
    run.check_outputs()


def _check_headers(programs: Sequence[Program], spec: Spec) -> None:
    if len(programs) != spec.n or not 1 <= spec.n <= MAX_RANKS:
        raise VerificationError(
            Flaw.MALFORMED, len(programs), None, f"{len(programs)} programs for {spec.n} ranks"
        )
    for rank, program in enumerate(programs):
        shape = (program.rank, program.n, program.blocks, program.chunks, program.algorithm)
        if shape != (rank, spec.n, spec.blocks, spec.chunks, programs[0].algorithm):
            raise VerificationError(Flaw.MALFORMED, rank, None, f"its header does not fit: {shape}")
        if spec.chunks < 1 or spec.chunks % spec.blocks:
            raise VerificationError(Flaw.MALFORMED, rank, None, f"{spec.chunks} chunks do not make blocks")


class _Bounds:
    """What the operands of one rank's instructions may be. Messages are made of what is wrong alone: most of
    what a sweep looks at is right."""

    def __init__(
        self,
        programs: Sequence[Program],
        rank: int,
        writable: set[Operand],
        sent: Callable[[int, int], range] | None,
    ) -> None:
        self._rank = rank
        self._sent = None if sent is None else [sent(peer, rank) for peer in range(len(programs))]
        self._peers = range(len(programs))
        self._chunks = range(programs[rank].chunks)
        self._slots = [{SCRATCH: range(p.scratch_slots), INBOX: range(p.inbox_slots)} for p in programs]
        self._writable = writable
        self._at = 0
        self._instruction: Instruction | None = None

    def check(self, index: int, instruction: Instruction) -> None:
        """Raise `VerificationError` unless all operands are in bounds and accessible."""
        self._at, self._instruction = index, instruction
        match instruction:
            case Reduce(chunk, dst, a, b):
                self._check_source(a, chunk)
                self._check_source(b, chunk)
                self._check_target(dst, chunk)
            case Copy(chunk, dst, src):
                self._check_source(src, chunk)
                self._check_target(dst, chunk)
            case Finish(chunk, dst, src):
                self._check_source(src, chunk)
                self._check_target(dst, chunk)
                if dst.buffer != OUT or src.buffer not in (SCRATCH, INBOX):
                    raise self._fail(Flaw.NOT_ACCESSIBLE, "what is finished goes from a slot to `out`")
            case Wait(peer, count):
                self._check_peer(peer)
                if count < 1:
                    raise self._fail(Flaw.MALFORMED, "counts begin at 1")
            case Notify(peer):
                self._check_peer(peer)
            case Put(chunk, dst, src):
                self._check_peer(dst.rank)
                self._check_place(dst, chunk)
                self._check_source(src, chunk)
                if dst.buffer != INBOX or src.rank != self._rank:
                    raise self._fail(Flaw.NOT_ACCESSIBLE, "a put goes from local memory to a peer's inbox")
            case _:
                assert_never(instruction)

    def _fail(self, flaw: Flaw, detail: str) -> VerificationError:
        return VerificationError(flaw, self._rank, self._at, f"{self._instruction}: {detail}")

    def _check_place(self, operand: Operand, chunk: int) -> None:
        rank, buffer, number = operand
        if rank not in self._peers or not 0 <= buffer < BUFFERS:
            raise self._fail(Flaw.OUT_OF_BOUNDS, f"there is no {operand}")
        slots = self._slots[rank].get(buffer)
        if number not in (self._chunks if slots is None else slots):
            raise self._fail(Flaw.OUT_OF_BOUNDS, f"{operand} is beyond the buffer")
        if chunk not in self._chunks:
            raise self._fail(Flaw.OUT_OF_BOUNDS, f"there is no chunk {chunk}")
        if slots is None and number != chunk:
            raise self._fail(Flaw.WRONG_CHUNK, f"{operand} is not of chunk {chunk}")

    def _check_source(self, operand: Operand, chunk: int) -> None:
        self._check_place(operand, chunk)
        if operand.rank != self._rank and operand.buffer in (SCRATCH, INBOX):
            raise self._fail(Flaw.NOT_ACCESSIBLE, f"{operand} is not readable from rank {self._rank}")
        sent = None if self._sent is None or operand.rank == self._rank else self._sent[operand.rank]
        if sent is not None and operand.buffer == PUB and operand.number not in sent:
            raise self._fail(Flaw.NOT_ACCESSIBLE, f"{operand} is not sent to rank {self._rank}")

    def _check_target(self, dst: Operand, chunk: int) -> None:
        if dst.rank != self._rank or not (
            dst.buffer == SCRATCH or (dst.buffer == OUT and dst in self._writable)
        ):
            raise self._fail(Flaw.NOT_ACCESSIBLE, f"{dst} is not writable here")
        self._check_place(dst, chunk)

    def _check_peer(self, peer: int) -> None:
        if peer not in self._peers or peer == self._rank:
            raise self._fail(Flaw.MALFORMED, f"{peer} is no peer of rank {self._rank}")


class _Expressions:
    """Hash-consed expressions: equal ids mean equal trees over the same contributions."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._ids: dict[tuple[int, int, int], int] = {}
        self._parts: list[tuple[int, int, int]] = []
        self._outputs: dict[tuple[int, int], int] = {}
        self.members: list[int] = []
        self.chunk: list[int] = []

    def leaf(self, label: int, chunk: int) -> int:
        return self._intern((-1, label, chunk), 1 << label, chunk)

    def node(self, a: int, b: int) -> int:
        return self._intern((a, b, 0), self.members[a] | self.members[b], self.chunk[a])

    def tree(self, tree: Tree, chunk: int) -> int:
        if isinstance(tree, int):
            return self.leaf(tree, chunk)
        return self.node(self.tree(tree[0], chunk), self.tree(tree[1], chunk))

    def result(self, node: int) -> int:
        """A reduction's end result, divided and rounded as its dtype wants it."""
        return self._intern((node, -1, 0), self.members[node], self.chunk[node])

    def output(self, tree: Tree, chunk: int) -> int:
        """The expression that an output must hold. `tree` outlives this: it is recognised by its identity."""
        value = self._outputs.get((id(tree), chunk))
        if value is None:
            value = self.tree(tree, chunk)
            value = value if isinstance(tree, int) else self.result(value)
            self._outputs[id(tree), chunk] = value
        return value

    def is_result(self, value: int) -> bool:
        return self._parts[value][1] == -1

    def names(self, members: int) -> str:
        return ", ".join(name for i, name in enumerate(self._labels) if members >> i & 1) or "nothing"

    def _intern(self, key: tuple[int, int, int], members: int, chunk: int) -> int:
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self._parts)
            self._parts.append(key)
            self.members.append(members)
            self.chunk.append(chunk)
        return found


@dataclass(slots=True)
class _Cell:
    """The content of one place and the accesses to it since its last write."""

    value: int | None = None
    writer: int = -1
    written_at: int = 0
    unread: bool = False
    readers: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True)
class _Walker:
    """One rank's position: instruction, vector clock, notifications (clock snapshots) it has sent."""

    clock: list[int]
    at: int = 0
    done: bool = False
    sent: dict[int, list[tuple[int, ...]]] = field(default_factory=dict[int, list[tuple[int, ...]]])
    awaited: dict[int, int] = field(default_factory=dict[int, int])
    cells: list[tuple[Operand, _Cell]] = field(default_factory=list[tuple[Operand, _Cell]])


class _Run:
    """The symbolic run of all programs."""

    def __init__(self, programs: Sequence[Program], spec: Spec) -> None:
        self._programs = programs
        self._spec = spec
        self._values = _Expressions(spec.labels)
        self._expected = {
            output.place: self._values.output(output.tree, output.place.number) for output in spec.outputs
        }
        self._cells: dict[Operand, _Cell] = {}
        """By place; places that are one memory have one cell."""
        self._walkers = [_Walker([int(q == rank) for q in range(spec.n)]) for rank in range(spec.n)]
        for place, label in spec.inputs.items():
            cell = self._cell(place)
            cell.value, cell.writer = self._values.leaf(label, place.number), place.rank

    def to_the_end(self) -> None:
        """Run every rank to its completion; raises on a race, a bad value or a deadlock."""
        waiting = deque(range(self._spec.n))
        stuck = 0
        while waiting:
            rank = waiting.popleft()
            before = self._walkers[rank].at
            self._advance(rank)
            walker = self._walkers[rank]
            if walker.done:
                stuck = 0
                continue
            waiting.append(rank)
            stuck = 0 if walker.at != before else stuck + 1
            if stuck > len(waiting):
                raise self._deadlock(sorted(waiting))

    def check_balance(self) -> None:
        """Every notification sent was waited for."""
        for rank, walker in enumerate(self._walkers):
            for peer, sent in walker.sent.items():
                awaited = self._walkers[peer].awaited.get(rank, 0)
                if awaited != len(sent):
                    detail = f"it is notified {len(sent)} times by rank {rank} and waits for {awaited}"
                    raise VerificationError(Flaw.UNBALANCED, peer, None, detail)

    def check_outputs(self) -> None:
        """Every output is the tree that the specification promises."""
        for output in self._spec.outputs:
            rank, value = output.place.rank, self._cell(output.place).value
            expected = self._expected[output.place]
            if value == expected:
                continue
            if value is None:
                raise VerificationError(Flaw.WRONG_OUTPUT, rank, None, f"{output.place} was never written")
            if self._values.chunk[value] != output.place.number:
                detail = f"{output.place} holds chunk {self._values.chunk[value]}"
                raise VerificationError(Flaw.WRONG_CHUNK, rank, None, detail)
            held, wanted = self._values.members[value], self._values.members[expected]
            if held != wanted:
                detail = f"{output.place} lacks {self._values.names(wanted & ~held)}"
                if held & ~wanted:
                    detail += f" and holds {self._values.names(held & ~wanted)}"
                raise VerificationError(Flaw.WRONG_OUTPUT, rank, None, detail)
            if self._values.is_result(expected) and not self._values.is_result(value):
                raise VerificationError(Flaw.UNFINISHED, rank, None, f"{output.place}")
            raise VerificationError(Flaw.WRONG_ORDER, rank, None, f"{output.place}")

    def _deadlock(self, ranks: list[int]) -> VerificationError:
        stories: list[str] = []
        for rank in ranks:
            walker = self._walkers[rank]
            wait = self._programs[rank].instructions[walker.at]
            if isinstance(wait, Wait):
                peer = self._walkers[wait.peer]
                state = "has ended" if peer.done else f"is at instruction {peer.at}"
                got = len(peer.sent.get(rank, ()))
                stories.append(
                    f"rank {rank} waits for notification {wait.count} of rank {wait.peer}, "
                    f"which sent {got} and {state}"
                )
        return VerificationError(Flaw.DEADLOCK, ranks[0], self._walkers[ranks[0]].at, "; ".join(stories))

    def _cell(self, place: Operand) -> _Cell:
        cell = self._cells.get(place)
        if cell is None:
            own = self._spec.aliases.get(place, place)
            cell = self._cells.get(own)
            if cell is None:
                cell = self._cells[own] = _Cell(writer=own.rank)
                self._walkers[own.rank].cells.append((own, cell))
            self._cells[place] = cell
        return cell

    def _advance(self, rank: int) -> None:
        walker = self._walkers[rank]
        instructions = self._programs[rank].instructions
        while walker.at < len(instructions):
            instruction = instructions[walker.at]
            match instruction:
                case Reduce(chunk, dst, a, b):
                    total = self._combine(rank, chunk, a, b)
                    if dst.buffer == OUT:
                        total = self._finish(rank, dst, total)
                    self._write(rank, dst, total)
                case Copy(chunk, dst, src):
                    value = self._read(rank, src, chunk)
                    if self._cell(dst) is not self._cell(src):  # in place, the executor copies nothing
                        self._write(rank, dst, value)
                case Finish(chunk, dst, src):
                    self._write(rank, dst, self._finish(rank, dst, self._read(rank, src, chunk)))
                case Wait(peer, count):
                    sent = self._walkers[peer].sent.get(rank, ())
                    if len(sent) < count:
                        return
                    walker.awaited[peer] = max(walker.awaited.get(peer, 0), count)
                    walker.clock = list(map(max, walker.clock, sent[count - 1]))
                case Put(chunk, dst, src):
                    self._write(rank, dst, self._read(rank, src, chunk))
                    self._notify(rank, dst.rank)
                case Notify(peer):
                    self._notify(rank, peer)
                case _:
                    assert_never(instruction)
            walker.at += 1
        self._complete(rank)

    def _fail(self, flaw: Flaw, rank: int, detail: str) -> VerificationError:
        walker = self._walkers[rank]
        if walker.at >= len(self._programs[rank].instructions):
            return VerificationError(flaw, rank, None, detail)
        return VerificationError(
            flaw, rank, walker.at, f"{self._programs[rank].instructions[walker.at]}: {detail}"
        )

    def _notify(self, rank: int, peer: int) -> None:
        walker = self._walkers[rank]
        walker.sent.setdefault(peer, []).append(tuple(walker.clock))
        walker.clock[rank] += 1

    def _combine(self, rank: int, chunk: int, a: Operand, b: Operand) -> int:
        left, right = self._read(rank, a, chunk), self._read(rank, b, chunk)
        twice = self._values.members[left] & self._values.members[right]
        if twice:
            raise self._fail(Flaw.DUPLICATE, rank, f"{self._values.names(twice)} would count twice")
        return self._values.node(left, right)

    def _finish(self, rank: int, dst: Operand, total: int) -> int:
        held, wanted = self._values.members[total], self._values.members[self._expected[dst]]
        if held != wanted:
            raise self._fail(Flaw.PARTIAL_OUTPUT, rank, f"it lacks {self._values.names(wanted & ~held)}")
        if self._values.is_result(total):
            raise self._fail(Flaw.DUPLICATE, rank, "it is a result already, and would be divided twice")
        return self._values.result(total)

    def _read(self, rank: int, place: Operand, chunk: int) -> int:
        cell, walker = self._cell(place), self._walkers[rank]
        if cell.written_at > walker.clock[cell.writer]:
            end = " or its completion" if cell.writer == place.rank != rank else ""
            raise self._fail(
                Flaw.RACE, rank, f"nothing orders it after rank {cell.writer}'s write to {place}{end}"
            )
        if cell.value is None:
            raise self._fail(Flaw.UNINITIALISED, rank, f"{place} holds nothing")
        if self._values.chunk[cell.value] != chunk:
            raise self._fail(Flaw.WRONG_CHUNK, rank, f"{place} holds chunk {self._values.chunk[cell.value]}")
        cell.readers[rank] = walker.clock[rank]
        cell.unread = False
        return cell.value

    def _write(self, rank: int, place: Operand, value: int) -> None:
        cell = self._cell(place)
        self._check_write(rank, place, cell)
        if cell.unread:
            raise self._fail(Flaw.OVERWRITTEN, rank, f"what {place} held was not consumed")
        cell.value = value
        cell.unread = place.buffer in (SCRATCH, INBOX)

    def _check_write(self, rank: int, place: Operand, cell: _Cell) -> None:
        """Order a write (or a completion) after every other access, then become the last writer."""
        clock = self._walkers[rank].clock
        if cell.written_at > clock[cell.writer]:
            raise self._fail(
                Flaw.RACE, rank, f"nothing orders it after rank {cell.writer}'s write to {place}"
            )
        for reader, read_at in cell.readers.items():
            if read_at > clock[reader]:
                raise self._fail(Flaw.RACE, rank, f"rank {reader} may still be reading {place}")
        cell.readers.clear()
        cell.writer, cell.written_at = rank, clock[rank]

    def _complete(self, rank: int) -> None:
        walker = self._walkers[rank]
        for place, cell in walker.cells:
            if place.buffer == PUB:
                continue
            self._check_write(rank, place, cell)
            if cell.unread:
                raise self._fail(Flaw.UNCONSUMED, rank, f"{place}")
        if self._spec.synchronises and min(walker.clock) < 1:
            raise self._fail(Flaw.NOT_SYNCHRONISED, rank, f"rank {walker.clock.index(0)} may not have begun")
        walker.done = True
