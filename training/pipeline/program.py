"""Pipeline schedules as data: what one stage computes, sends and receives in a step, in order.

The model is cut into `stages * chunks` **parts**, numbered along the forward pass; part s lies on stage
s mod stages, as its chunk s // stages (the looped placement of Megatron-LM). A stage holds `chunks` parts. An
instruction names an operation, the part it is of, and the micro-batch:

- `2F0`: the forward pass of part 2; `2B0`: its backward pass, the gradients of input and weights;
- `2I0`, `2W0`: the two halves of a backward pass, input gradient and weight gradient, where it is split;
- `2SEND_F0`, `3RECV_F0`: the output of part 2 goes to part 3, where it is the input;
- `3SEND_B0`, `2RECV_B0`: the gradient of that goes back.

A send is posted and passes in the background; a receive waits until the data is here. Parts that follow each
other on one stage (a pipeline of one stage) hand over in memory, without instructions. The notation is
that of PyTorch's `torch.distributed.pipelining.schedules`.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Final, NamedTuple

from zbmd.transport.errors import ZbmdError

# ---- memory of a stage: activations, and slots for messages of other stages
#
# The activations of a part and micro-batch live from the forward pass to the end of the backward pass (of the
# weight-gradient pass where it is split), and so do the messages it was computed from. Messages of one
# boundary and direction arrive and are freed in the order of the micro-batches, so they share a ring of
# slots: that of micro-batch i has slot i mod the number of slots.

SLOTS_AHEAD: Final = 1
"""Slots of a ring beyond what the program holds: the next message arrives during a computation."""


class Boundary(NamedTuple):
    """One side of a part: where its inputs, or the gradients of its outputs, arrive."""

    gradient: bool
    part: int


def boundary_of(message: Message) -> Boundary:
    """Return the boundary where a message arrives."""
    return Boundary(message.gradient, message.part)


def releases(instruction: Instruction) -> bool:
    """Return whether nothing of its part and micro-batch is needed after this instruction."""
    return instruction.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT)


def activations_peak(program: StageProgram) -> int:
    """Return the most pairs of part and micro-batch whose activations the program holds at once."""
    return max(held_along(program), default=0)


def held_along(program: StageProgram) -> Iterator[int]:
    """Yield how many such pairs are held while each instruction runs."""
    held = 0
    for instruction in program.instructions:
        held += instruction.op is Op.FORWARD
        yield held
        held -= releases(instruction)


def slots_of(program: StageProgram) -> dict[Boundary, int]:
    """Return the number of slots of the ring of each boundary where this stage receives."""
    held, most = Counter[Boundary](), Counter[Boundary]()
    for instruction in program.instructions:
        if instruction.op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            boundary = boundary_of(message_of(instruction))
            held[boundary] += 1
            most[boundary] = max(most[boundary], held[boundary])
        elif releases(instruction):
            for gradient in (False, True):
                held[Boundary(gradient, instruction.part)] -= 1
    return {boundary: min(peak + SLOTS_AHEAD, program.shape.microbatches) for boundary, peak in most.items()}


class ScheduleError(ZbmdError):
    """The text of a schedule's program is malformed."""


class Flaw(Enum):
    """A flaw in the programs of a pipeline."""

    MALFORMED = "malformed"
    WRONG_STAGE = "a part that is not on this stage"
    OUT_OF_RANGE = "a part or micro-batch that does not exist"
    REPEATED = "done twice"
    MISSING = "never done"
    SPLIT = "a backward pass both whole and split"
    BEFORE_FORWARD = "a gradient before its forward pass"
    BEFORE_INPUT_GRADIENT = "a weight gradient before its input gradient"
    MICROBATCH_ORDER = "micro-batches out of order"
    BEFORE_RECEIVED = "computes with what was not received"
    BEFORE_COMPUTED = "sends what was not computed"
    NO_TRANSFER = "a transfer that this boundary does not have"
    MEMORY = "holds too many activations"
    DEADLOCK = "deadlock"


class ScheduleFlawed(ZbmdError):
    """The programs of a pipeline are wrong. `stage` and `index` name the instruction, `flaw` the kind."""

    def __init__(self, flaw: Flaw, stage: int, index: int | None, detail: str) -> None:
        at = "at its end" if index is None else f"instruction {index}"
        super().__init__(f"stage {stage}, {at}: {flaw.value}: {detail}")
        self.flaw = flaw
        self.stage = stage
        self.index = index


STAGES_MAX: Final = 1024
CHUNKS_MAX: Final = 64
MICROBATCHES_MAX: Final = 1 << 16
INSTRUCTIONS_MAX: Final = 1 << 20
"""Of one stage."""
TEXT_COLUMNS: Final = 100


class Op(Enum):
    """The operation of an instruction; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"


COMPUTE: Final = frozenset({Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT})
SENDS: Final = {Op.SEND_ACTIVATION: Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT: Op.RECEIVE_GRADIENT}
"""Each send, with what takes it."""


class Instruction(NamedTuple):
    """One instruction."""

    op: Op
    part: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part}{self.op.value}{self.microbatch}"


class Message(NamedTuple):
    """A message between two stages: the input (`gradient` False) of `part`, or its output's gradient."""

    gradient: bool
    part: int
    microbatch: int

    def __str__(self) -> str:
        what = "gradient of the output" if self.gradient else "input"
        return f"{what} of part {self.part} for micro-batch {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a pipeline: stages (processes), chunks per stage, micro-batches per step."""

    stages: int
    chunks: int
    microbatches: int

    @property
    def parts(self) -> int:
        """Return the number of parts of the model, over all stages."""
        return self.stages * self.chunks

    def stage_of(self, part: int) -> int:
        """Return the stage that holds `part`."""
        return part % self.stages

    def parts_of(self, stage: int) -> range:
        """Return the parts of `stage`, by chunk."""
        return range(stage, self.parts, self.stages)

    def receives_input(self, part: int) -> bool:
        """Return whether the input of `part` comes from another stage."""
        return part > 0 and self.stages > 1

    def receives_gradient(self, part: int) -> bool:
        """Return whether the gradient of the output of `part` comes from another stage."""
        return part < self.parts - 1 and self.stages > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The instructions of one stage for one step."""

    schedule: str
    shape: Shape
    stage: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return format_program(self)

    def digest(self) -> int:
        """Return 64 bits of BLAKE2b over the program's text: the same in every process."""
        return int.from_bytes(blake2b(format_program(self).encode(), digest_size=8).digest(), "little")


def message_of(instruction: Instruction) -> Message:
    """Return the message of a send or receive. Raises `ValueError` for a computation."""
    op, part, microbatch = instruction
    if op is Op.SEND_ACTIVATION:
        return Message(False, part + 1, microbatch)
    if op is Op.SEND_GRADIENT:
        return Message(True, part - 1, microbatch)
    if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
        return Message(op is Op.RECEIVE_GRADIENT, part, microbatch)
    raise ValueError(f"{instruction} passes nothing on")


_HEADER = re.compile(
    r"pipeline (?P<schedule>[a-z0-9-]{1,32}) stages=(?P<stages>\d{1,9}) stage=(?P<stage>\d{1,9}) "
    r"chunks=(?P<chunks>\d{1,9}) microbatches=(?P<microbatches>\d{1,9})",
    re.ASCII,
)
_INSTRUCTION = re.compile(r"(?P<part>\d{1,9})(?P<op>[A-Z_]{1,6})(?P<microbatch>\d{1,9})", re.ASCII)
_OPS = {op.value: op for op in Op}


def format_program(program: StageProgram) -> str:
    """Return the program as text: a header line, then its instructions."""
    shape = program.shape
    header = (
        f"pipeline {program.schedule} stages={shape.stages} stage={program.stage} "
        f"chunks={shape.chunks} microbatches={shape.microbatches}"
    )
    body = textwrap.wrap(" ".join(map(str, program.instructions)), TEXT_COLUMNS)
    return "\n".join([header, *body]) + "\n"


def parse_program(text: str) -> StageProgram:
    """Parse the result of `format_program`; raises `ScheduleError` naming the line and the word."""
    lines = text.splitlines()
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise ScheduleError("line 1: the program of a stage begins with its header line, 'pipeline …'")
    shape = Shape(
        stages=int(header["stages"]), chunks=int(header["chunks"]), microbatches=int(header["microbatches"])
    )
    require_bounds(shape)
    instructions: list[Instruction] = []
    for number, line in enumerate(lines[1:], 2):
        for word in line.split():
            if len(instructions) == INSTRUCTIONS_MAX:
                raise ScheduleError(f"line {number}: a stage has at most {INSTRUCTIONS_MAX} instructions")
            instructions.append(_parse_instruction(word, number))
    return StageProgram(
        schedule=header["schedule"], shape=shape, stage=int(header["stage"]), instructions=tuple(instructions)
    )


def parse_programs(text: str) -> tuple[StageProgram, ...]:
    """Parse the concatenated programs of all stages. Raises `ScheduleError`."""
    starts = [found.start() for found in re.finditer(r"^pipeline ", text, re.MULTILINE)]
    if not starts or text[: starts[0]].strip():
        raise ScheduleError("line 1: the program of a stage begins with its header line, 'pipeline …'")
    if len(starts) > STAGES_MAX:
        raise ScheduleError(f"a pipeline has at most {STAGES_MAX} stages")
    ends = [*starts[1:], len(text)]
    return tuple(parse_program(text[start:end]) for start, end in zip(starts, ends, strict=True))


def require_bounds(shape: Shape) -> None:
    """Raise `ScheduleError` for an empty pipeline, or one beyond the limits."""
    for name, value, most in (
        ("stages", shape.stages, STAGES_MAX),
        ("chunks", shape.chunks, CHUNKS_MAX),
        ("microbatches", shape.microbatches, MICROBATCHES_MAX),
    ):
        if not 1 <= value <= most:
            raise ScheduleError(f"{name} is {value}: it must be 1 to {most}")
    # Forward, both halves of the backward pass, and four transfers, of each part and micro-batch.
    if 7 * shape.chunks * shape.microbatches > INSTRUCTIONS_MAX:
        raise ScheduleError(
            f"{shape.chunks} chunks and {shape.microbatches} micro-batches make more than "
            f"{INSTRUCTIONS_MAX} instructions a stage: take fewer of either"
        )


def _parse_instruction(word: str, line: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(word)
    if found is None or found["op"] not in _OPS:
        raise ScheduleError(
            f"line {line}: {word!r} is not an instruction: expected part, operation, micro-batch"
        )
    return Instruction(_OPS[found["op"]], int(found["part"]), int(found["microbatch"]))
