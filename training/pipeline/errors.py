"""Typed errors of pipeline schedules."""

from __future__ import annotations

from enum import Enum

from zbmd.transport.errors import ZbmdError


class ScheduleError(ZbmdError):
    """The text of a schedule's program is malformed."""


class Flaw(Enum):
    """What is wrong with the programs of a pipeline."""

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
