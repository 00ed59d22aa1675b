"""The actors of one model in one process, as a supervised tree, and the recipe whose steps pass through them.

model
  ├─ model.tensors        TensorActor: the transactional store
  ├─ model.optimizer      OptimizerActor
  ├─ model.operators      SupervisorActor: model.linear, model.rms_norm, … (OperatorActor)
  └─ model.layers         SupervisorActor: model.embed, model.blocks.0, …, model.head (LayerActor)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from zbmd.actors.core.ref import Ref
from zbmd.actors.supervision.events import BackOff, Strategy
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import GradReady, Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator, Operators, Tokens
from zbmd.training.model_actors.blame import DryPass
from zbmd.training.model_actors.joint_call import Crew, Vacated
from zbmd.training.model_actors.layer_actor import LayerActor
from zbmd.training.model_actors.operator_actor import OperatorActor, OperatorPlace
from zbmd.training.model_actors.operator_devices import HostDevice, OperatorDevice
from zbmd.training.model_actors.optimizer_actor import OptimizerActor
from zbmd.training.model_actors.slot import Seat, no_check
from zbmd.training.model_actors.supervisor_actor import (
    BACK_OFF,
    INTENSITY,
    PERIOD_S,
    SupervisorActor,
    seats_of,
)
from zbmd.training.model_actors.tensor_actor import TensorActor
from zbmd.training.optim.adamw import AdamWState
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.run.two_slot_store import Store
from zbmd.training.step.recipe import Recipe


class SupervisedGPT(GPT):
    """`plain`, each of whose units is computed by who sits at its seat, with operators that sit at theirs.

    The same bits, if all `devices` are of one kind. An operator begins with the first of them.
    """

    def __init__(self, plain: GPT, devices: Sequence[OperatorDevice], name: str = "model") -> None:
        vars(self).update(vars(plain))
        self._plain = plain
        self._devices = tuple(devices)
        self._neighbours: set[OperatorActor] = set()
        self.places = {
            field.name: OperatorPlace(self._devices, self._neighbours) for field in fields(Operators)
        }
        self._seated = copy.copy(plain)
        self.crew = crew = Crew(name)
        self.operator_seats = {
            field.name: Seat[OperatorActor](f"{name}.{field.name}", turn=crew.turn)
            for field in fields(Operators)
        }
        self.layer_seats = {
            unit: Seat[LayerActor](f"{name}.{unit}", turn=crew.turn) for unit in self.unit_names
        }
        self._by_number = tuple(self.layer_seats.values())
        crew.join((*self._by_number, *self.operator_seats.values()))

    @property
    def moves(self) -> int:
        """How often operators have moved to another device."""
        return sum(place.choice.moves for place in self.places.values())

    def operator_children(self) -> list[ChildSpec]:
        """For a supervisor: who sits there."""
        return [
            seat.child(
                OperatorActor,
                getattr(self._plain.operators, name),
                self.places[name],
                partial(self._install, name),
            )
            for name, seat in self.operator_seats.items()
        ]

    def layer_children(self, tensors: Seat[TensorActor]) -> list[ChildSpec]:
        """For a supervisor: who sits there."""
        return [
            seat.child(LayerActor, number, self._seated, tensors, self.crew, self.operator_seats)
            for number, seat in enumerate(self._by_number)
        ]

    def unit(self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """See `GPT`; on the thread that has the crew's turn. Raises `Vacated`."""
        life = self._by_number[number].life
        if life is None:
            raise Vacated(self._by_number[number].name)
        return life.compute(tape, x, parameters, batch)

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
        """See `GPT`; what fails is done again, from the start.

        Gradients that were final keep their bits and are not written again: they may be on their way. Raises
        `GivenUp`.
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

        def who(tape: Tape) -> Seat[Any] | None:
            if any(parameter.handing for parameter in attempt):
                return None  # what the hook raised concerns its caller alone
            return self._who(batch, tape)

        return self.crew.call(work, partial(Tape, self.xp), who)

    def evaluate(self, params: Array, batch: Batch) -> Tensor:
        """See `GPT`. Raises `GivenUp`."""
        leaves = self.leaves(params)
        return self.crew.call(
            lambda tape: self.run(tape, leaves, batch),
            partial(Tape, self.xp, recording=False),
            partial(self._who, batch),
        )

    def _install(self, name: str, kernel: Operator) -> None:
        self._seated.operators = replace(self._seated.operators, **{name: kernel})

    def _who(self, batch: Batch, tape: Tape) -> Seat[Any]:
        """At whose seat the op is that `tape` stands at."""
        dry = DryPass(self._plain, batch, recording=tape.recording)
        operator = dry.operator_at(tape.position)
        return (
            self._by_number[dry.unit_at(tape.position)] if operator is None else self.operator_seats[operator]
        )


class SupervisedRecipe(Recipe):
    """`plain`, whose steps pass through actors."""

    def __init__(self, plain: Recipe, model: SupervisedGPT, optimizer: Seat[OptimizerActor]) -> None:
        super().__init__(model, plain.corpus, plain.config)
        self._optimizer_seat = optimizer

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """See `Recipe`. Raises `GivenUp`."""
        return self._optimizer_seat.call(OptimizerActor.update, old, new, grads, step=step)


class ModelActors:
    """The actors of `recipe`'s model and `store`, named `name` and below. Made by `start`.

    devices: where operators compute, each on the first of them until that fails it.
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
        self.tensors = Seat[TensorActor](f"{name}.tensors")
        self.optimizer = Seat[OptimizerActor](f"{name}.optimizer", answers=(TrainingDiverged,))
        self.recipe = SupervisedRecipe(recipe, self.model, self.optimizer)
        back_off = replace(BACK_OFF, seed=recipe.config.seed)
        self.children = [
            self.tensors.child(TensorActor, store),
            self.optimizer.child(OptimizerActor, recipe),
            _nested(f"{name}.operators", self.model.operator_children(), back_off),
            _nested(f"{name}.layers", self.model.layer_children(self.tensors), back_off),
        ]
        self.seats = tuple(seats_of(self.children))
        self._back_off = back_off
        self._system: ActorSystem | None = None
        self.root: Ref | None = None

    async def start(self, system: ActorSystem) -> None:
        """Start them all; raises `ActorStartFailed`, `NameTaken`."""
        arguments = (self.children,)
        options: dict[str, Any] = {"back_off": self._back_off}
        self.root = await system.spawn(SupervisorActor, *arguments, name=self.name, **options)
        self._system = system

    async def stop(self) -> None:
        """End them all."""
        if self._system is not None and self.root is not None:
            await self._system.terminate(self.root)

    def while_waiting(self, check: Callable[[], None] = no_check) -> None:
        """`check` is called while a step waits for an actor's next life; what it raises ends the step."""
        for seat in self.seats:
            seat.check = check


def _nested(name: str, children: list[ChildSpec], back_off: BackOff) -> ChildSpec:
    args = (children, Strategy.ONE_FOR_ONE, INTENSITY, PERIOD_S, back_off)
    return ChildSpec(name=name, actor=SupervisorActor, args=args)
