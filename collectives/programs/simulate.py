"""Runs the programs of all ranks in one process, under seeded random interleavings and kills.

The same stepper as in native execution decides which instruction may fire; the rest of the executor's
protocol (entry, notice of death, withdrawal, the last look at peers' descriptors) is played here as it is
done natively. A data instruction takes two steps, half of its elements each, so a reader can meet a torn
buffer. Memory that its owner may reuse, after completion as after failure, is overwritten at once: a
program that still needs it then ends with a wrong result that the caller can see.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.errors import CollectiveError
from zbmd.collectives.native._program import BLOCKED, DONE, Stepper
from zbmd.collectives.programs.layout import Layout
from zbmd.collectives.programs.program import (
    INBOX,
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
    chunk_extent,
    encode,
)

Array: TypeAlias = NDArray[Any]

STEPS_MAX = 1_000_000
"""A simulation that takes more steps than this has gone wrong."""


class Outcome(Enum):
    """The end of an operation on one rank."""

    COMPLETE = "complete"
    LOST = "lost"
    ABORTED = "aborted"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Result:
    """One rank's end. `out` is a copy of its output at completion, None otherwise."""

    outcome: Outcome
    out: Array | None


class SimulationError(CollectiveError):
    """The simulated ranks can go no further, or never end: the programs are wrong."""


@dataclass(slots=True)
class _Rank:
    program: Program
    stepper: Stepper
    buffers: dict[int, Array]
    slots: dict[int, list[Array]]
    received: NDArray[np.uint64]
    entered: set[int] = field(default_factory=set[int])
    told: int = 0
    half_done: bool = False
    steps: int = 0
    noticed: bool = False
    withdrawn: bool = False
    result: Result | None = None


class Simulation:
    """One operation over `count` elements a block.

    `buffers[r]` holds the caller's arrays of rank r by buffer number (`in…`, `out`, `pub`), one-dimensional;
    an array of `blocks * count` elements is the full vector, one of `count` a single block.
    `kills` maps a rank to the number of its steps after which it dies. `combine` is the reduction, as a
    ufunc. With `layout` the blocks of `in`, `out` and `pub` lie where it says, and `count` is the longest.
    With `sent` (`Spec.sent`) a rank has no more of another's `pub` than that: to read more is a
    `SimulationError`. `history` has one line a step; equal seeds give equal histories.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        buffers: Sequence[Mapping[int, Array]],
        count: int,
        *,
        seed: int,
        kills: Mapping[int, int] | None = None,
        combine: Callable[..., Array] = np.add,
        layout: Layout | None = None,
        sent: Callable[[int, int], range] | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._kills = dict(kills or {})
        self._combine = combine
        self._sent = sent
        self._layout = None if layout is None else layout.pieces(max(1, layout.longest))[0].table
        self._count = count
        self._notices: list[int] = []
        self.history: list[str] = []
        self._ranks = [self._make(program, buffers[program.rank]) for program in programs]

    def run(self) -> list[Result]:
        """Run until every rank has ended. Raises `SimulationError` on a deadlock."""
        for _ in range(STEPS_MAX):
            results = self.results()
            if results is not None:
                return results
            if not self.step():
                raise SimulationError(f"deadlock; the last steps: {self.history[-8:]}")
        raise SimulationError(f"no end after {STEPS_MAX} steps; the last: {self.history[-8:]}")

    def step(self, held: Container[int] = ()) -> bool:
        """Let one rank that is not `held` do a step, or learn of a death; False if nobody can."""
        ready = [
            i
            for i, rank in enumerate(self._ranks)
            if rank.result is None and i not in held and self._can_step(i)
        ]
        if not ready and not self._notices:
            return False
        choice = self._random.randrange(len(ready) + len(self._notices))
        if choice < len(ready):
            self._step(ready[choice])
        else:
            self._notice(self._notices.pop(choice - len(ready)))
        return True

    def kill(self, rank: int) -> None:
        """The rank dies now, unless it has ended."""
        if self._ranks[rank].result is None:
            self._end(rank, Outcome.KILLED)

    def results(self) -> list[Result] | None:
        """The result of every rank; None while one has not ended."""
        results = [rank.result for rank in self._ranks if rank.result is not None]
        return results if len(results) == len(self._ranks) else None

    def _make(self, program: Program, buffers: Mapping[int, Array]) -> _Rank:
        chunk = -(-self._count // (program.chunks // program.blocks))
        dtype = next(iter(buffers.values())).dtype if buffers else np.dtype(np.float32)
        slots = {
            SCRATCH: [np.zeros(chunk, dtype) for _ in range(program.scratch_slots)],
            INBOX: [np.zeros(chunk, dtype) for _ in range(program.inbox_slots)],
        }
        return _Rank(program, Stepper(encode(program)), dict(buffers), slots, np.zeros(program.n, np.uint64))

    def _can_step(self, index: int) -> bool:
        """Whether the rank can go on, or is at a wait that its notice of a death will end."""
        rank = self._ranks[index]
        if self._due(index) or rank.told < len(self._ranks) - 1:
            return True
        return rank.noticed or not self._waits(rank)

    def _waits(self, rank: _Rank) -> bool:
        if len(rank.entered) < len(self._ranks) - 1:
            return True
        return rank.stepper.next(rank.received) == BLOCKED

    def _due(self, index: int) -> bool:
        return self._kills.get(index, -1) == self._ranks[index].steps

    def _step(self, index: int) -> None:
        rank = self._ranks[index]
        if self._due(index):
            self._end(index, Outcome.KILLED)
            return
        rank.steps += 1
        if rank.told < len(self._ranks) - 1:
            rank.told += 1
            peer = (index + rank.told) % len(self._ranks)
            self._ranks[peer].entered.add(index)
            self.history.append(f"{index} enters, tells {peer}")
            return
        if self._waits(rank):
            self._end(index, Outcome.LOST)
            return
        at = rank.stepper.next(rank.received)
        if at == DONE:
            gone = any(peer.withdrawn for peer in self._ranks)
            self._end(index, Outcome.ABORTED if gone else Outcome.COMPLETE)
            return
        instruction = rank.program.instructions[at]
        self.history.append(f"{index} {instruction}")
        if self._perform(index, rank, instruction):
            rank.stepper.advance()

    def _end(self, index: int, outcome: Outcome) -> None:
        rank = self._ranks[index]
        self.history.append(f"{index} ends: {outcome.value}")
        out = rank.buffers.get(OUT)
        kept = out.copy() if outcome is Outcome.COMPLETE and out is not None else None
        rank.result = Result(outcome, kept)
        if outcome is Outcome.KILLED:
            self._notices += [i for i, peer in enumerate(self._ranks) if peer.result is None]
            return
        rank.withdrawn = outcome is not Outcome.COMPLETE
        for buffer, array in rank.buffers.items():
            if buffer != PUB or rank.withdrawn:
                array[...] = self._random.randrange(1, 100)

    def _notice(self, index: int) -> None:
        self.history.append(f"{index} learns of a death")
        self._ranks[index].noticed = True

    def _perform(self, index: int, rank: _Rank, instruction: Instruction) -> bool:
        """Do one step of an instruction; True once it is finished."""
        if isinstance(instruction, Put | Reduce | Copy | Finish):
            self._move(rank, instruction)
            rank.half_done = not rank.half_done
            if rank.half_done:
                return False
        if isinstance(instruction, Notify):
            self._ranks[instruction.peer].received[index] += np.uint64(1)
        elif isinstance(instruction, Put):
            self._ranks[instruction.dst.rank].received[index] += np.uint64(1)
        return True

    def _move(self, rank: _Rank, instruction: Put | Reduce | Copy | Finish) -> None:
        program, layout = rank.program, self._layout
        block = instruction.chunk // (program.chunks // program.blocks)
        length = self._count if layout is None else int(layout[0, block])
        _, first, end = chunk_extent(
            instruction.chunk, count=length, blocks=program.blocks, chunks=program.chunks
        )
        middle = (end - first + 1) // 2
        half = slice(middle, end - first) if rank.half_done else slice(0, middle)

        def view(operand: Operand) -> Array:
            owner = self._ranks[operand.rank]
            if operand.buffer in owner.slots:
                return owner.slots[operand.buffer][operand.number][: end - first][half]
            sent = self._sent if operand.buffer == PUB and operand.rank != program.rank else None
            if sent is not None and operand.number not in sent(operand.rank, program.rank):
                raise SimulationError(f"rank {program.rank} reads {operand}, which is not sent to it")
            array = owner.buffers[operand.buffer]
            if layout is not None:
                base = int(layout[3 if operand.buffer == OUT else 1, block])
            else:
                base = block * self._count if array.size > self._count else 0
            return array[base + first : base + end][half]

        if isinstance(instruction, Reduce):
            self._combine(view(instruction.a), view(instruction.b), out=view(instruction.dst))
        else:
            view(instruction.dst)[...] = view(instruction.src)
