"""Training with the model cut into the stages of a pipeline: the driver of `StageMachine`.

A micro-batch is a logical shard of the recipe, gradients are added up along the same tree, and the norm is
summed in the same blocks, so the losses and the weights have the bits of one process that does it all. What a
step holds is given up whole when a stage is lost: the committed state of the others stays as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from zbmd.actors.member import Node
from zbmd.collectives.group import Group
from zbmd.training.accumulate import AccumulationPlan
from zbmd.training.adamw import AdamWState
from zbmd.training.clip import clip_scale
from zbmd.training.optim import optimizer_for
from zbmd.training.pipeline.norm import norm_of, pieces_length, pieces_of
from zbmd.training.pipeline.part import GPTPart, Pass
from zbmd.training.pipeline.program import Instruction, Message, Op, Shape, StageProgram
from zbmd.training.pipeline.rings import CHANNEL_DEFAULT, StageRings, Traffic, gather_rows
from zbmd.training.pipeline.schedules import activations_max, programs_of, schedule_named
from zbmd.training.pipeline.stage import StageMachine
from zbmd.training.pipeline.stage_events import (
    Await,
    Compute,
    Computed,
    Free,
    GiveUp,
    Heard,
    Put,
    Release,
    StageAction,
    StageLost,
    StepBegun,
    StepDone,
)
from zbmd.training.pipeline.storage import Boundary
from zbmd.training.pipeline.verifier import verify
from zbmd.training.recipe import Recipe
from zbmd.training.xp import Array
from zbmd.transport import faults
from zbmd.transport._native import now_ns
from zbmd.transport.errors import PeerLost, RemoteProtocolError, UserError

COMPUTE_POINT = faults.declare("pipeline.compute", "before a stage computes one of its instructions")

_HEAD = 2
"""Numbers that a stage says beside the pieces of its gradients: its loss, and how long it computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """What a step reported, the same on all stages: loss in nats per byte, gradient norm before clipping.

    busy_ns: how long each stage computed; took_ns: the time of the program on this stage, waits included.
    """

    step: int
    loss: float
    grad_norm: float
    busy_ns: tuple[int, ...]
    took_ns: int


class _PartState:
    """A part, and its versions of weights and optimizer state."""

    def __init__(self, recipe: Recipe, layers: range) -> None:
        self.part = GPTPart(recipe.model.config, layers)
        layout, size = self.part.part_layout, self.part.part_layout.size
        weights = recipe.model.init(recipe.config.seed)[self.part.span].copy()
        self.state = AdamWState(weights, np.zeros_like(weights), np.zeros_like(weights))
        self.spare = AdamWState(*(np.zeros_like(weights) for _ in range(3)))
        self.plan = AccumulationPlan.of(recipe.config.shards, 0, recipe.config.shards)
        self.buffers: list[Array] = [np.zeros(size, np.float32) for _ in range(self.plan.buffers)]
        self.optimizer = optimizer_for(recipe.config.optimizer, layout)

    @property
    def total(self) -> Array:
        """The gradient of the step, once all micro-batches are through."""
        (buffer,) = self.plan.partials.values()
        return self.buffers[buffer]


class StageTrainer:
    """This rank's stage of a pipeline over all members of `group`. For one thread, not the loop's.

    `cuts`: the layers of each part, as of `balanced_cuts`. Made by all members together. Raises `UserError`
    for a schedule that splits backward passes: those are planned and proven, and not run.
    """

    def __init__(
        self,
        node: Node,
        group: Group,
        recipe: Recipe,
        cuts: Sequence[range],
        *,
        schedule: str,
        channel: int = CHANNEL_DEFAULT,
    ) -> None:
        shape = shape_of(recipe, stages=group.size, parts=len(cuts))
        programs = runnable_programs(schedule, shape)
        self._group, self._recipe, self._shape = group, recipe, shape
        self._stage = group.members.index(node.rank)
        self._machine = StageMachine(programs, self._stage)
        self._parts = {part: _PartState(recipe, cuts[part]) for part in shape.parts_of(self._stage)}
        self._spans = [GPTPart(recipe.model.config, layers).span for layers in cuts]
        self._passes: dict[tuple[int, int], Pass] = {}
        self._made: dict[Message, Array] = {}
        """What is to be sent, or handed to the next part on this stage."""
        self._losses: dict[int, float] = {}
        self._busy_ns = 0
        self._deadline_ns = 0
        self.step = 0
        self._rings = StageRings(node, group, programs, self._stage, traffic_of(recipe), channel=channel)

    def run_step(self) -> StageStep:
        """Do one step; all stages together.

        Raises `PeerLost` when a stage has ended, `OperationAborted` when one has given up, `DeadlineExceeded`
        when one stands still, `TrainingDiverged` on all alike; the weights are then those before the step.
        """
        try:
            return self._run_step()
        except BaseException:
            self._rings.give_up()
            self._group.abort()
            raise

    def weights(self) -> Array:
        """The weights of the whole model, (layout.size,) float32; all stages together."""
        own = np.concatenate([state.state.weights for state in self._parts.values()])
        every = gather_rows(self._group, own)
        whole: Array = np.zeros(self._spans[-1].stop, np.float32)
        at = 0
        for part in self._gathered_parts():
            size = self._spans[part].stop - self._spans[part].start
            whole[self._spans[part]] = every[at : at + size]
            at += size
        return whole

    def close(self) -> None:
        """Give back the rings. Idempotent."""
        self._rings.close()
        self._passes.clear()
        self._made.clear()

    def _run_step(self) -> StageStep:
        self._losses.clear()
        self._busy_ns, self._deadline_ns = 0, self._group.deadline_ns()
        ids, started_ns = self._recipe.sample_ids(self.step), now_ns()
        actions = deque(self._handle(StepBegun()))
        while actions:
            action = actions.popleft()
            match action:
                case Compute() as compute:
                    self._compute(compute, ids[compute.instruction.microbatch])
                    actions += self._listen()
                    actions += self._handle(Computed())
                case Put() as put:
                    self._rings.put(put, self._made.pop(put.message))
                case Release() as release:
                    self._rings.release(release)
                case Free(part=part, microbatch=microbatch):
                    self._passes.pop((part, microbatch), None)
                case Await() as awaited:
                    actions += self._wait(awaited)
                case GiveUp(stage=stage, reason=reason):
                    raise PeerLost(self._group.members[stage], reason)
                case StepDone():
                    pass
                case _:
                    assert_never(action)
        self._rings.drain(self._deadline_ns)
        return self._update(now_ns() - started_ns)

    def _handle(self, event: StepBegun | Computed | Heard | StageLost) -> list[StageAction]:
        actions = self._machine.handle(event, now_ns=now_ns())
        self._machine.check_invariants()
        return actions

    def _listen(self) -> list[StageAction]:
        """Tell the machine what the neighbours have told."""
        actions: list[StageAction] = []
        for stage, what in self._machine.neighbours():
            count = self._rings.count(stage, what)
            if count > self._machine.heard(stage, what):
                actions += self._handle(Heard(stage=stage, what=what, count=count))
        return actions

    def _wait(self, awaited: Await) -> list[StageAction]:
        heard = self._listen()
        if heard:
            return heard
        lost = self._rings.wait(awaited, self._deadline_ns)
        if lost is not None:
            reason = f"stage {lost} has ended; wait for the next view, and go on from what all hold"
            return self._handle(StageLost(stage=lost, reason=reason))
        return self._listen()

    def _compute(self, compute: Compute, sample_ids: np.ndarray) -> None:
        faults.hit(COMPUTE_POINT)
        started_ns = now_ns()
        instruction = compute.instruction
        if instruction.op is Op.FORWARD:
            self._forward(instruction, compute.input_slot, sample_ids)
        else:
            self._backward(instruction, compute.gradient_slot)
        self._busy_ns += now_ns() - started_ns

    def _forward(self, instruction: Instruction, slot: int | None, sample_ids: np.ndarray) -> None:
        _, part, microbatch = instruction
        state = self._parts[part]
        done = state.part.forward(
            state.state.weights,
            state.buffers[state.plan.leaves[microbatch].buffer],
            self._recipe.corpus.windows(sample_ids),
            None if part == 0 else self._came(Message(False, part, microbatch), slot),
            global_batch=self._recipe.config.global_batch,
        )
        self._passes[part, microbatch] = done
        if state.part.is_last:
            self._losses[microbatch] = float(done.output.data)
        else:
            self._made[Message(False, part + 1, microbatch)] = done.output.data

    def _backward(self, instruction: Instruction, slot: int | None) -> None:
        _, part, microbatch = instruction
        state = self._parts[part]
        given = None if state.part.is_last else self._came(Message(True, part, microbatch), slot)
        gradient = state.part.backward(self._passes[part, microbatch], given)
        if gradient is not None:
            self._made[Message(True, part - 1, microbatch)] = gradient
        everything = slice(0, state.part.part_layout.size)
        AccumulationPlan.perform(state.plan.leaves[microbatch].additions, state.buffers, everything)

    def _came(self, message: Message, slot: int | None) -> Array:
        """What a part needs: in its slot, or as another part of this stage made it."""
        if slot is None:
            return self._made.pop(message)
        return self._rings.slot(Boundary(message.gradient, message.part), slot)

    def _update(self, took_ns: int) -> StageStep:
        """Agree on the norm and write the next version; all stages read the same numbers."""
        loss = 0.0
        for microbatch in range(self._shape.microbatches):
            loss += self._losses.get(microbatch, 0.0)
        own = [np.array([loss, float(self._busy_ns)])]
        own += [pieces_of(state.total, state.part.span) for state in self._parts.values()]
        heads, pieces = self._take_apart(gather_rows(self._group, np.concatenate(own)))
        norm = norm_of(pieces, np.dtype(np.float32))
        config = self._recipe.config
        for state in self._parts.values():
            state.optimizer.update(
                state.state,
                state.spare,
                state.total,
                step=self.step,
                learning_rate=self._recipe.learning_rate(self.step),
                grad_scale=clip_scale(norm, limit=config.clip_norm),
            )
        for state in self._parts.values():
            state.state, state.spare = state.spare, state.state
        self.step += 1
        last = self._shape.stage_of(self._shape.parts - 1)
        return StageStep(
            step=self.step - 1,
            loss=float(heads[last][0]),
            grad_norm=norm,
            busy_ns=tuple(int(head[1]) for head in heads),
            took_ns=took_ns,
        )

    def _take_apart(self, every: Array) -> tuple[list[Array], list[tuple[slice, Array]]]:
        """The heads of all stages, and the pieces of all parts in the order of the parts."""
        heads, found, at = list[Array](), dict[int, Array](), 0
        for stage in range(self._shape.stages):
            heads.append(every[at : at + _HEAD])
            at += _HEAD
            for part in self._shape.parts_of(stage):
                length = pieces_length(self._spans[part])
                found[part] = every[at : at + length]
                at += length
        if at != len(every):
            raise RemoteProtocolError(f"the stages say {len(every)} numbers of their gradients, not {at}")
        return heads, [(self._spans[part], found[part]) for part in range(self._shape.parts)]

    def _gathered_parts(self) -> list[int]:
        return [part for stage in range(self._shape.stages) for part in self._shape.parts_of(stage)]


def shape_of(recipe: Recipe, *, stages: int, parts: int) -> Shape:
    """The pipeline of a recipe: a micro-batch a logical shard. Raises `UserError` if parts do not divide."""
    if parts % stages:
        raise UserError(f"{parts} parts do not divide over {stages} stages: cut a multiple of {stages}.")
    return Shape(stages=stages, chunks=parts // stages, microbatches=recipe.config.shards)


def runnable_programs(schedule: str, shape: Shape) -> tuple[StageProgram, ...]:
    """Verified programs of a schedule that can be run. Raises `UserError`."""
    if schedule_named(schedule).splits:
        raise UserError(
            f"{schedule} splits backward passes: it can be planned and proven, and not be run yet. Use 1f1b."
        )
    programs = programs_of(schedule, shape)
    verify(programs, activations_max=activations_max(schedule, shape))
    return programs


def traffic_of(recipe: Recipe) -> Traffic:
    """What passes between stages for one micro-batch."""
    model = recipe.model.config
    rows = recipe.config.sequences_per_shard * model.context
    return Traffic(shape=(rows, model.width), dtype=np.dtype(np.float32))
