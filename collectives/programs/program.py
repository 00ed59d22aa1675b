"""Collective algorithms as data: programs of put, notify, wait, reduce, copy and finish.

A program is one rank's part of a collective over `n` ranks. It speaks of *chunks*, never of bytes: the
full vector of the operation is `blocks` blocks of equally many elements, each cut into
`chunks // blocks` chunks (`chunk_extent`), so one program serves every element count.

An operand names (rank, buffer, number). The number is the chunk for the buffers of the caller (`out`,
`in`, `in1`, …) and for `pub`, and a slot number for `scratch` and `inbox`.

- `out`, `in…`: the caller's arrays in the arena. Peers may read them, only their rank writes them.
- `scratch`: slots private to the rank.
- `inbox`: slots of the rank that peers write by `put` and only the rank reads.
- `pub`: the input as it was copied into the operation's descriptor at entry (small operations);
  it outlives the operation, so reading it needs no closing synchronisation.

Every rank begins after all ranks have entered: their inputs and `pub` may be read at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from zbmd.actors.view import RANKS_MAX
from zbmd.collectives.errors import ProgramError

OUT = 0
SCRATCH = 1
INBOX = 2
PUB = 3
IN = 4
BUFFERS = 32
MAX_INPUTS = BUFFERS - IN
MAX_RANKS = RANKS_MAX
MAX_CHUNKS = 1 << 16
MAX_INSTRUCTIONS = 1 << 20

PUT_CODE, NOTIFY_CODE, WAIT_CODE, REDUCE_CODE, COPY_CODE, FINISH_CODE = range(6)
ENCODING_WIDTH = 12

_NAMES = {OUT: "out", SCRATCH: "scratch", INBOX: "inbox", PUB: "pub", IN: "in"}


class Operand(NamedTuple):
    """A place: chunk or slot `number` of `buffer` on `rank`."""

    rank: int
    buffer: int
    number: int

    def __str__(self) -> str:
        return f"{buffer_name(self.buffer)}[{self.number}]@{self.rank}"


@dataclass(frozen=True, slots=True)
class _Move:
    """One chunk that goes from `src` to `dst`."""

    chunk: int
    dst: Operand
    src: Operand

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} #{self.chunk} {self.dst} = {self.src}"


class Put(_Move):
    """Copy local `src` (chunk `chunk`) into an inbox slot of another rank, then notify that rank."""

    __slots__ = ()


class Copy(_Move):
    """`dst = src`; `dst` is local."""

    __slots__ = ()


class Finish(_Move):
    """`dst`, in `out`, becomes the end result of `src`: a local slot with the reduction of all contributions.

    A reduction into `out` does so by itself: averages are divided, and 16-bit floats rounded. This is for one
    that another rank has reduced.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Reduce:
    """`dst = a op b`, element by element; `dst` is local and may be `a` or `b`."""

    chunk: int
    dst: Operand
    a: Operand
    b: Operand

    def __str__(self) -> str:
        return f"reduce #{self.chunk} {self.dst} = {self.a} + {self.b}"


@dataclass(frozen=True, slots=True)
class Notify:
    """Notify `peer`: everything done before is visible to it once it has waited for this."""

    peer: int

    def __str__(self) -> str:
        return f"notify {self.peer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `peer` has notified this rank `count` times since the program began."""

    peer: int
    count: int

    def __str__(self) -> str:
        return f"wait {self.peer} x{self.count}"


Instruction = Put | Notify | Wait | Reduce | Copy | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's instructions. `scratch_slots` and `inbox_slots` each hold one chunk."""

    algorithm: str
    n: int
    rank: int
    blocks: int
    chunks: int
    scratch_slots: int
    inbox_slots: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return format_program(self)

    def digest(self) -> int:
        """The canonical hash: 64 bits of BLAKE2b over the program's text."""
        return hash_text(format_program(self))


def hash_text(text: str) -> int:
    """A 64-bit hash of `text` (BLAKE2b), the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def chunk_extent(chunk: int, *, count: int, blocks: int, chunks: int) -> tuple[int, int, int]:
    """Where `chunk` lies: (block, first element, end element) within its block of `count` elements.

    Chunk j of the k chunks of a block covers elements [j*count//k, (j+1)*count//k); it may be empty.
    """
    per_block = chunks // blocks
    block, j = divmod(chunk, per_block)
    return block, j * count // per_block, (j + 1) * count // per_block


def input_buffer(k: int) -> int:
    """The buffer number of the k-th input; raises `ProgramError` beyond `MAX_INPUTS`."""
    if not 0 <= k < MAX_INPUTS:
        raise ProgramError(f"a rank has at most {MAX_INPUTS} inputs; input {k} was asked for")
    return IN + k


def buffer_name(buffer: int) -> str:
    """The buffer's name in a program's text."""
    if buffer in _NAMES:
        return _NAMES[buffer]
    if IN < buffer < BUFFERS:
        return f"in{buffer - IN}"
    return f"buffer{buffer}"


_HEADER = re.compile(
    r"program (?P<algorithm>[a-z_]+) n=(?P<n>\d{1,18}) rank=(?P<rank>\d{1,18}) blocks=(?P<blocks>\d{1,18}) "
    r"chunks=(?P<chunks>\d{1,18}) scratch=(?P<scratch_slots>\d{1,18}) inbox=(?P<inbox_slots>\d{1,18})"
)
_OPERAND = re.compile(
    r"(?P<name>out|scratch|inbox|pub|in(?P<k>\d{1,18})?)\[(?P<index>\d{1,18})\]@(?P<rank>\d{1,18})"
)
_DATA = re.compile(
    r"(?P<word>put|reduce|copy|finish) #(?P<chunk>\d{1,18}) (?P<dst>\S+) = (?P<a>\S+)(?: \+ (?P<b>\S+))?"
)
_MOVES: Mapping[str, type[Put | Copy | Finish]] = {"put": Put, "copy": Copy, "finish": Finish}
_WAIT = re.compile(r"wait (?P<peer>\d{1,18}) x(?P<count>\d{1,18})")
_NOTIFY = re.compile(r"notify (?P<peer>\d{1,18})")


def format_program(program: Program) -> str:
    """The program as text: a header line, then one line an instruction."""
    header = (
        f"program {program.algorithm} n={program.n} rank={program.rank} blocks={program.blocks} "
        f"chunks={program.chunks} scratch={program.scratch_slots} inbox={program.inbox_slots}"
    )
    return "\n".join([header, *map(str, program.instructions)]) + "\n"


def parse_program(text: str) -> Program:
    """The inverse of `format_program`; raises `ProgramError` naming the line."""
    lines = text.splitlines()
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise ProgramError("line 1: a program begins with its header line")
    if len(lines) - 1 > MAX_INSTRUCTIONS:
        raise ProgramError(f"a program has at most {MAX_INSTRUCTIONS} instructions")
    return Program(
        algorithm=header["algorithm"],
        n=int(header["n"]),
        rank=int(header["rank"]),
        blocks=int(header["blocks"]),
        chunks=int(header["chunks"]),
        scratch_slots=int(header["scratch_slots"]),
        inbox_slots=int(header["inbox_slots"]),
        instructions=tuple(_parse_line(line, number) for number, line in enumerate(lines[1:], 2)),
    )


def _parse_operand(text: str, line: int) -> Operand:
    found = _OPERAND.fullmatch(text)
    if found is None:
        raise ProgramError(f"line {line}: {text!r} is no operand; write buffer[index]@rank")
    if found["k"] is None:
        buffer = next(number for number, name in _NAMES.items() if name == found["name"])
    elif found["k"].startswith("0"):
        raise ProgramError(f"line {line}: the first input is written 'in'")
    else:
        buffer = input_buffer(int(found["k"]))
    return Operand(int(found["rank"]), buffer, int(found["index"]))


def _parse_line(text: str, line: int) -> Instruction:
    if found := _NOTIFY.fullmatch(text):
        return Notify(int(found["peer"]))
    if found := _WAIT.fullmatch(text):
        return Wait(int(found["peer"]), int(found["count"]))
    found = _DATA.fullmatch(text)
    if found is None or (found["b"] is not None) != (found["word"] == "reduce"):
        raise ProgramError(f"line {line}: {text!r} is no instruction")
    chunk, dst, a = int(found["chunk"]), _parse_operand(found["dst"], line), _parse_operand(found["a"], line)
    if found["word"] == "reduce":
        return Reduce(chunk, dst, a, _parse_operand(found["b"], line))
    return _MOVES[found["word"]](chunk, dst, a)


def encode(program: Program) -> NDArray[np.int32]:
    """The stepper's form, int32 of shape (instructions, `ENCODING_WIDTH`).

    Columns: code, chunk, peer, count, dst buffer, dst index, a rank, a buffer, a index, b rank,
    b buffer, b index; columns that an instruction does not have are 0. `peer` is the rank to notify
    (put, notify) or to wait for.
    """
    rows = [_encode_one(instruction) for instruction in program.instructions]
    return np.array(rows, dtype=np.int32).reshape(len(rows), ENCODING_WIDTH)


def _encode_one(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Put(chunk, dst, src):
            return (PUT_CODE, chunk, dst.rank, 0, dst.buffer, dst.number, *src, 0, 0, 0)
        case Notify(peer):
            return (NOTIFY_CODE, 0, peer, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        case Wait(peer, count):
            return (WAIT_CODE, 0, peer, count, 0, 0, 0, 0, 0, 0, 0, 0)
        case Reduce(chunk, dst, a, b):
            return (REDUCE_CODE, chunk, 0, 0, dst.buffer, dst.number, *a, *b)
        case Copy(chunk, dst, src):
            return (COPY_CODE, chunk, 0, 0, dst.buffer, dst.number, *src, 0, 0, 0)
        case Finish(chunk, dst, src):
            return (FINISH_CODE, chunk, 0, 0, dst.buffer, dst.number, *src, 0, 0, 0)
        case _:
            assert_never(instruction)


def chunk_range(part: int, parts: int, chunks: int) -> range:
    """The chunks of one of `parts` consecutive, balanced slices of 0..chunks-1."""
    return range(part * chunks // parts, (part + 1) * chunks // parts)


def peers_after(rank: int, n: int) -> Iterable[int]:
    """The other ranks, beginning with the next: a different order on each rank spreads the load."""
    return ((rank + step) % n for step in range(1, n))
