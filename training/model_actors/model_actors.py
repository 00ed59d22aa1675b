"""The actors of one model in one process, as a supervised tree, and the recipe whose steps pass through them.

model
  ├─ model.tensors        TensorActor: the transactional store
  ├─ model.optimizer      OptimizerActor
  ├─ model.operators      SupervisorActor: model.linear, model.rms_norm, … (OperatorActor)
  └─ model.layers         SupervisorActor: model.embed, model.blocks.0, …, model.head (LayerActor)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from zbmd.actors.core.ref import Down, Ref
from zbmd.actors.supervision.events import BackOff, Strategy
from zbmd.actors.supervision.supervisor import ChildSpec, Supervisor
from zbmd.actors.system import ActorSystem
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import GradReady, Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator, Operators, Tokens
from zbmd.training.model_actors.joint_call import JointCall, SlotVacated
from zbmd.training.model_actors.layer_actor import DryPass, LayerActor
from zbmd.training.model_actors.operator_actor import OperatorActor, OperatorPlacement
from zbmd.training.model_actors.operator_devices import HostDevice, OperatorDevice
from zbmd.training.model_actors.slot import ActorSlot, SlotActor, no_check
from zbmd.training.model_actors.tensor_actor import OptimizerActor, TensorActor
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.two_slot_store import Store

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


class SupervisedGPT(GPT):
    """`plain`, with each unit computed by the actor in its slot, and operators likewise.

    The bits are the same if all `devices` are of one kind. An operator starts on the first of them.
    """

    def __init__(self, plain: GPT, devices: Sequence[OperatorDevice], name: str = "model") -> None:
        vars(self).update(vars(plain))
        self._plain = plain
        self._devices = tuple(devices)
        self._neighbours: set[OperatorActor] = set()
        self.places = {
            field.name: OperatorPlacement(self._devices, self._neighbours) for field in fields(Operators)
        }
        self._computing = copy.copy(plain)
        self.joint_call = joint_call = JointCall(name)
        self.operator_slots = {
            field.name: ActorSlot[OperatorActor](f"{name}.{field.name}", turn=joint_call.turn)
            for field in fields(Operators)
        }
        self.layer_slots = {
            unit: ActorSlot[LayerActor](f"{name}.{unit}", turn=joint_call.turn) for unit in self.unit_names
        }
        self._by_number = tuple(self.layer_slots.values())
        joint_call.join((*self._by_number, *self.operator_slots.values()))

    @property
    def moves(self) -> int:
        """Return how often operators have moved to another device."""
        return sum(place.choice.moves for place in self.places.values())

    def operator_children(self) -> list[ChildSpec]:
        """Return the child specifications of the operators."""
        return [
            slot.child(
                OperatorActor,
                getattr(self._plain.operators, name),
                self.places[name],
                partial(self._install, name),
            )
            for name, slot in self.operator_slots.items()
        ]

    def layer_children(self, tensors: ActorSlot[TensorActor]) -> list[ChildSpec]:
        """Return the child specifications of the layers."""
        return [
            slot.child(LayerActor, number, self._computing, tensors, self.joint_call, self.operator_slots)
            for number, slot in enumerate(self._by_number)
        ]

    def unit(self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """See `GPT`; on the thread that has the turn of the joint call. Raises `SlotVacated`."""
        actor = self._by_number[number].actor
        if actor is None:
            raise SlotVacated(self._by_number[number].name)
        return actor.compute(tape, x, parameters, batch)

    def loss_and_grads(
        self,
        params: Array,
        grads: Array,
        tokens: Tokens,
        *,
        global_batch: int,
        on_grad_ready: GradReady | None = None,
        noise: Noise | None = None,
        loss_scale: float = 1.0,
    ) -> float:
        """See `GPT`; after a failure it is computed again from the start.

        Gradients that were final keep their bits and are not written again: they may already be in transit.
        Raises `RestartsExhausted`.
        """
        data, into = self.layout.views(params), self.layout.views(grads)
        batch = self.batch(tokens, global_batch=global_batch, noise=noise)
        attempt: list[Parameter] = []
        handed: set[int] = set()

        def work(tape: Tape) -> float:
            handed.update(parameter.index for parameter in attempt if parameter.handed)
            spare = self.layout.views(self.xp.empty_like(grads)) if handed else into
            attempt[:] = [
                Parameter(value, spare[i], i, None)
                if i in handed
                else Parameter(value, grad, i, on_grad_ready)
                for i, (value, grad) in enumerate(zip(data, into, strict=True))
            ]
            return self.differentiate(tape, attempt, batch, loss_scale=loss_scale)

        def blame(tape: Tape) -> ActorSlot[Any] | None:
            if any(parameter.handing for parameter in attempt):
                return None  # what the hook raised concerns its caller alone
            return self._blame(batch, tape)

        return self.joint_call.call(work, partial(Tape, self.xp), blame)

    def evaluate(self, params: Array, batch: Batch) -> Tensor:
        """See `GPT`. Raises `RestartsExhausted`."""
        leaves = self.leaves(params)
        return self.joint_call.call(
            lambda tape: self.run(tape, leaves, batch),
            partial(Tape, self.xp, recording=False),
            partial(self._blame, batch),
        )

    def _install(self, name: str, kernel: Operator) -> None:
        self._computing.operators = replace(self._computing.operators, **{name: kernel})

    def _blame(self, batch: Batch, tape: Tape) -> ActorSlot[Any]:
        """Return the slot of the op at the current position of `tape`."""
        dry = DryPass(self._plain, batch, recording=tape.recording)
        operator = dry.operator_at(tape.position)
        return (
            self._by_number[dry.unit_at(tape.position)] if operator is None else self.operator_slots[operator]
        )


class SupervisedRecipe(Recipe):
    """`plain`, with steps that are computed by actors."""

    def __init__(self, plain: Recipe, model: SupervisedGPT, optimizer: ActorSlot[OptimizerActor]) -> None:
        super().__init__(model, plain.corpus, plain.config)
        self._optimizer_slot = optimizer

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """See `Recipe`. Raises `RestartsExhausted`."""
        return self._optimizer_slot.call(OptimizerActor.update, old, new, grads, step=step)


class ModelActors:
    """The actors of `recipe`'s model and `store`, named `name` and below. Call `start` to spawn them.

    `devices`: where operators compute; each uses the first one until it fails.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        *,
        name: str = "model",
        devices: Sequence[OperatorDevice] = (HostDevice(),),
    ) -> None:
        self.name = name
        self.model = SupervisedGPT(recipe.model, devices, name)
        self.tensors = ActorSlot[TensorActor](f"{name}.tensors")
        self.optimizer = ActorSlot[OptimizerActor](f"{name}.optimizer", caller_errors=(TrainingDiverged,))
        self.recipe = SupervisedRecipe(recipe, self.model, self.optimizer)
        back_off = replace(BACK_OFF, seed=recipe.config.seed)
        self.children = [
            self.tensors.child(TensorActor, store),
            self.optimizer.child(OptimizerActor, recipe),
            _nested(f"{name}.operators", self.model.operator_children(), back_off),
            _nested(f"{name}.layers", self.model.layer_children(self.tensors), back_off),
        ]
        self.slots = tuple(slots_of(self.children))
        self._back_off = back_off
        self._system: ActorSystem | None = None
        self.root: Ref | None = None

    async def start(self, system: ActorSystem) -> None:
        """Spawn all actors. Raises `ActorStartFailed`, `NameTaken`."""
        arguments = (self.children,)
        options: dict[str, Any] = {"back_off": self._back_off}
        self.root = await system.spawn(SupervisorActor, *arguments, name=self.name, **options)
        self._system = system

    async def stop(self) -> None:
        """End all actors."""
        if self._system is not None and self.root is not None:
            await self._system.terminate(self.root)

    def while_waiting(self, check: Callable[[], None] = no_check) -> None:
        """Call `check` while a step waits for an actor's next incarnation; an exception ends the step."""
        for slot in self.slots:
            slot.check = check


def _nested(name: str, children: list[ChildSpec], back_off: BackOff) -> ChildSpec:
    args = (children, Strategy.ONE_FOR_ONE, INTENSITY, PERIOD_S, back_off)
    return ChildSpec(name=name, actor=SupervisorActor, args=args)
