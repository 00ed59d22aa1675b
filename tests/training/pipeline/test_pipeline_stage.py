"""The machines of all stages, with neighbours that are heard late, computations that take long, and kills."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.pipeline.program import COMPUTE, Instruction, Message, Shape, boundary_of, slots_of
from zbmd.training.pipeline.schedules import SCHEDULES, programs_of
from zbmd.training.pipeline.stage import (
    STAGE,
    Await,
    Compute,
    Computed,
    Free,
    GiveUp,
    Heard,
    Put,
    Release,
    StageAction,
    StageEvent,
    StageLost,
    StageMachine,
    StageState,
    StepBegun,
    StepDone,
    Told,
    stage_config,
)
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, ZbmdError

TURNS_MAX = 100_000


class World:
    """Stages whose counts are seen late, in whatever order, and whose rings hold what was put last."""

    def __init__(self, name: str, shape: Shape, *, steps: int, seed: int) -> None:
        self.shape, self.steps = shape, steps
        self.programs = programs_of(name, shape)
        self.machines = [StageMachine(self.programs, stage) for stage in range(shape.stages)]
        self.random = random.Random(seed)
        self.cells: dict[tuple[int, int, Told], int] = {}
        self.rings: dict[tuple[bool, int, int], tuple[int, Message]] = {}
        self.slots = {b: n for program in self.programs for b, n in slots_of(program).items()}
        self.computed: list[list[Instruction]] = [[] for _ in self.machines]
        self.running: list[Compute | None] = [None] * shape.stages
        self.done = [0] * shape.stages
        self.gave_up: set[int] = set()
        self.dead: set[int] = set()
        self.unaware: list[tuple[int, int]] = []
        for stage in range(shape.stages):
            self.put(stage, StepBegun())

    def put(self, stage: int, event: StageEvent) -> None:
        machine = self.machines[stage]
        for action in machine.handle(event, now_ns=0):
            self.perform(stage, machine, action)
        machine.check_invariants()

    def perform(self, stage: int, machine: StageMachine, action: StageAction) -> None:
        match action:
            case Compute(instruction=instruction):
                self.check_inputs(machine, action)
                self.running[stage] = action
                self.computed[stage].append(instruction)
            case Put(message=message, stage=there, slot=slot, what=what, count=count):
                assert slot < self.slots[boundary_of(message)]
                self.rings[message.gradient, message.part, slot] = machine.step, message
                self.cells[there, stage, what] = count
            case Release(stage=there, what=what, count=count):
                self.cells[there, stage, what] = count
            case Await(stage=there, what=what, count=count):
                assert machine.heard(there, what) < count
            case StepDone():
                self.done[stage] += 1
            case GiveUp():
                self.gave_up.add(stage)
            case Free():
                pass

    def check_inputs(self, machine: StageMachine, compute: Compute) -> None:
        """The computation reads what was sent for it, not yet overwritten."""
        _, part, microbatch = compute.instruction
        for gradient, slot in ((False, compute.input_slot), (True, compute.gradient_slot)):
            if slot is None or (gradient and compute.instruction.op.value == "F"):
                continue
            held = self.rings[gradient, part, slot]
            assert held == (machine.step, Message(gradient, part, microbatch)), compute

    def choices(self) -> list[tuple[int, StageEvent]]:
        found: list[tuple[int, StageEvent]] = []
        for stage, machine in enumerate(self.machines):
            if stage in self.dead or machine.state is StageState.LOST:
                continue
            if machine.state is StageState.READY and self.done[stage] < self.steps:
                found.append((stage, StepBegun()))
            if machine.state is StageState.COMPUTING:
                found.append((stage, Computed()))
            for source, what in machine.neighbours():
                count = self.cells.get((stage, source, what), 0)
                if count > machine.heard(source, what):
                    found.append((stage, Heard(stage=source, what=what, count=count)))
        for stage, lost in self.unaware:
            if stage not in self.dead:
                found.append((stage, StageLost(stage=lost, reason="killed")))
        return found

    def run(self, *, kill_after: int | None = None) -> None:
        """To the end, or until nothing can happen any more."""
        for turn in range(TURNS_MAX):
            if turn == kill_after:
                self.kill(self.random.randrange(self.shape.stages))
            choices = self.choices()
            if not choices:
                return
            stage, event = self.random.choice(choices)
            if isinstance(event, StageLost):
                self.unaware.remove((stage, event.stage))
            self.put(stage, event)
        raise AssertionError(f"no end after {TURNS_MAX} turns")

    def kill(self, stage: int) -> None:
        self.dead.add(stage)
        self.unaware += [(other, stage) for other in range(self.shape.stages) if other != stage]


WORLDS = st.tuples(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0),
)


def world_of(drawn: tuple[str, int, int, int, int], *, steps: int) -> World:
    name, stages, microbatches, chunks, seed = drawn
    shape = Shape(stages=stages, chunks=chunks if SCHEDULES[name].chunked else 1, microbatches=microbatches)
    return World(name, shape, steps=steps, seed=seed)


@settings(max_examples=60, deadline=None)
@given(drawn=WORLDS)
def test_all_steps_end_whatever_the_delays(drawn: tuple[str, int, int, int, int]) -> None:
    world = world_of(drawn, steps=3)
    world.run()
    assert world.done == [3] * world.shape.stages
    for program, computed in zip(world.programs, world.computed, strict=True):
        once = [one for one in program.instructions if one.op in COMPUTE]
        assert computed == once * 3
    for stage, machine in enumerate(world.machines):
        said, heard = machine.totals()
        assert heard == {key: world.cells[stage, *key] for key in machine.neighbours()}
        assert said == {
            (there, what): count for (there, by, what), count in world.cells.items() if by == stage
        }


def test_there_are_no_totals_during_a_step() -> None:
    world = World("1f1b", Shape(stages=2, chunks=1, microbatches=2), steps=1, seed=0)
    with pytest.raises(LocalProtocolError, match="its step is not over"):
        world.machines[0].totals()


@settings(max_examples=60, deadline=None)
@given(drawn=WORLDS, kill_after=st.integers(0, 300))
def test_a_death_ends_the_step_on_all_who_live(
    drawn: tuple[str, int, int, int, int], kill_after: int
) -> None:
    world = world_of(drawn, steps=3)
    world.run(kill_after=kill_after)
    living = set(range(world.shape.stages)) - world.dead
    assert all(world.done[stage] == 3 or stage in world.gave_up for stage in living)
    assert not world.dead or world.gave_up == living


class Followed(World):
    """Before each event a machine is made again, from its configuration and state: it goes on alike."""

    def put(self, stage: int, event: StageEvent) -> None:
        machine, states = self.machines[stage], STAGE.states
        follower = STAGE.build(stage_config(self.programs, stage))
        assert states is not None
        states.restore(follower, states.encode(machine))
        follower.handle(event, now_ns=0)
        super().put(stage, event)
        assert states.encode(follower) == states.encode(machine)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_stage_goes_on_from_any_of_its_states(name: str) -> None:
    chunks = 2 if SCHEDULES[name].chunked else 1
    world = Followed(name, Shape(stages=2, chunks=chunks, microbatches=3), steps=2, seed=3)
    world.run()
    assert world.done == [2, 2]


@pytest.mark.parametrize(
    "change", [{"stage": 2}, {"stage": -1}, {"programs": []}, {"programs": ["pipeline"]}]
)
def test_a_configuration_that_is_no_stage_is_refused(change: dict[str, Any]) -> None:
    programs = programs_of("1f1b", Shape(stages=2, chunks=1, microbatches=2))
    with pytest.raises(ZbmdError):
        STAGE.build(stage_config(programs, 0) | change)
    with pytest.raises(ZbmdError):
        STAGE.build(stage_config(programs[:1], 0))


def test_a_stage_that_no_neighbour_overtakes_uses_all_its_slots() -> None:
    """The first stage runs ahead as far as its neighbour has slots, and no further."""
    shape = Shape(stages=2, chunks=1, microbatches=8)
    first = StageMachine(programs_of("gpipe", shape), 0)
    puts = Counter[str]()
    actions = first.handle(StepBegun(), now_ns=0)
    while first.state is StageState.COMPUTING:
        actions = first.handle(Computed(), now_ns=0)
        puts.update(type(action).__name__ for action in actions)
    assert puts["Put"] == 8
    assert actions[-1] == Await(stage=1, what=Told.GRADIENTS, count=1)


def neighbour(stages: int = 2) -> StageMachine:
    machine = StageMachine(programs_of("1f1b", Shape(stages=stages, chunks=1, microbatches=4)), 1)
    machine.handle(StepBegun(), now_ns=0)
    return machine


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Heard(stage=2, what=Told.ACTIVATIONS, count=1), "stage 2 tells stage 1 of ACTIVATIONS"),
        (Heard(stage=0, what=Told.GRADIENTS, count=1), "tells stage 1 of GRADIENTS"),
        (Heard(stage=0, what=Told.ACTIVATIONS, count=3), "the room is 2"),
        (Heard(stage=0, what=Told.ACTIVATIONS, count=-1), "and now -1"),
        (Heard(stage=0, what=Told.GRADIENTS_RELEASED, count=1), "released 1 messages of 0"),
    ],
)
def test_a_neighbour_that_lies_is_refused(event: Heard, said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        neighbour().handle(event, now_ns=0)


def test_a_driver_that_errs_is_told() -> None:
    with pytest.raises(LocalProtocolError, match="computes nothing"):
        neighbour().handle(Computed(), now_ns=0)
    with pytest.raises(LocalProtocolError, match="step 0 is not over"):
        neighbour().handle(StepBegun(), now_ns=0)
