"""The schedules: pure functions of a pipeline's shape to the programs of its stages.

- `gpipe`: all forward passes, then all backward passes (Y. Huang and others, "GPipe", 2019,
  arXiv:1811.06965). Backward passes run in the order of the micro-batches, so that every schedule here adds
  up gradients in one order.
- `1f1b`: after a warm-up one forward and one backward pass in turn, with a flush a step ("PipeDream-Flush",
  D. Narayanan and others, 2021, arXiv:2006.09503). With several chunks it is the interleaved form of
  D. Narayanan and others, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
  2021, arXiv:2104.04473; here for numbers of micro-batches that stages do not divide, too.
- `zb-h1`: the backward pass is split, and weight gradients fill the bubble, in the memory of 1F1B's first
  stage (P. Qi and others, "Zero bubble pipeline parallelism", 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from zbmd.training.pipeline.program import Instruction, Op, ScheduleError, Shape, StageProgram, require_bounds
from zbmd.transport.errors import UserError

_Order = Iterator[Instruction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule: the order of a stage's computations, and what the paper says of its memory.

    `activations_max(shape, stage)`: how many pairs of part and micro-batch the stage holds activations of.
    """

    name: str
    order: Callable[[Shape, int], _Order]
    activations_max: Callable[[Shape, int], int]
    chunked: bool
    splits: bool


def program_of(name: str, shape: Shape, stage: int) -> StageProgram:
    """Return the program of one stage. Raises `UserError` for an unknown schedule or impossible shape."""
    schedule = schedule_named(name)
    try:
        require_bounds(shape)
    except ScheduleError as error:
        raise UserError(f"invalid pipeline: {error}.") from None
    if shape.chunks > 1 and not schedule.chunked:
        raise UserError(f"{name} has one chunk a stage, not {shape.chunks}: use 1f1b or gpipe with chunks.")
    if not 0 <= stage < shape.stages:
        raise UserError(f"stage {stage} does not exist in a pipeline of {shape.stages} stages.")
    order = (one for one in schedule.order(shape, stage) if one.microbatch < shape.microbatches)
    instructions = tuple(_with_transfers(shape, order))
    return StageProgram(schedule=name, shape=shape, stage=stage, instructions=instructions)


def programs_of(name: str, shape: Shape) -> tuple[StageProgram, ...]:
    """Return the programs of all stages. Raises as `program_of`."""
    return tuple(program_of(name, shape, stage) for stage in range(shape.stages))


def schedule_named(name: str) -> Schedule:
    """Return the schedule of that name. Raises `UserError`."""
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise UserError(f'unknown pipeline schedule "{name}"; choose from {", ".join(SCHEDULES)}.')
    return schedule


def activations_max(name: str, shape: Shape) -> tuple[int, ...]:
    """Return, by stage, the most pairs of part and micro-batch whose activations it may hold at once."""
    schedule = schedule_named(name)
    return tuple(schedule.activations_max(shape, stage) for stage in range(shape.stages))


def warmup_of(shape: Shape, stage: int) -> int:
    """Return the forward passes of 1F1B before the first pair of a forward and a backward pass."""
    after = shape.stages - stage - 1
    if shape.chunks == 1:
        return min(after, shape.microbatches)
    whole = _whole_rounds(shape)
    return min(2 * after + (shape.chunks - 1) * shape.stages, whole.chunks * whole.microbatches)


def _whole_rounds(shape: Shape) -> Shape:
    """With so many micro-batches that `stages` divides them: interleaving goes round by round.

    A step of fewer does the same without those that do not exist. What is left keeps its order on all
    stages, so it waits for nothing that it did not wait for before.
    """
    return replace(shape, microbatches=-(-shape.microbatches // shape.stages) * shape.stages)


def _in_rounds(shape: Shape, parts: range, op: Op) -> list[Instruction]:
    """Return `op` of `parts`, one after the other, in rounds of as many micro-batches as stages."""
    starts = range(0, shape.microbatches, shape.stages)
    return [
        Instruction(op, part, i)
        for start in starts
        for part in parts
        for i in range(start, start + shape.stages)
    ]


def _forwards(shape: Shape, stage: int) -> list[Instruction]:
    return _in_rounds(_whole_rounds(shape), shape.parts_of(stage), Op.FORWARD)


def _backwards(shape: Shape, stage: int, op: Op) -> list[Instruction]:
    return _in_rounds(_whole_rounds(shape), shape.parts_of(stage)[::-1], op)


def _gpipe(shape: Shape, stage: int) -> _Order:
    yield from _forwards(shape, stage)
    yield from _backwards(shape, stage, Op.BACKWARD)


def _one_forward_one_backward(shape: Shape, stage: int) -> _Order:
    forwards, backwards = _forwards(shape, stage), _backwards(shape, stage, Op.BACKWARD)
    warmup = warmup_of(shape, stage)
    yield from forwards[:warmup]
    for done, backward in enumerate(backwards, warmup):
        yield from forwards[done : done + 1]
        yield backward


def _zero_bubble_h1(shape: Shape, stage: int) -> _Order:
    """Like 1F1B, but stage r defers its weight gradients by r micro-batches, so that each holds `stages`."""
    forwards = _forwards(shape, stage)
    weights = _backwards(shape, stage, Op.WEIGHT_GRADIENT)
    warmup = warmup_of(shape, stage)
    yield from forwards[:warmup]
    for done, backward in enumerate(_backwards(shape, stage, Op.INPUT_GRADIENT)):
        yield from forwards[warmup + done : warmup + done + 1]
        yield backward
        yield from weights[max(0, done - stage) : max(0, done - stage + 1)]
    yield from weights[max(0, len(weights) - stage) :]


def _with_transfers(shape: Shape, order: _Order) -> Iterator[Instruction]:
    """Yield each receive just before its use, each send just after its computation."""
    for instruction in order:
        op, part, microbatch = instruction
        forward, backward = op is Op.FORWARD, op in (Op.BACKWARD, Op.INPUT_GRADIENT)
        if forward and shape.receives_input(part):
            yield Instruction(Op.RECEIVE_ACTIVATION, part, microbatch)
        if backward and shape.receives_gradient(part):
            yield Instruction(Op.RECEIVE_GRADIENT, part, microbatch)
        yield instruction
        if forward and shape.receives_gradient(part):
            yield Instruction(Op.SEND_ACTIVATION, part, microbatch)
        if backward and shape.receives_input(part):
            yield Instruction(Op.SEND_GRADIENT, part, microbatch)


def _held_by_all(shape: Shape, stage: int) -> int:
    del stage
    return shape.chunks * shape.microbatches


def _held_in_flight(shape: Shape, stage: int) -> int:
    return min(warmup_of(shape, stage) + 1, shape.chunks * shape.microbatches)


def _held_by_h1(shape: Shape, stage: int) -> int:
    del stage
    return min(shape.stages, shape.microbatches)


SCHEDULES: Final = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="gpipe", order=_gpipe, activations_max=_held_by_all, chunked=True, splits=False),
        Schedule(
            name="1f1b",
            order=_one_forward_one_backward,
            activations_max=_held_in_flight,
            chunked=True,
            splits=False,
        ),
        Schedule(
            name="zb-h1", order=_zero_bubble_h1, activations_max=_held_by_h1, chunked=False, splits=True
        ),
    )
}
"""By name."""
