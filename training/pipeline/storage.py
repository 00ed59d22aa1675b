"""What a stage holds while its program runs: activations, and slots for what comes from other stages.

The activations of a part and micro-batch live from the forward pass to the end of the backward pass, that of
the weights where it is split; so do the messages it was computed from. Messages of one boundary and direction
come in the order of the micro-batches and are let go in that order, so they share a ring of slots: that of
micro-batch i has slot i mod the number of slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from zbmd.training.pipeline.program import Instruction, Message, Op, StageProgram, message_of

SLOTS_AHEAD: Final = 1
"""Slots of a ring beyond what the stage holds by its program: the next message comes while it computes."""


class Boundary(NamedTuple):
    """One side of a part, by what comes in there: its inputs, or the gradients of its outputs."""

    gradient: bool
    part: int


def boundary_of(message: Message) -> Boundary:
    """Where a message comes in."""
    return Boundary(message.gradient, message.part)


def releases(instruction: Instruction) -> bool:
    """Whether nothing of its part and micro-batch is needed any more once this has been computed."""
    return instruction.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT)


def activations_peak(program: StageProgram) -> int:
    """The most pairs of part and micro-batch whose activations the program holds at once."""
    return max(held_along(program), default=0)


def held_along(program: StageProgram) -> Iterator[int]:
    """How many such pairs are held while each instruction runs."""
    held = 0
    for instruction in program.instructions:
        held += instruction.op is Op.FORWARD
        yield held
        held -= releases(instruction)


def slots_of(program: StageProgram) -> dict[Boundary, int]:
    """The ring of each boundary where this stage receives: how many slots it has."""
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
