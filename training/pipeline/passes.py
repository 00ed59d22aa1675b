"""The passes of a step on one stage: the driver of `StageMachine`, for one thread that may wait.

A micro-batch is a logical shard of the recipe, and gradients are added up along the shard tree as they are on
a rank that has the whole model, so they have the same bits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import assert_never

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import non_finite_probe, spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import ProbePoint
from zbmd.training.autograd.tape import GradReady, Tensor
from zbmd.training.model.gpt import Batch
from zbmd.training.ops.cuda.device_array import Block, DeviceArray
from zbmd.training.pipeline.part import OwnParts, Pass
from zbmd.training.pipeline.program import Boundary, Instruction, Message, Op, StageProgram, releases
from zbmd.training.pipeline.rings import StageRings
from zbmd.training.pipeline.schedules import schedule_named
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
    StageLost,
    StageMachine,
    StepBegun,
    StepDone,
    stage_config,
)
from zbmd.training.profiler.lines import ActivationPeak
from zbmd.training.run.journal import captured_machine
from zbmd.training.step.reduction import AccumulationPlan, Buckets, Leaf
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, PeerLost
from zbmd.transport.native._native import now_ns

OBJECTS_MAX = 100_000
"""Looked at in one pass; a part of a model has a few hundred."""


def held_bytes(done: Pass, apart: Iterable[Array]) -> int:
    """Return the bytes of the arrays that `done` keeps alive, except the memory of `apart` (weights,
    gradients).

    Views count as their base array, each once; memory that numpy does not own, such as a slot of a ring or an
    arena, is not counted.
    """
    others = {id(_owner(array)) for array in apart}
    owners = {id(owner): owner for owner in map(_owner, _arrays(done)) if id(owner) not in others}
    return sum(owner.nbytes for owner in owners.values() if isinstance(owner, Block) or owner.flags.owndata)


def _owner(array: Array | DeviceArray) -> Array | Block:
    if isinstance(array, DeviceArray):
        return array.base
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _arrays(done: Pass) -> Iterator[Array | DeviceArray]:
    """Yield all arrays that the backward pass can reach."""
    left: list[object] = [done.input, done.output, *done.tape.kept(), *done.weight_gradients, done.whole]
    left += () if done.fused is None else done.fused.passes.holds
    seen: set[int] = set()
    while left and len(seen) < OBJECTS_MAX:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        match found:
            case np.ndarray() | DeviceArray():
                yield found
            case Tensor():
                left += (found.data, found.grad)
            case FunctionType():
                left += (cell.cell_contents for cell in found.__closure__ or ())
                left += found.__defaults__ or ()
            case MethodType():
                left.append(found.__func__)
            case functools.partial():
                left += (found.func, *found.args, *found.keywords.values())
            case tuple() | list():
                left += found
            case _:
                pass


COMPUTE_POINT = faults.declare("pipeline.compute", "before a stage computes one of its instructions")
BACKWARD_POINT = faults.declare("mesh.backward", "in a backward pass on a mesh, before a bucket is sent")

TIMES_KEPT = 512
"""Of each operation on each part, the last ones."""

OnFinal = Callable[[slice], None]
"""Called with the elements of the flat gradient that are this rank's final sum."""


class StagePasses:
    """Runs `programs[own.stage]`, step after step, over the micro-batches of `plan`.

    Gradients are written to `buffers`, flat arrays of `own.layout`. `group` and `rings` are those of
    `epoch`, None for a pipeline of one stage. `worker` is this process.
    """

    def __init__(
        self,
        own: OwnParts,
        programs: Sequence[StageProgram],
        plan: AccumulationPlan,
        buffers: list[Array],
        group: Group | None,
        rings: StageRings | None,
        worker: Worker,
        epoch: int,
    ) -> None:
        self._own, self._buffers, self._group = own, buffers, group
        self._worker, self._epoch, self._turns = worker, epoch, 0
        self._rings_or_none = rings
        self._run_by(programs, plan)
        self._bytes_of: dict[int, int] = {}
        """Of the activations of a micro-batch, by part; the first pass of each is looked at."""
        self._held_most, self._bytes_held, self._bytes_most = 0, 0, 0
        self._buckets = {number: Buckets(part.layout) for number, part in own.parts.items()}
        self._passes: dict[tuple[int, int], Pass] = {}
        self._made: dict[Message, Array] = {}
        """Arrays to be sent, or handed to the next part on this stage."""
        self._weights: Array | None = None
        self._batches: Sequence[Batch] = ()
        self._final: OnFinal | None = None
        self._deadline_ns = 0
        self._loss_scale = 1.0
        self.took_ns: dict[tuple[Op, int], deque[int]] = {}
        """Durations of the last computations, by operation and part."""
        self.losses: dict[int, float] = {}
        """Of the micro-batches, on the last stage, after their passes."""
        self._loss_of: dict[int, Array] = {}
        """A device may still compute them."""
        self.busy_ns = 0
        """Time that this stage computed in the last step."""

    def _run_by(self, programs: Sequence[StageProgram], plan: AccumulationPlan) -> None:
        own = self._own
        self._plan, self._program = plan, programs[own.stage]
        self._machine = StageMachine(programs, own.stage)
        config, turn = stage_config(programs, own.stage), f"/{self._turns}" if self._turns else ""
        name = f"stage{own.stage}/{self._epoch}{turn}"
        self._tap = captured_machine(self._worker, STAGE, name, self._machine, config)
        self._splits = any(one.op is Op.INPUT_GRADIENT for one in self._program.instructions)
        schedule, shape = schedule_named(self._program.schedule), self._program.shape
        self._held_max = min(schedule.activations_max(shape, own.stage), shape.microbatches * len(own.parts))

    def turn_to(self, programs: Sequence[StageProgram], plan: AccumulationPlan) -> None:
        """Run other programs from the next step on; all stages together, when all have ended a step.

        Raises `LocalProtocolError` during a step, and for a program for which the rings have no memory.
        """
        if self._rings_or_none is not None:
            self._rings.turn_to(programs[self._own.stage], *self._machine.totals())
        self._tap.close("the stage turns to another program")
        self._turns += 1
        self._run_by(programs, plan)

    @property
    def spans(self) -> list[slice]:
        """Return the runs of the flat gradient that become final together."""
        return [
            _moved(span, self._own.spans[number].start)
            for number, buckets in self._buckets.items()
            for span in buckets.spans
        ]

    @property
    def held_most(self) -> ActivationPeak:
        """Return what this stage held in the last step."""
        return ActivationPeak(
            microbatches=self._held_most,
            nbytes=self._bytes_most,
            microbatches_max=self._held_max,
            nbytes_max=self._held_max * max(self._bytes_of.values(), default=0),
        )

    def run(
        self,
        weights: Array,
        batches: Sequence[Batch],
        *,
        deadline_ns: int,
        final: OnFinal | None,
        between: Callable[[], None],
        loss_scale: float = 1.0,
    ) -> None:
        """Do the passes of a step; `between` is called between any two computations.

        Gradients, not losses, are multiplied by `loss_scale`. `final` is called while the last micro-batch is
        on its way back. Raises `PeerLost`, `OperationAborted` and `DeadlineExceeded`; give these passes up
        then.
        """
        self.losses, self._loss_of, self.busy_ns = {}, {}, 0
        self._held_most = self._bytes_held = self._bytes_most = 0
        self._weights, self._batches, self._final = weights, batches, final
        self._deadline_ns, self._loss_scale = deadline_ns, loss_scale
        try:
            if self._rings_or_none is None:
                self._run_alone(between)
            else:
                self._run_stage(between)
            self.losses = {microbatch: float(loss) for microbatch, loss in self._loss_of.items()}
        finally:
            self._weights = None  # who gathered them gives them back

    def _run_stage(self, between: Callable[[], None]) -> None:
        actions = deque(self._handle(StepBegun()))
        while actions:
            actions += self._perform(actions.popleft())
            between()
        with spans.COMM:
            self._rings.drain(self._deadline_ns)

    def _run_alone(self, between: Callable[[], None]) -> None:
        """Run the program of a single stage as it stands: there is nobody to hear from, or to wait for.

        The machine would say the same, at 1 % of a short step.
        """
        for instruction in self._program.instructions:
            self._compute(Compute(instruction=instruction, input_slot=None, gradient_slot=None))
            if releases(instruction):
                self._free(instruction.part, instruction.microbatch)
            between()

    def close(self, *, gave_up: bool) -> None:
        """Leave the neighbours' rings; with `gave_up` their waits end. Idempotent."""
        if self._rings_or_none is not None:
            if gave_up:
                self._rings.give_up()
            self._rings.close()
        for key in list(self._passes):
            self._drop(key)
        self._made.clear()
        self._tap.close("the epoch is over")

    @property
    def _rings(self) -> StageRings:
        if self._rings_or_none is None:
            raise LocalProtocolError("a pipeline of one stage has no neighbours")
        return self._rings_or_none

    def _perform(self, action: StageAction) -> list[StageAction]:
        """Perform an action; return the actions that follow."""
        match action:
            case Compute() as compute:
                self._compute(compute)
                return [*self._listen(), *self._handle(Computed())]
            case Put() as put:
                with spans.COMM:
                    self._rings.put(put, self._made.pop(put.message))
            case Release() as release:
                self._rings.release(release)
            case Free(part=part, microbatch=microbatch):
                self._free(part, microbatch)
            case Await() as awaited:
                with spans.BUBBLE:
                    return self._wait(awaited)
            case GiveUp(stage=stage, reason=reason):
                assert self._group is not None
                raise PeerLost(self._group.members[stage], reason)
            case StepDone():
                pass
            case _:
                assert_never(action)
        return []

    def _free(self, part: int, microbatch: int) -> None:
        if self._drop((part, microbatch)):
            self._bytes_held -= self._bytes_of[part]

    def _drop(self, key: tuple[int, int]) -> bool:
        """Drop the pass of a micro-batch through a part; return whether there was one."""
        done = self._passes.pop(key, None)
        if done is not None:
            done.let_go()
        return done is not None

    def _handle(self, event: StepBegun | Computed | Heard | StageLost) -> list[StageAction]:
        actions = self._tap.handle(event, now_ns=now_ns())
        self._tap.check_invariants()
        return actions

    def _listen(self) -> list[StageAction]:
        """Pass the neighbours' counts to the machine."""
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

    def _compute(self, compute: Compute) -> None:
        faults.hit(COMPUTE_POINT)
        started_ns = now_ns()
        instruction = compute.instruction
        match instruction.op:
            case Op.FORWARD:
                self._forward(instruction, compute.input_slot)
            case Op.WEIGHT_GRADIENT:
                self._weight_gradient(instruction)
            case _:
                self._backward(instruction, compute.gradient_slot)
        took_ns = now_ns() - started_ns
        self.busy_ns += took_ns
        times = self.took_ns.setdefault((instruction.op, instruction.part), deque(maxlen=TIMES_KEPT))
        times.append(took_ns)

    def _forward(self, instruction: Instruction, slot: int | None) -> None:
        _, number, microbatch = instruction
        assert self._weights is not None
        part, span, leaf = self._own.parts[number], self._own.spans[number], self._plan.leaves[microbatch]
        came = None if part.is_first else self._came(Message(False, number, microbatch), slot)
        self._look_at(came, ProbePoint.FORWARD, part.layers[0])
        done = part.forward(
            self._weights[span],
            self._buffers[leaf.buffer][span],
            self._batches[microbatch],
            came,
            on_grad_ready=self._ready(number, microbatch),
            splits=self._splits,
        )
        self._hold(number, microbatch, done)
        if part.is_last:
            self._loss_of[microbatch] = done.output.data
        else:
            self._made[Message(False, number + 1, microbatch)] = done.output.data

    def _hold(self, number: int, microbatch: int, done: Pass) -> None:
        """Keep a pass until its backward pass, and count its memory."""
        if number not in self._bytes_of:
            assert self._weights is not None
            self._bytes_of[number] = held_bytes(done, (self._weights, *self._buffers))
        self._passes[number, microbatch] = done
        self._bytes_held += self._bytes_of[number]
        self._held_most = max(self._held_most, len(self._passes))
        self._bytes_most = max(self._bytes_most, self._bytes_held)

    def _backward(self, instruction: Instruction, slot: int | None) -> None:
        _, number, microbatch = instruction
        part = self._own.parts[number]
        given = None if part.is_last else self._came(Message(True, number, microbatch), slot)
        self._look_at(given, ProbePoint.BACKWARD, part.layers[-1])
        splits = instruction.op is Op.INPUT_GRADIENT
        if not splits:
            self._begin_buckets(number, microbatch)
        gradient = part.backward(self._passes[number, microbatch], given, loss_scale=self._loss_scale)
        if gradient is not None:
            non_finite_probe.probe_sent(gradient)
            self._made[Message(True, number - 1, microbatch)] = gradient
        if not splits:
            self._add_up(number, microbatch)

    def _weight_gradient(self, instruction: Instruction) -> None:
        _, number, microbatch = instruction
        self._begin_buckets(number, microbatch)
        self._own.parts[number].weight_gradient(self._passes[number, microbatch])
        self._add_up(number, microbatch)

    def _begin_buckets(self, number: int, microbatch: int) -> None:
        if self._hands_over(microbatch):
            self._buckets[number].begin()

    def _add_up(self, number: int, microbatch: int) -> None:
        """Sum up a micro-batch's gradient of a part, unless that was done bucket by bucket."""
        if not self._hands_over(microbatch):
            leaf = self._plan.leaves[microbatch]
            self._plan.perform(leaf.additions, self._buffers, self._own.spans[number])

    def _hands_over(self, microbatch: int) -> bool:
        """Return whether gradients become final during this backward pass, with a hook to call."""
        return self._final is not None and microbatch == len(self._plan.leaves) - 1

    def _ready(self, number: int, microbatch: int) -> GradReady | None:
        """Return the hook that sums up each bucket as soon as its parameters' gradients are final."""
        final = self._final
        if final is None or not self._hands_over(microbatch):
            return None
        buckets, start = self._buckets[number], self._own.spans[number].start
        leaf: Leaf = self._plan.leaves[microbatch]

        def ready(parameter: int) -> None:
            span = buckets.ready(parameter)
            if span is not None:
                faults.hit(BACKWARD_POINT)
                whole = _moved(span, start)
                self._plan.perform(leaf.additions, self._buffers, whole)
                final(whole)

        return ready

    def _look_at(self, came: Array | None, where: ProbePoint, unit: int) -> None:
        """Check what came from another stage, if a probe is active."""
        watching = non_finite_probe.active_probe()
        if watching is not None and came is not None:
            watching.at(where, unit)
            watching.look(came, received=True)

    def _came(self, message: Message, slot: int | None) -> Array:
        """Return the input of a part: from its slot, or from another part of this stage."""
        if slot is None:
            return self._made.pop(message)
        came = self._rings.slot(Boundary(message.gradient, message.part), slot)
        placed: Array = self._own.every[message.part].model.xp.asarray(came)
        return placed


def _moved(span: slice, start: int) -> slice:
    return slice(span.start + start, span.stop + start)
