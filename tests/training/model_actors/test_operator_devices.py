"""Operators on devices: the same bits on each, a move behind a fault or failures, and seeds of all of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos import soak_operators as soak
from zbmd.tools.chaos.supervised_recipe import SupervisedRecipe
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.model.gpt import GPT
from zbmd.training.model_actors.device_choice import (
    RETRIES_MAX,
    CheckDevice,
    DeviceAction,
    DeviceChecked,
    DeviceChoice,
    DeviceEvent,
    IncarnationStarted,
    MessageFailed,
    MessageHandled,
    UseDevice,
)
from zbmd.training.model_actors.operator_devices import (
    DeviceFault,
    HostDevice,
    ModuleDevice,
    OperatorDevice,
    check_product,
)
from zbmd.training.model_actors.slot import DescribeSlot, SlotDescription
from zbmd.training.scenarios.training import plain_job
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import LocalProtocolError


@pytest.fixture
def recipe() -> Recipe:
    made = plain_job(2, 3).recipe
    return Recipe(GPT(replace(made.model.config, dropout=0.2)), made.corpus, made.config)


def gradient(recipe: Recipe) -> bytes:
    weights = recipe.model.init(0) + np.float32(0.01)
    grads = np.zeros_like(weights)
    loss = recipe.shard_gradient(weights, grads, recipe.sample_ids(1)[0], step=1)
    return np.float64(loss).tobytes() + grads.tobytes()


async def started(system: ActorSystem, recipe: Recipe, *devices: OperatorDevice) -> SupervisedRecipe:
    made = SupervisedRecipe(recipe, devices=devices)
    await made.actors.start(system)
    return made


async def test_another_module_computes_the_same_bits(system: ActorSystem, recipe: Recipe) -> None:
    plain = gradient(recipe)
    weights, tokens = recipe.model.init(0), recipe.corpus.windows(recipe.sample_ids(0)[0])
    loss = recipe.model.loss(weights, tokens)
    made = await started(system, recipe, ModuleDevice("cpu:1", np))
    assert await asyncio.to_thread(gradient, made) == plain
    batch = recipe.model.batch(tokens, global_batch=len(tokens))
    assert float(await asyncio.to_thread(made.part.evaluate, weights, batch, None)) == loss


async def test_a_fault_moves_all_who_compute_there(system: ActorSystem, recipe: Recipe) -> None:
    plain = gradient(recipe)
    broken = soak.FlakyDevice(HostDevice("cpu:0"), Random(0), share=0.0, fault_after=5)
    sick = soak.FlakyDevice(HostDevice("cpu:1"), Random(0), share=0.0, fault_after=0)
    made = await started(system, recipe, broken, sick, HostDevice("cpu:2"))
    for _ in range(2):
        assert await asyncio.to_thread(gradient, made) == plain
    assert broken.failures == 1, "nobody tries it again"
    assert sick.failures == 0, "nobody goes where the check has found something"
    for name in ("linear", "embedding", "cross_entropy"):
        told = await system.ref(f"here/model.{name}").ask(DescribeSlot(), reply=SlotDescription, timeout=60)
        assert (told.kind, told.place, told.moves, told.incarnation) == ("OperatorActor", "cpu:2", 1, 2)
    assert made.actors.moves == len(made.actors.places)


async def test_an_operator_that_keeps_failing_moves_alone(system: ActorSystem, recipe: Recipe) -> None:
    plain = gradient(recipe)
    flaky = soak.FlakyDevice(HostDevice("cpu:0"), Random(0), share=1.0, fault_after=None)
    flaky.flakes_left = RETRIES_MAX + 1
    made = await started(system, recipe, flaky, HostDevice("cpu:1"))
    assert await asyncio.to_thread(gradient, made) == plain
    moved = {name: place.choice.device for name, place in made.actors.places.items()}
    assert [name for name, device in moved.items() if device == "cpu:1"] == ["embedding"]
    assert made.actors.moves == 1


def test_faults_of_a_module_are_told_as_faults_of_the_device() -> None:
    class Lost(RuntimeError):
        pass

    def lost(*_: object, **__: object) -> Tensor:
        raise Lost("the bus is gone")

    device = ModuleDevice("cpu:1", np, faults=(Lost,))
    with pytest.raises(DeviceFault, match="cpu:1: Lost: the bus is gone"):
        device.kernel(lost)(Tape(np))
    assert device.check() == "" == HostDevice().check() == check_product(np)


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["fault", "failed", "worked", "life", "cut short"]), max_size=40),
    st.data(),
)
def test_an_operator_is_always_somewhere_and_leaves_for_a_reason(
    count: int, happenings: list[str], data: st.DataObject
) -> None:
    choice, names = DeviceChoice("abc"[:count]), "abc"[:count]
    failures, leaves = 0, False

    def step(event: DeviceEvent) -> list[DeviceAction]:
        actions = choice.handle(event)
        choice.check_invariants()
        return actions

    for what in happenings:
        if what in ("fault", "failed"):
            assert step(MessageFailed(fault=what == "fault", reason="x")) == []
            failures += 1
            leaves = leaves or what == "fault" or failures > RETRIES_MAX
        elif what == "worked":
            assert step(MessageHandled()) == []
            failures = 0
        else:
            before, (action,) = choice.device, step(IncarnationStarted())
            looked: list[str] = []
            while isinstance(action, CheckDevice) and what == "life":
                looked.append(action.device)
                problem = data.draw(st.sampled_from(["", "broken"]))
                (action,) = step(DeviceChecked(device=action.device, problem=problem))
            if isinstance(action, UseDevice):
                here = names.index(before)
                assert looked == [*names[here + 1 :], *names[:here]][: len(looked)], "round the list"
                assert leaves or not looked
                assert action.moved_from == ("" if action.device == before else before)
                assert not leaves or action.device != before or len(looked) == count - 1
                failures, leaves = (0, False) if leaves else (failures, leaves)


def test_misuse_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="distinct device names"):
        DeviceChoice(["a", "a"])
    with pytest.raises(LocalProtocolError, match="was not requested"):
        DeviceChoice(["a"]).handle(DeviceChecked(device="a", problem=""))


async def test_seeds_of_failures_faults_and_kills_end_with_the_undisturbed_bits(seed: int) -> None:
    found = await soak.soak(seed, 6)
    assert [one.seed for one in found if not one.same] == []
