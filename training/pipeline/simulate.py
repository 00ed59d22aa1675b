"""Simulate when a pipeline's instructions run, under a cost model: makespan, bubble, activations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from zbmd.training.pipeline.program import (
    SENDS,
    Instruction,
    Message,
    Op,
    StageProgram,
    activations_peak,
    message_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The duration of each operation for one micro-batch, in any unit of time, by part.

    A whole backward pass takes the input's and the weights' gradient together; `transfer` is one message
    between two stages. Each is at least 0.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def even(
        cls, parts: int, *, forward: float, input_gradient: float, weight_gradient: float, transfer: float
    ) -> Costs:
        """The same for every part, of a model that costs as much as `parts` of these parts."""
        return cls(
            forward=(forward,) * parts,
            input_gradient=(input_gradient,) * parts,
            weight_gradient=(weight_gradient,) * parts,
            transfer=transfer,
        )

    def of(self, instruction: Instruction) -> float:
        """Return how long the stage is busy with an instruction: sends and receives take no time."""
        part = instruction.part
        match instruction.op:
            case Op.FORWARD:
                return self.forward[part]
            case Op.BACKWARD:
                return self.input_gradient[part] + self.weight_gradient[part]
            case Op.INPUT_GRADIENT:
                return self.input_gradient[part]
            case Op.WEIGHT_GRADIENT:
                return self.weight_gradient[part]
            case Op.SEND_ACTIVATION | Op.RECEIVE_ACTIVATION | Op.SEND_GRADIENT | Op.RECEIVE_GRADIENT:
                return 0.0
            case _:
                assert_never(instruction.op)


class Span(NamedTuple):
    """A computation and when it runs."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step, by stage; times in the unit of the costs, from 0."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    activations: tuple[int, ...]
    """The most pairs of part and micro-batch whose activations a stage held at once."""

    @property
    def bubble(self) -> float:
        """The time that the schedule adds to that of the busiest stage, as a fraction of the latter.

        The "bubble time fraction" of Megatron-LM: (p - 1) / m for 1F1B of p stages and m micro-batches.
        """
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal if ideal else 0.0

    @property
    def idle(self) -> float:
        """Return the fraction of all stages' time without computation."""
        whole = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def simulate(programs: Sequence[StageProgram], costs: Costs) -> Timeline:
    """Run verified `programs` of all stages. Raises `ValueError` if they deadlock: verify them first."""
    return _Simulation(programs, costs).run()


class _Simulation:
    def __init__(self, programs: Sequence[StageProgram], costs: Costs) -> None:
        self._programs = programs
        self._costs = costs
        self._at = [0] * len(programs)
        self._now = [0.0] * len(programs)
        self._busy = [0.0] * len(programs)
        self._arrivals: dict[Message, float] = {}
        self._wires: dict[tuple[int, int, bool], float] = {}
        """When the transfers posted so far are over: by sender, receiver and direction."""
        self._spans: list[list[Span]] = [[] for _ in programs]

    def run(self) -> Timeline:
        waiting = deque(range(len(self._programs)))
        stuck = 0
        while waiting and stuck <= len(waiting):
            stage = waiting.popleft()
            before = self._at[stage]
            self._advance(stage)
            stuck = 0 if self._at[stage] != before else stuck + 1
            if self._at[stage] < len(self._programs[stage].instructions):
                waiting.append(stage)
        if waiting:
            raise ValueError(f"stages {sorted(waiting)} wait for each other: the programs are not verified")
        return Timeline(
            spans=tuple(map(tuple, self._spans)),
            makespan=max(self._now),
            busy=tuple(self._busy),
            activations=tuple(map(activations_peak, self._programs)),
        )

    def _advance(self, stage: int) -> None:
        instructions = self._programs[stage].instructions
        while self._at[stage] < len(instructions) and self._perform(stage, instructions[self._at[stage]]):
            self._at[stage] += 1

    def _perform(self, stage: int, instruction: Instruction) -> bool:
        """Perform an instruction; return False if what it waits for has not been sent."""
        if instruction.op in SENDS:
            self._send(stage, message_of(instruction))
        elif instruction.op in SENDS.values():
            arrival = self._arrivals.get(message_of(instruction))
            if arrival is None:
                return False
            self._now[stage] = max(self._now[stage], arrival)
        else:
            start, cost = self._now[stage], self._costs.of(instruction)
            self._now[stage] = start + cost
            self._busy[stage] += cost
            self._spans[stage].append(Span(instruction, start, self._now[stage]))
        return True

    def _send(self, stage: int, message: Message) -> None:
        there = self._programs[stage].shape.stage_of(message.part)
        wire = stage, there, message.gradient
        start = max(self._now[stage], self._wires.get(wire, 0.0))
        self._wires[wire] = self._arrivals[message] = start + self._costs.transfer
