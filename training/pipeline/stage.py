"""One stage of a pipeline at work (sans-I/O): its program against what its neighbours tell it.

A stage computes one thing at a time, in the order of its program. What it sends is put as soon as there is a
slot for it at the receiver, and held back while there is none; what it receives stays in its slot until the
backward pass has used it. Counts go on from step to step, so stages need not meet between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, assert_never

from zbmd.training.pipeline.program import (
    SENDS,
    Boundary,
    Instruction,
    Message,
    Op,
    StageProgram,
    activations_peak,
    boundary_of,
    format_program,
    message_of,
    parse_program,
    releases,
    slots_of,
)
from zbmd.training.pipeline.verifier import verify
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError


class Told(Enum):
    """The kinds of counts that a stage reports to a neighbour; they only grow. The value is the number."""

    ACTIVATIONS = 0
    GRADIENTS = 1
    ACTIVATIONS_RELEASED = 2
    GRADIENTS_RELEASED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """The stage must run its program once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Stage `stage` has reported `count` of `what` in all, since the first step."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The requested computation is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLost:
    """A stage has ended: this step cannot be finished."""

    stage: int
    reason: str


StageEvent: TypeAlias = StepBegun | Heard | Computed | StageLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run `instruction`. `input_slot`, `gradient_slot`: the slots of its inputs, if received."""

    instruction: Instruction
    input_slot: int | None
    gradient_slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Put `message` into `slot` of its ring at `stage`, then report `count` of `what` to it."""

    message: Message
    stage: int
    slot: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Report to `stage` that `count` of its messages are no longer needed."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Free this part and micro-batch."""

    part: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Wait until `stage` has reported `count` of `what`."""

    stage: int
    what: Told
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The program has ended, and everything that it sends has been put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Abandon the step; discard its results."""

    stage: int
    reason: str


StageAction: TypeAlias = Compute | Put | Release | Free | Await | StepDone | GiveUp


class StageState(Enum):
    """The state of the machine."""

    READY = "ready"
    COMPUTING = "computing"
    WAITING = "waiting"
    LOST = "lost"


Counts: TypeAlias = dict[tuple[int, Told], int]
"""By neighbour, and what it or we told; none is 0. No `Counter`: a log holds a machine's state."""


class MessageOrder:
    """The messages of one count, in the order in which a step reports them."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._place = {message: place for place, message in enumerate(messages)}

    def count_with(self, message: Message, step: int) -> int:
        """Return the count that reports this message in `step`, and all before it."""
        return self.count_after(step) + self._place[message] + 1

    def count_after(self, steps: int) -> int:
        """Return the count that reports all messages of so many steps."""
        return steps * len(self._place)


class StageMachine:
    """Stage `stage` of verified `programs`.

    Raises `LocalProtocolError` when the driver misuses it, and `RemoteProtocolError` when a neighbour tells
    what it cannot have done: the pipeline is to be given up then.
    """

    def __init__(self, programs: Sequence[StageProgram], stage: int) -> None:
        self.state = StageState.READY
        self.step = -1
        """The step under way, or done last; from 0."""
        self._program = programs[stage]
        self._shape = self._program.shape
        self._stage = stage
        self._at = 0
        self._slots = {boundary: n for program in programs for boundary, n in slots_of(program).items()}
        self._held = 0
        self._held_max = activations_peak(self._program)
        self._posted: deque[Message] = deque()
        self._heard: Counts = {}
        self._said: Counts = {}
        self._sends = _orders_of_sends(self._program)
        self._arrivals: dict[tuple[int, Told], MessageOrder] = {}
        self._releases: dict[tuple[int, Told], MessageOrder] = {}
        self._rings: Counts = {}
        """Slots here that a neighbour puts into, all together."""
        for program in programs:
            if program.stage != stage:
                self._know(program)

    def handle(self, event: StageEvent, *, now_ns: int) -> list[StageAction]:
        """Take an event; return the actions to perform, in order."""
        del now_ns
        match event:
            case StageLost(stage=stage, reason=reason):
                if self.state is StageState.LOST:
                    return []
                self.state = StageState.LOST
                return [GiveUp(stage=stage, reason=reason)]
            case _ if self.state is StageState.LOST:
                return []
            case StepBegun():
                return self._begin()
            case Heard():
                return self._hear(event)
            case Computed():
                return self._computed()
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        assert 0 <= self._held <= self._held_max, f"activations of {self._held} micro-batches are held"
        assert len(self._posted) <= len(self._sends), "more is posted than a step sends"
        if self.state is StageState.READY:
            assert not self._posted, "a step ended before all was sent"
            assert self._held == 0, "a step ended with activations"

    def heard(self, stage: int, what: Told) -> int:
        """Return the count that a neighbour has reported so far."""
        return self._heard.get((stage, what), 0)

    def totals(self) -> tuple[Counts, Counts]:
        """Return the counts of all steps so far: those that this stage reported, and neighbours' to it.

        The last of a neighbour's may still be under way. Raises `LocalProtocolError` during a step.
        """
        if self.state is not StageState.READY:
            raise LocalProtocolError(f"stage {self._stage} is {self.state.value}: its step is not over")
        orders = {**self._arrivals, **self._releases}
        return dict(self._said), {key: order.count_after(self.step + 1) for key, order in orders.items()}

    def neighbours(self) -> tuple[tuple[int, Told], ...]:
        """Return the counts that this stage listens to."""
        return tuple(
            sorted(self._arrivals.keys() | self._releases.keys(), key=lambda one: (one[0], one[1].value))
        )

    def _know(self, other: StageProgram) -> None:
        """Learn from a neighbour's program in which order its counts will tell."""
        sends = [message for message in _orders_of_sends(other) if self._is_ours(message)]
        for gradient, what in ((False, Told.ACTIVATIONS), (True, Told.GRADIENTS)):
            order = [message for message in sends if message.gradient is gradient]
            if order:
                key = other.stage, what
                self._arrivals[key] = MessageOrder(order)
                self._rings[key] = sum(self._slots[boundary] for boundary in set(map(boundary_of, order)))
        for gradient, what in ((False, Told.ACTIVATIONS_RELEASED), (True, Told.GRADIENTS_RELEASED)):
            order = [
                message
                for instruction in other.instructions
                if releases(instruction)
                for message in self._received_for(instruction)
                if message.gradient is gradient and self._sender(message) == self._stage
            ]
            if order:
                self._releases[other.stage, what] = MessageOrder(order)

    def _is_ours(self, message: Message) -> bool:
        return self._shape.stage_of(message.part) == self._stage

    def _sender(self, message: Message) -> int:
        return self._shape.stage_of(message.part + (1 if message.gradient else -1))

    def _received_for(self, instruction: Instruction) -> list[Message]:
        """The message that a part needs for a micro-batch."""
        _, part, microbatch = instruction
        came: list[Message] = []
        if self._shape.receives_input(part):
            came.append(Message(False, part, microbatch))
        if self._shape.receives_gradient(part):
            came.append(Message(True, part, microbatch))
        return came

    def _begin(self) -> list[StageAction]:
        if self.state is not StageState.READY:
            raise LocalProtocolError(
                f"stage {self._stage} is {self.state.value}: step {self.step} is not over"
            )
        self.step += 1
        self._at = 0
        return self._go_on()

    def _hear(self, event: Heard) -> list[StageAction]:
        key = event.stage, event.what
        if key not in self._arrivals and key not in self._releases:
            raise RemoteProtocolError(f"stage {event.stage} tells stage {self._stage} of {event.what.name}")
        before = self._heard.get(key, 0)
        if event.count < before:
            raise RemoteProtocolError(
                f"stage {event.stage} told {before} {event.what.name}, and now {event.count}"
            )
        if key in self._releases:
            sent = self._said.get((event.stage, _SENT[event.what]), 0)
            if event.count > sent:
                raise RemoteProtocolError(f"stage {event.stage} released {event.count} messages of {sent}")
        elif event.count > self._room(key):
            raise RemoteProtocolError(
                f"stage {event.stage} told {event.count} {event.what.name}: the room is {self._room(key)}"
            )
        self._heard[key] = event.count
        if self.state is StageState.WAITING:
            return self._go_on()
        return self._flush()

    def _room(self, key: tuple[int, Told]) -> int:
        """Number of messages that a neighbour can have put here by now."""
        return self._said.get((key[0], _RELEASED[key[1]]), 0) + self._rings[key]

    def _computed(self) -> list[StageAction]:
        if self.state is not StageState.COMPUTING:
            raise LocalProtocolError(f"stage {self._stage} is {self.state.value}, and computes nothing")
        instruction = self._program.instructions[self._at]
        self._at += 1
        actions: list[StageAction] = []
        if releases(instruction):
            self._held -= 1
            actions.append(Free(part=instruction.part, microbatch=instruction.microbatch))
            for message in self._received_for(instruction):
                what = Told.GRADIENTS_RELEASED if message.gradient else Told.ACTIVATIONS_RELEASED
                sender = self._sender(message)
                actions.append(Release(stage=sender, what=what, count=self._say(sender, what)))
        return [*actions, *self._go_on()]

    def _go_on(self) -> list[StageAction]:
        """Walk the program up to what has to be computed or waited for."""
        actions: list[StageAction] = []
        instructions = self._program.instructions
        while self._at < len(instructions):
            instruction = instructions[self._at]
            if instruction.op in SENDS:
                self._posted.append(message_of(instruction))
            elif instruction.op not in SENDS.values():
                return [*actions, *self._flush(), self._compute(instruction)]
            elif (missing := self._missing(message_of(instruction))) is not None:
                return [*actions, *self._wait(missing)]
            self._at += 1
        actions += self._flush()
        if self._posted:
            return [*actions, *self._wait(None)]
        self.state = StageState.READY
        return [*actions, StepDone()]

    def _compute(self, instruction: Instruction) -> Compute:
        self.state = StageState.COMPUTING
        self._held += instruction.op is Op.FORWARD
        shape, (_, part, microbatch) = self._shape, instruction
        return Compute(
            instruction=instruction,
            input_slot=self._slot(Message(False, part, microbatch)) if shape.receives_input(part) else None,
            gradient_slot=self._slot(Message(True, part, microbatch))
            if shape.receives_gradient(part)
            else None,
        )

    def _wait(self, missing: Await | None) -> list[StageAction]:
        """Wait for a slot if something is held back, else for what is missing.

        As if the send had not been posted but waited: the verifier has proven that to end.
        """
        self.state = StageState.WAITING
        actions = self._flush()
        slot = self._slot_missing(self._posted[0]) if self._posted else None
        waited = missing if slot is None else slot
        assert waited is not None, "there is nothing to wait for"
        return [*actions, waited]

    def _flush(self) -> list[StageAction]:
        """Put what was posted, in order, as far as there are slots."""
        actions: list[StageAction] = []
        while self._posted and self._slot_missing(self._posted[0]) is None:
            message = self._posted.popleft()
            what = Told.GRADIENTS if message.gradient else Told.ACTIVATIONS
            stage = self._shape.stage_of(message.part)
            slot, count = self._slot(message), self._say(stage, what)
            actions.append(Put(message=message, stage=stage, slot=slot, what=what, count=count))
        return actions

    def _say(self, stage: int, what: Told) -> int:
        """Count one more notification to a neighbour; return their number."""
        count = self._said[stage, what] = self._said.get((stage, what), 0) + 1
        return count

    def _missing(self, message: Message) -> Await | None:
        """The notification that `message` has come; None if it has."""
        key = self._sender(message), Told.GRADIENTS if message.gradient else Told.ACTIVATIONS
        return self._short_of(key, self._arrivals[key].count_with(message, self.step))

    def _slot_missing(self, message: Message) -> Await | None:
        """The notification that the slot of `message` is free; None if it is."""
        number = self._number(message) - self._slots[boundary_of(message)]
        if number < 0:
            return None
        step, microbatch = divmod(number, self._shape.microbatches)
        what = Told.GRADIENTS_RELEASED if message.gradient else Told.ACTIVATIONS_RELEASED
        key = self._shape.stage_of(message.part), what
        before = message._replace(microbatch=microbatch)
        return self._short_of(key, self._releases[key].count_with(before, step))

    def _short_of(self, key: tuple[int, Told], count: int) -> Await | None:
        return None if self._heard.get(key, 0) >= count else Await(stage=key[0], what=key[1], count=count)

    def _number(self, message: Message) -> int:
        """Its number at its boundary, from the first step on; steps run on all stages in turn."""
        return self.step * self._shape.microbatches + message.microbatch

    def _slot(self, message: Message) -> int:
        boundary: Boundary = boundary_of(message)
        return self._number(message) % self._slots[boundary]


_RELEASED = {
    Told.ACTIVATIONS: Told.ACTIVATIONS_RELEASED,
    Told.GRADIENTS: Told.GRADIENTS_RELEASED,
}
_SENT = {released: sent for sent, released in _RELEASED.items()}


def _orders_of_sends(program: StageProgram) -> list[Message]:
    """The messages that a step sends, in order."""
    return [message_of(one) for one in program.instructions if one.op in SENDS]


# ---- capture


def stage_config(programs: Sequence[StageProgram], stage: int) -> dict[str, Any]:
    """Return the configuration from which a new `StageMachine` like this one is built."""
    return {"programs": [format_program(program) for program in programs], "stage": stage}


def _build_stage(config: Mapping[str, Any]) -> StageMachine:
    programs, stage = [parse_program(text) for text in config["programs"]], config["stage"]
    verify(programs, activations_max=[activations_peak(program) for program in programs])
    if not 0 <= stage < len(programs):
        raise LocalProtocolError(f"stage {stage} does not exist: there are {len(programs)}")
    return StageMachine(programs, stage)


STAGE: MachineKind[StageEvent, StageAction] = register(
    "pipeline-stage",
    1,
    _build_stage,
    events=StageEvent,
    actions=StageAction,
    states=(StageMachine, MessageOrder),
)
