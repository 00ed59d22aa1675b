"""The actors of one model in one process, as a supervised tree through which the steps of a trainer pass.

model
  ├─ model.tensors        TensorActor: weights, by name
  ├─ model.optimizer      ComputingActor
  ├─ model.operators      SupervisorActor: model.linear, model.rms_norm, … (OperatorActor)
  └─ model.layers         SupervisorActor: model.embed, model.blocks.0, …, model.head (LayerActor)

A task without such a model has one actor for its gradient in the place of the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from zbmd.actors.core.ref import Down, Ref
from zbmd.actors.supervision.events import BackOff, Strategy
from zbmd.actors.supervision.supervisor import ChildSpec, Supervisor
from zbmd.actors.system import ActorSystem
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import GradReady, Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator, Operators
from zbmd.training.model.tensor_parallel import TensorGroup
from zbmd.training.model_actors.actors import (
    ComputingActor,
    LayerActor,
    OperatorActor,
    OperatorPlacement,
    StateSource,
    TensorActor,
)
from zbmd.training.model_actors.collective_log import Log, RecordedGroup, Recorder
from zbmd.training.model_actors.operator_devices import HostDevice, OperatorDevice
from zbmd.training.model_actors.slot import (
    GROUP_ERRORS,
    ActorSlot,
    Attempt,
    JointCall,
    SlotActor,
    SlotVacated,
    no_check,
)
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.pipeline.part import GPTPart, Pass


class Compute(Protocol):
    """`ModelActors.compute`."""

    def __call__(self, work: Callable[[Attempt], R]) -> R:
        """Return `work(attempt)`, repeated if an actor fails."""
        ...


class _Inputs(NamedTuple):
    """The arguments of `GPTPart.forward`."""

    params: Array
    grads: Array
    batch: Batch
    activations: Array | None
    on_grad_ready: GradReady | None
    splits: bool


class _SupervisedPass(Pass):
    """A pass that can be repeated, from its inputs and the gradient of its output.

    Gradients that were handed over are not written again: they may be on their way.
    """

    __slots__ = ("_final", "_gradient", "_inputs", "_log", "_loss_scale", "_part", "_recorder")

    def __init__(self, part: GPTPart, inputs: _Inputs, recorder: Recorder) -> None:
        self._part, self._inputs, self._recorder = part, inputs, recorder
        self.whole = self.fused = None
        self._log: Log = []
        self._final = frozenset[int]()
        self._gradient: Array | None = None
        self._loss_scale = 1.0

    def begin_backward(self, gradient: Array | None, loss_scale: float) -> None:
        """Keep what the backward pass begins with: it is used up."""
        self._gradient, self._loss_scale = None if gradient is None else gradient.copy(), loss_scale

    def end(self) -> None:
        """Drop what a repetition would need."""
        self._log, self._gradient = [], None

    def forward(self, attempt: Attempt) -> _SupervisedPass:
        """Compute forwards."""
        with self._recorder.recording(self._log, again=True):
            self._forward(attempt)
        return self

    def backward(self, attempt: Attempt, gradient: Array | None) -> Array | None:
        """Compute backwards; in another attempt forwards as well."""
        attempt.tape, attempt.parameters = self.tape, self.parameters
        with self._recorder.recording(self._log, again=attempt.number > 0):
            if attempt.number:
                return self._repeat(attempt)
            return GPTPart.backward(self._part, self, gradient, loss_scale=self._loss_scale)

    def weight_gradient(self, attempt: Attempt) -> None:
        """Compute what `backward` has deferred; in another attempt all."""
        attempt.unit, attempt.parameters = self._part.layers[0], self.parameters
        with self._recorder.recording(self._log, again=attempt.number > 0):
            if attempt.number:
                self._repeat(attempt)
            GPTPart.weight_gradient(self._part, self)

    def _forward(self, attempt: Attempt) -> None:
        tape = attempt.tape = Tape(self._part.model.xp)
        params, grads, batch, activations, on_grad_ready, splits = self._inputs
        made = GPTPart.forward(
            self._part,
            params,
            grads,
            batch,
            activations,
            on_grad_ready=on_grad_ready,
            splits=splits,
            tape=tape,
        )
        self.tape, self.parameters, self.input = tape, made.parameters, made.input
        self.output, self.weight_gradients = made.output, made.weight_gradients

    def _repeat(self, attempt: Attempt) -> Array | None:
        self._final |= {one.index for one in self.parameters if one.handed}
        self._forward(attempt)
        attempt.parameters = self.parameters
        for index in self._final:
            _discard(self.parameters[index])
        given = None if self._gradient is None else self._gradient.copy()
        return GPTPart.backward(self._part, self, given, loss_scale=self._loss_scale)


class SupervisedPart(GPTPart):
    """`plain`, computed by `compute`; `recorder` keeps what collectives along `tp` return.

    The inputs of a pass must not change until its backward pass is over.
    """

    def __init__(self, plain: GPTPart, compute: Compute, recorder: Recorder) -> None:
        super().__init__(plain.model, plain.layers)
        self._compute, self._recorder = compute, recorder

    def forward(
        self,
        params: Array,
        grads: Array,
        batch: Batch,
        activations: Array | None,
        *,
        on_grad_ready: GradReady | None = None,
        splits: bool = False,
        tape: Tape | None = None,
    ) -> Pass:
        """See `GPTPart`; the tape is a new one. Raises `RestartsExhausted`."""
        inputs = _Inputs(params, grads, batch, activations, on_grad_ready, splits)
        return self._compute(_SupervisedPass(self, inputs, self._recorder).forward)

    def backward(self, forward: Pass, gradient: Array | None, *, loss_scale: float = 1.0) -> Array | None:
        """See `GPTPart`. Raises `RestartsExhausted`."""
        done = forward
        assert isinstance(done, _SupervisedPass), "a pass of another part"
        done.begin_backward(gradient, loss_scale)
        found = self._compute(lambda attempt: done.backward(attempt, gradient))
        if not done.weight_gradients:
            done.end()
        return found

    def weight_gradient(self, forward: Pass) -> None:
        """See `GPTPart`. Raises `RestartsExhausted`."""
        assert isinstance(forward, _SupervisedPass), "a pass of another part"
        self._compute(forward.weight_gradient)
        forward.end()

    def evaluate(
        self, params: Array, batch: Batch, activations: Array | None, *, tape: Tape | None = None
    ) -> Array:
        """See `GPTPart`; the tape is a new one. Raises `RestartsExhausted`."""
        log, evaluate = Log(), super().evaluate

        def work(attempt: Attempt) -> Array:
            attempt.tape = Tape(self.model.xp, recording=False)
            with self._recorder.recording(log, again=True):
                return evaluate(params, batch, activations, tape=attempt.tape)

        return self._compute(work)


def _discard(parameter: Parameter) -> None:
    """Have a gradient computed that nobody reads: other parts of the pass overwrite what it is made of."""
    assert parameter.grad is not None
    parameter.grad = np.empty_like(parameter.grad)
    parameter.on_ready = None


R = TypeVar("R")

STEP_ERRORS: Final = (TrainingDiverged, *GROUP_ERRORS)
"""They end the step, and are no failure of an actor."""
INTENSITY = 32
PERIOD_S = 10.0
BACK_OFF = BackOff(first_ns=5_000_000, max_ns=2_000_000_000)


class SupervisorActor(Supervisor):
    """Restarts actors in slots: at once after a first failure, then after a back-off that its seed
    determines.

    When the outermost one ends, all slots below it are closed, and waiting callers get an error.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: int = INTENSITY,
        period_s: float = PERIOD_S,
        back_off: BackOff | None = BACK_OFF,
    ) -> None:
        super().__init__(children, strategy, intensity, period_s, back_off)
        self.slots = tuple(slots_of(children))

    async def started(self) -> None:
        """Start all children."""
        cell = self._running_cell()
        if cell.parent is None:
            cell.watch(self._close_slots)
        await super().started()

    def _close_slots(self, down: Down) -> None:
        for slot in self.slots:
            slot.close(str(down.reason))


def slots_of(children: Sequence[ChildSpec]) -> Iterator[ActorSlot[SlotActor]]:
    """Yield the slots of these children and of those below them."""
    for child in children:
        if issubclass(child.actor, SupervisorActor):
            yield from slots_of(child.args[0])
        elif issubclass(child.actor, SlotActor):
            yield child.args[0]


class ModelActors:
    """The actors of the model that `source` trains, named `name` and below. Call `start` to spawn them.

    While they run, `model` computes its units and operators by them: in a `compute`, which repeats what fails
    with the same bits, if all `devices` are of one kind. An operator starts on the first of them. Without a
    model there is one actor for the whole gradient (`gradient`).
    """

    def __init__(
        self,
        source: StateSource,
        model: GPT | None = None,
        *,
        seed: int = 0,
        name: str = "model",
        devices: Sequence[OperatorDevice] = (HostDevice(),),
    ) -> None:
        self.name, self.source, self.model = name, source, model
        self.joint_call = JointCall(name)
        self.tensors = ActorSlot[TensorActor](f"{name}.tensors")
        self.optimizer = ActorSlot[ComputingActor](f"{name}.optimizer", caller_errors=STEP_ERRORS)
        self._whole = ActorSlot[ComputingActor](f"{name}.gradient", caller_errors=STEP_ERRORS)
        self._plain = Operators() if model is None else model.operators
        operators = () if model is None else tuple(field.name for field in fields(Operators))
        neighbours = set[OperatorActor]()
        self.places = {one: OperatorPlacement(devices, neighbours) for one in operators}
        turn = self.joint_call.turn
        self.operator_slots = {one: ActorSlot[OperatorActor](f"{name}.{one}", turn=turn) for one in operators}
        units = () if model is None else model.unit_names
        self.layer_slots = {one: ActorSlot[LayerActor](f"{name}.{one}", turn=turn) for one in units}
        self._units = tuple(self.layer_slots.values())
        self.joint_call.join((*self._units, *self.operator_slots.values()))
        self._recorder = Recorder()
        self._back_off = replace(BACK_OFF, seed=seed)
        self.children = self._tree()
        self.slots = tuple(slots_of(self.children))
        self._system: ActorSystem | None = None
        self.root: Ref | None = None

    def _tree(self) -> list[ChildSpec]:
        held = self.tensors.child(TensorActor, self.source), self.optimizer.child(ComputingActor)
        model = self.model
        if model is None:
            return [*held, self._whole.child(ComputingActor)]
        operators = [
            slot.child(
                OperatorActor, getattr(self._plain, one), self.places[one], partial(self._install, one)
            )
            for one, slot in self.operator_slots.items()
        ]
        layers = [
            slot.child(LayerActor, number, model, self._unit_weights, self.compute)
            for number, slot in enumerate(self._units)
        ]
        return [
            *held,
            _nested(f"{self.name}.operators", operators, self._back_off),
            _nested(f"{self.name}.layers", layers, self._back_off),
        ]

    async def start(self, system: ActorSystem) -> None:
        """Spawn all actors. Raises `ActorStartFailed`, `NameTaken`."""
        arguments = (self.children,)
        options: dict[str, Any] = {"back_off": self._back_off}
        self.root = await system.spawn(SupervisorActor, *arguments, name=self.name, **options)
        self._system = system
        if self.model is not None:
            self.model.computed_by = self._unit

    async def stop(self) -> None:
        """End all actors; the model computes by itself again."""
        if self._system is not None and self.root is not None:
            await self._system.terminate(self.root)
        if self.model is not None:
            self.model.computed_by, self.model.operators = None, self._plain

    def while_waiting(self, check: Callable[[], None] = no_check) -> None:
        """Call `check` while a step waits for an actor's next incarnation; an exception ends the step."""
        for slot in self.slots:
            slot.check = check

    @property
    def moves(self) -> int:
        """Return how often operators have moved to another device."""
        return sum(place.choice.moves for place in self.places.values())

    # ---- for the training thread

    def compute(self, work: Callable[[Attempt], R]) -> R:
        """Return `work(attempt)`, which computes with the model; repeated if an actor fails.

        Raises `RestartsExhausted`, and what collectives raise.
        """
        return self.joint_call.call(work, self._blame)

    def gradient(self, work: Callable[[], R]) -> R:
        """Return `work()`, the gradient of a task without a model; as `compute`."""
        return self._whole.call(ComputingActor.run, work)

    def update(self, work: Callable[[], R]) -> R:
        """Return `work()`, which computes the next version of the state beside this one; as `compute`."""
        log, attempts = Log(), count()

        def recorded() -> R:
            with self._recorder.recording(log, again=next(attempts) > 0):
                return work()

        return self.optimizer.call(ComputingActor.run, recorded)

    def recording(self, log: Log, *, again: bool) -> Recorder:
        """Keep in `log` what collectives return inside a `with` of the result; `again`: take that from there.

        For a computation that is repeated with its `compute`, and calls collectives of `group`.
        """
        return self._recorder.recording(log, again=again)

    def part(self, plain: GPTPart) -> GPTPart:
        """Return `plain`, computed by the actors."""
        return SupervisedPart(plain, self.compute, self._recorder)

    def group(self, group: TensorGroup) -> TensorGroup:
        """Return `group` for collectives inside a computation, which are not repeated with it."""
        return RecordedGroup(group, self._recorder)

    # ---- of the actors

    def _unit(self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """Compute a unit by its actor; see `GPT.unit`. Raises `SlotVacated`."""
        slot = self._units[number]
        if slot.actor is None:
            raise SlotVacated(slot.name)
        return slot.actor.compute(tape, x, parameters, batch)

    def _install(self, name: str, kernel: Operator) -> None:
        assert self.model is not None
        self.model.operators = replace(self.model.operators, **{name: _labelled(name, kernel)})

    def _unit_weights(self, number: int) -> list[Array] | None:
        assert self.model is not None
        layout = self.model.layout
        slots = [layout.slots[index] for index in self.model.unit_parameters(number)]
        held = {
            one.name: one.array
            for one in self.source.tensors(self.source.step)
            if one.cut.stop - one.cut.start == one.cut.each
        }
        if any(slot.name not in held for slot in slots):
            return None
        return [held[slot.name].reshape(slot.shape) for slot in slots]

    def _blame(self, attempt: Attempt) -> ActorSlot[Any] | None:
        """Return the slot of the op that runs, or of the unit; None: a hook of the caller has failed."""
        if any(parameter.handing for parameter in attempt.parameters):
            return None
        tape = attempt.tape
        if tape is None:
            return self._units[attempt.unit]
        operator = tape.labels.get(tape.position)
        return self._units[tape.unit_running] if operator is None else self.operator_slots[operator]


def _labelled(name: str, kernel: Operator) -> Operator:
    """`kernel`, which writes its name at its position of the tape: after a failure one sees whose it was."""

    def run(tape: Tape, *arguments: Any, **options: Any) -> Tensor:
        tape.labels[tape.position] = name
        return kernel(tape, *arguments, **options)

    return run


def _nested(name: str, children: list[ChildSpec], back_off: BackOff) -> ChildSpec:
    args = (children, Strategy.ONE_FOR_ONE, INTENSITY, PERIOD_S, back_off)
    return ChildSpec(name=name, actor=SupervisorActor, args=args)
