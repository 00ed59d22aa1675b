"""What the machine of a pipeline stage takes in, and what it has done about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zbmd.training.pipeline.program import Instruction, Message


class Told(Enum):
    """What a stage tells a neighbour, by a count that only grows; the value is its number.

    Both sides know the neighbour's program, so the count alone says which messages it is about.
    """

    ACTIVATIONS = 0
    GRADIENTS = 1
    ACTIVATIONS_RELEASED = 2
    GRADIENTS_RELEASED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """The stage is to run its program once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Stage `stage` has told us `count` of `what` in all, since the first step."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The computation that was asked for is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLost:
    """A stage has ended: this step can not be finished."""

    stage: int
    reason: str


StageEvent: TypeAlias = StepBegun | Heard | Computed | StageLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run `instruction`. `input_slot`, `gradient_slot`: where what it needs has come, if it has come."""

    instruction: Instruction
    input_slot: int | None
    gradient_slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Put `message` into `slot` of its ring at `stage`, and tell it `count` of `what` behind that."""

    message: Message
    stage: int
    slot: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Tell `stage` that `count` of its messages are needed no more."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Nothing of this part and micro-batch is needed any more."""

    part: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Nothing can be done until `stage` has told `count` of `what`."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The program is at its end, and all that it sends has been put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The step ends here; what was computed in it is worth nothing."""

    stage: int
    reason: str


StageAction: TypeAlias = Compute | Put | Release | Free | Await | StepDone | GiveUp
