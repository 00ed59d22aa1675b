"""Proves the programs of a pipeline right before anything runs.

Proved of every stage: it computes each of its parts for each micro-batch exactly once forwards and once
backwards (whole, or as both halves), each part in the order of the micro-batches, which fixes the order of
all sums; it computes with nothing that has not come, and sends nothing that it has not computed; it holds no
more activations than the schedule promises.

Of all stages together: every send meets its receive, and there is no deadlock, even if a send waited until
its slot at the receiver is free. Stages meet in first-in-first-out rings alone (a Kahn process network), so
control does not depend on timing: one run finds every deadlock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never

from zbmd.training.pipeline.program import (
    SENDS,
    Boundary,
    Flaw,
    Instruction,
    Message,
    Op,
    ScheduleFlawed,
    Shape,
    StageProgram,
    boundary_of,
    held_along,
    message_of,
    releases,
    slots_of,
)


def verify(programs: Sequence[StageProgram], *, activations_max: Sequence[int]) -> None:
    """Raise `ScheduleFlawed` unless `programs` (of stages 0..stages-1) are one right step of a pipeline.

    `activations_max[stage]`: the most pairs of part and micro-batch whose activations the stage may hold.
    """
    _check_headers(programs, activations_max)
    for program, most in zip(programs, activations_max, strict=True):
        stage = _Stage(program)
        for index, instruction in enumerate(program.instructions):
            stage.check(index, instruction)
        stage.check_whole()
        _check_memory(program, most)
    _Run(programs).to_the_end()


def _check_headers(programs: Sequence[StageProgram], activations_max: Sequence[int]) -> None:
    if not programs or not len(programs) == programs[0].shape.stages == len(activations_max):
        wanted = programs[0].shape.stages if programs else "some"
        detail = f"{len(programs)} programs and {len(activations_max)} bounds for {wanted} stages"
        raise ScheduleFlawed(Flaw.MALFORMED, len(programs), None, detail)
    for stage, program in enumerate(programs):
        if (program.stage, program.shape, program.schedule) != (
            stage,
            programs[0].shape,
            programs[0].schedule,
        ):
            raise ScheduleFlawed(Flaw.MALFORMED, stage, None, "its header does not fit the others'")


def _check_memory(program: StageProgram, most: int) -> None:
    for index, held in enumerate(held_along(program)):
        if held > most:
            detail = f"{program.instructions[index]}: of {held} micro-batches, the schedule promises {most}"
            raise ScheduleFlawed(Flaw.MEMORY, program.stage, index, detail)


class _Stage:
    """The progress of one stage, instruction by instruction."""

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._shape: Shape = program.shape
        self._index = 0
        self._done: set[Instruction] = set()
        self._next: Counter[tuple[Op, int]] = Counter()

    def check(self, index: int, instruction: Instruction) -> None:
        """The instruction may stand here."""
        self._index = index
        op, part, microbatch = instruction
        if not (0 <= part < self._shape.parts and 0 <= microbatch < self._shape.microbatches):
            raise self._fail(Flaw.OUT_OF_RANGE, instruction, "")
        if self._shape.stage_of(part) != self._program.stage:
            raise self._fail(Flaw.WRONG_STAGE, instruction, f"it is on stage {self._shape.stage_of(part)}")
        if instruction in self._done:
            raise self._fail(Flaw.REPEATED, instruction, "")
        self._check_needs(instruction)
        key = _order_key(op), part
        if microbatch != self._next[key]:
            raise self._fail(Flaw.MICROBATCH_ORDER, instruction, f"micro-batch {self._next[key]} is next")
        self._next[key] += 1
        self._done.add(instruction)

    def check_whole(self) -> None:
        """Nothing is missing."""
        for part in self._shape.parts_of(self._program.stage):
            for microbatch in range(self._shape.microbatches):
                for op in self._asked_of(part, microbatch):
                    wanted = Instruction(op, part, microbatch)
                    if wanted not in self._done:
                        raise ScheduleFlawed(Flaw.MISSING, self._program.stage, None, str(wanted))

    def _asked_of(self, part: int, microbatch: int) -> list[Op]:
        split = Instruction(Op.INPUT_GRADIENT, part, microbatch) in self._done
        asked = [Op.FORWARD, *([Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT] if split else [Op.BACKWARD])]
        if self._shape.receives_input(part):
            asked += [Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT]
        if self._shape.receives_gradient(part):
            asked += [Op.RECEIVE_GRADIENT, Op.SEND_ACTIVATION]
        return asked

    def _check_needs(self, instruction: Instruction) -> None:
        op, part, microbatch = instruction
        match op:
            case Op.FORWARD:
                self._check_input(instruction)
            case Op.BACKWARD | Op.INPUT_GRADIENT:
                if not self._has(Op.FORWARD, part, microbatch):
                    raise self._fail(Flaw.BEFORE_FORWARD, instruction, "")
                other = Op.BACKWARD if op is Op.INPUT_GRADIENT else Op.INPUT_GRADIENT
                if self._has(other, part, microbatch):
                    raise self._fail(Flaw.SPLIT, instruction, "")
                self._check_gradient(instruction)
            case Op.WEIGHT_GRADIENT:
                if self._has(Op.BACKWARD, part, microbatch):
                    raise self._fail(Flaw.SPLIT, instruction, "")
                if not self._has(Op.INPUT_GRADIENT, part, microbatch):
                    raise self._fail(Flaw.BEFORE_INPUT_GRADIENT, instruction, "")
            case Op.SEND_ACTIVATION:
                self._check_boundary(instruction, exists=self._shape.receives_gradient(part))
                if not self._has(Op.FORWARD, part, microbatch):
                    raise self._fail(Flaw.BEFORE_COMPUTED, instruction, "")
            case Op.SEND_GRADIENT:
                self._check_boundary(instruction, exists=self._shape.receives_input(part))
                if not self._went_back(part, microbatch):
                    raise self._fail(Flaw.BEFORE_COMPUTED, instruction, "")
            case Op.RECEIVE_ACTIVATION:
                self._check_boundary(instruction, exists=self._shape.receives_input(part))
            case Op.RECEIVE_GRADIENT:
                self._check_boundary(instruction, exists=self._shape.receives_gradient(part))
            case _:
                assert_never(op)

    def _check_input(self, instruction: Instruction) -> None:
        _, part, microbatch = instruction
        if self._shape.receives_input(part):
            here = self._has(Op.RECEIVE_ACTIVATION, part, microbatch)
        else:
            here = part == 0 or self._has(Op.FORWARD, part - 1, microbatch)
        if not here:
            raise self._fail(Flaw.BEFORE_RECEIVED, instruction, "its input is not here")

    def _check_gradient(self, instruction: Instruction) -> None:
        _, part, microbatch = instruction
        if self._shape.receives_gradient(part):
            here = self._has(Op.RECEIVE_GRADIENT, part, microbatch)
        else:
            here = part == self._shape.parts - 1 or self._went_back(part + 1, microbatch)
        if not here:
            raise self._fail(Flaw.BEFORE_RECEIVED, instruction, "its output's gradient is not here")

    def _check_boundary(self, instruction: Instruction, *, exists: bool) -> None:
        if not exists:
            raise self._fail(Flaw.NO_TRANSFER, instruction, "")

    def _went_back(self, part: int, microbatch: int) -> bool:
        return any(self._has(op, part, microbatch) for op in (Op.BACKWARD, Op.INPUT_GRADIENT))

    def _has(self, op: Op, part: int, microbatch: int) -> bool:
        return Instruction(op, part, microbatch) in self._done

    def _fail(self, flaw: Flaw, instruction: Instruction, detail: str) -> ScheduleFlawed:
        said = f"{instruction}: {detail}" if detail else str(instruction)
        return ScheduleFlawed(flaw, self._program.stage, self._index, said)


def _order_key(op: Op) -> Op:
    """Whole and split backward passes of a part are in one order."""
    return Op.BACKWARD if op is Op.INPUT_GRADIENT else op


class _Run:
    """The run of all programs, with sends that wait for their slot."""

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        self._programs = programs
        self._at = [0] * len(programs)
        self._slots = {
            boundary: slots for program in programs for boundary, slots in slots_of(program).items()
        }
        self._sent: Counter[Boundary] = Counter()
        self._free: Counter[Boundary] = Counter(self._slots)

    def to_the_end(self) -> None:
        """Run every stage to its end; raises on a deadlock."""
        waiting = deque(range(len(self._programs)))
        stuck = 0
        while waiting:
            stage = waiting.popleft()
            before = self._at[stage]
            self._advance(stage)
            if self._at[stage] == len(self._programs[stage].instructions):
                stuck = 0
                continue
            waiting.append(stage)
            stuck = 0 if self._at[stage] != before else stuck + 1
            if stuck > len(waiting):
                raise self._deadlock(sorted(waiting))

    def _advance(self, stage: int) -> None:
        instructions = self._programs[stage].instructions
        while self._at[stage] < len(instructions) and self._perform(instructions[self._at[stage]]):
            self._at[stage] += 1

    def _perform(self, instruction: Instruction) -> bool:
        """Do it; False if it has to wait."""
        if instruction.op in SENDS:
            boundary = boundary_of(message_of(instruction))
            if self._free[boundary] == 0:
                return False
            self._free[boundary] -= 1
            self._sent[boundary] += 1
        elif instruction.op in SENDS.values():
            return self._sent[boundary_of(message_of(instruction))] > instruction.microbatch
        elif releases(instruction):
            for gradient in (False, True):
                self._free[Boundary(gradient, instruction.part)] += 1
        return True

    def _deadlock(self, stages: list[int]) -> ScheduleFlawed:
        stories = [self._story(stage) for stage in stages]
        return ScheduleFlawed(Flaw.DEADLOCK, stages[0], self._at[stages[0]], "; ".join(stories))

    def _story(self, stage: int) -> str:
        instruction = self._programs[stage].instructions[self._at[stage]]
        message: Message = message_of(instruction)
        if instruction.op in SENDS:
            there = self._programs[stage].shape.stage_of(message.part)
            slots = self._slots[boundary_of(message)]
            return f"stage {stage} at {instruction} waits for one of {slots} slots of stage {there}"
        return f"stage {stage} at {instruction} waits for the {message}"
