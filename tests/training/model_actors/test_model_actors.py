"""A model's actors: the same bits as the plain run, whatever fails, and state that outlives who holds it."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import flaky_job
from support.devices.flaky_operators import Flaky

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.actors.host.events import HostEvent, RankReport
from zbmd.actors.supervision.supervisor import Children, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Tensor
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.model.gpt import GPT, Operators
from zbmd.training.model_actors.layer_actor import Activations, Forward, LayerActor
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.model_actors.operator_actor import OperatorActor
from zbmd.training.model_actors.slot import RestartsExhausted
from zbmd.training.model_actors.tensor_actor import (
    ArrayData,
    CommitSlot,
    Committed,
    TensorActor,
    pack,
    read_tensor,
    unpack,
)
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.replicated import job
from zbmd.training.replicated.scenario import plain_job
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.two_slot_store import Store, own_memory
from zbmd.transport.errors import RemoteProtocolError, UserError

TEXT = " ".join(str(n) for n in range(2000))


@pytest.fixture
def recipe() -> Recipe:
    """A small one of its own, since tests change its operators."""
    made = plain_job(2, 5).recipe
    return Recipe(GPT(made.model.config), made.corpus, made.config)


def options_of(directory: Path, name: str) -> job.JobOptions:
    (directory / name).mkdir()
    return job.JobOptions(
        out=directory / name,
        data=str(directory / "text"),
        model=GPTConfig(context=12, width=16, heads=2, layers=2),
        training=TrainingConfig(steps=6, shards=3, sequences_per_shard=1, warmup_steps=2),
        checkpoint_every=0,
    )


def store_of(recipe: Recipe) -> Store:
    store = Store(recipe.model.layout, own_memory)
    store.current.state.weights[:] = recipe.model.init(recipe.config.seed)
    return store


def gradient(recipe: Recipe, store: Store) -> tuple[float, bytes, list[int]]:
    grads: Array = np.full(recipe.model.layout.size, np.nan, np.float32)
    for slot in recipe.model.layout.slots:
        grads[slot.offset + slot.size : slot.offset + -(-slot.size // 16) * 16] = 0.0
    order: list[int] = []
    loss = recipe.shard_gradient(
        store.current.state.weights, grads, recipe.sample_ids(0)[0], step=0, on_grad_ready=order.append
    )
    return loss, grads.tobytes(), order


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, False), (0.2, False), (0.2, True)])
async def test_failures_forwards_and_backwards_leave_no_trace(
    system: ActorSystem, recipe: Recipe, seed: int, dropout: float, recompute: bool
) -> None:
    recipe.model = GPT(replace(recipe.model.config, dropout=dropout), recompute=recompute)
    store = store_of(recipe)
    plain = gradient(recipe, store)
    flaky = Flaky(seed, share=0.03, failures_max=6)
    recipe.model.operators = flaky.around(recipe.model.operators)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    for _ in range(4):
        found = await asyncio.to_thread(gradient, actors.recipe, store)
        assert found == plain, flaky.failed
    assert sum(slot.failures for slot in actors.slots) == len(flaky.failed)
    await actors.stop()


@pytest.mark.parametrize("name", [field.name for field in fields(Operators)])
@pytest.mark.parametrize("when", ["before", "backwards", "backwards, at the end"])
async def test_who_fails_is_who_ends(
    system: ActorSystem, recipe: Recipe, seed: int, name: str, when: str
) -> None:
    recipe.model = GPT(replace(recipe.model.config, dropout=0.2))
    store, flaky = store_of(recipe), Flaky(seed, share=0.3, failures_max=1, only=f"{name}, {when}")
    recipe.model.operators = flaky.around(recipe.model.operators)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    while not flaky.failed:
        await asyncio.to_thread(gradient, actors.recipe, store)
    assert {slot.name: slot.incarnations for slot in actors.slots if slot.incarnations > 1} == {
        f"model.{name}": 2
    }
    await actors.stop()


async def test_a_layer_that_fails_beside_its_operators_is_restarted(
    system: ActorSystem, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.model = GPT(recipe.model.config, recompute=True)
    store = store_of(recipe)
    plain = gradient(recipe, store)
    actors, left = ModelActors(recipe, store), [2, 1]
    await actors.start(system)
    compute = LayerActor.compute

    def failing(self: LayerActor, *arguments: Any) -> Tensor:
        if self.number == 1 and left and left.pop():
            raise RuntimeError("half a block")
        return compute(self, *arguments)

    monkeypatch.setattr(LayerActor, "compute", failing)
    assert await asyncio.to_thread(gradient, actors.recipe, store) == plain
    lives = {slot.name: slot.incarnations for slot in actors.slots if slot.incarnations > 1}
    assert lives == {"model.blocks.0": 3}
    await actors.stop()


async def test_an_operator_that_never_works_is_given_up(system: ActorSystem, recipe: Recipe) -> None:
    store, flaky = store_of(recipe), Flaky(0, share=1.0, failures_max=1000)
    recipe.model.operators = flaky.around(recipe.model.operators)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    with pytest.raises(
        RestartsExhausted, match="model was interrupted 8 times in a row; the last: Broken: embedding"
    ):
        await asyncio.to_thread(gradient, actors.recipe, store)
    await actors.stop()


async def test_any_actor_may_be_killed_while_it_works(system: ActorSystem, recipe: Recipe, seed: int) -> None:
    store = store_of(recipe)
    plain = gradient(recipe, store)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        working = asyncio.create_task(asyncio.to_thread(gradient, actors.recipe, store))
        slot = actors.slots[rng.integers(len(actors.slots))]
        for _ in range(int(rng.integers(20))):
            await asyncio.sleep(0)
        if slot.actor is not None:
            system.exit(slot.actor.ref, Reason(ReasonKind.KILLED, "a test"))
        assert await working == plain
    await actors.stop()


async def test_what_the_hook_raises_is_the_callers(system: ActorSystem, recipe: Recipe) -> None:
    store = store_of(recipe)
    actors = ModelActors(recipe, store)
    await actors.start(system)

    def hook(_: int) -> None:
        raise InterruptedError("the epoch is over")

    def run() -> None:
        weights = actors.tensors.call(TensorActor.weights)
        ids = actors.recipe.sample_ids(0)[0]
        actors.recipe.shard_gradient(weights, np.zeros_like(weights), ids, step=0, on_grad_ready=hook)

    with pytest.raises(InterruptedError):
        await asyncio.to_thread(run)
    assert all(slot.failures == 0 for slot in actors.slots)
    await actors.stop()


async def test_the_optimizer_tells_of_a_gradient_that_is_not_finite(
    system: ActorSystem, recipe: Recipe
) -> None:
    store = store_of(recipe)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    old, new = (actors.tensors.call(TensorActor.state, slot) for slot in range(2))
    grads = np.full(recipe.model.layout.size, np.inf, np.float32)
    with pytest.raises(TrainingDiverged):
        await asyncio.to_thread(actors.recipe.update, old, new, grads, step=0)
    assert actors.optimizer.failures == 0
    await actors.stop()


async def test_state_outlives_the_actor_that_holds_it(system: ActorSystem, recipe: Recipe) -> None:
    store = store_of(recipe)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    store.slots[1].state.weights[:] = 0.5
    await actors.tensors.ask(CommitSlot(7, 1), reply=Committed, timeout=5)
    first = actors.tensors.actor
    assert first is not None
    system.exit(first.ref, Reason(ReasonKind.KILLED, "a test"))
    version, gain = await read_tensor(actors.tensors, "blocks.0.attn.norm.weight", timeout=5)
    assert actors.tensors.actor is not first
    assert version == 7 and gain.tolist() == [0.5] * recipe.model.config.width
    with pytest.raises(UserError, match="unknown parameter 'nobody'"):
        await read_tensor(actors.tensors, "nobody", timeout=5)
    root = actors.root
    assert root is not None
    told = await root.ask(WhichChildren(), reply=Children, timeout=5)
    assert [name for name, _, _ in told.children] == [
        "model.tensors",
        "model.optimizer",
        "model.operators",
        "model.layers",
    ]
    await actors.stop()


async def test_layers_answer_messages_with_the_committed_weights(system: ActorSystem, recipe: Recipe) -> None:
    store = store_of(recipe)
    rng = np.random.default_rng(1)
    store.current.state.weights[:] += rng.standard_normal(len(store.current.state.weights), np.float32)
    actors = ModelActors(recipe, store)
    await actors.start(system)
    tokens = rng.integers(0, 256, (3, 4))
    x, layers = tokens.reshape(-1), actors.model.layer_slots.values()
    for slot in layers:
        made = await slot.ask(Forward(pack(x), 3), reply=Activations, timeout=10)
        assert made.y is not None, made.problem
        x = unpack(made.y)
    wanted = recipe.model.logits(store.current.state.weights, tokens)
    assert x.tobytes() == wanted.tobytes()
    wrong = await actors.model.layer_slots["head"].ask(Forward(pack(tokens)), reply=Activations, timeout=10)
    assert wrong.y is None and "head: unexpected int64 of shape" in wrong.problem
    high = await actors.model.layer_slots["embed"].ask(
        Forward(pack(np.array([256]))), reply=Activations, timeout=10
    )
    assert "expected tokens from 0 to 255" in high.problem
    await actors.stop()


def test_arrays_of_a_message_are_checked() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert unpack(pack(array.T)).tolist() == array.T.tolist()
    for wrong in (ArrayData("object", [1], b"12345678"), ArrayData("float32", [3], b"1234")):
        with pytest.raises(RemoteProtocolError):
            unpack(wrong)


@pytest.mark.parametrize("failing", [0, 9])
async def test_a_job_whose_operators_fail_has_the_bits_of_the_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, failing: int
) -> None:
    (tmp_path / "text").write_text(TEXT)
    wanted = job.run_plain(options_of(tmp_path, "plain"))
    flaky, opened = Flaky(seed, share=0.005, failures_max=failing), job.open_recipe

    def flaky_recipe(options: job.JobOptions, *, prepare: bool = True) -> Recipe:
        made = opened(options, prepare=prepare)
        made.model.operators = flaky.around(made.model.operators)
        return made

    called: list[str] = []
    sit_down = OperatorActor.ready

    async def counted(self: OperatorActor) -> None:
        op = self.op

        def run(*arguments: Any, **options: Any) -> Tensor:
            called.append(self.slot.name)
            return op(*arguments, **options)

        self.op = run
        await sit_down(self)

    monkeypatch.setattr(OperatorActor, "ready", counted)
    monkeypatch.setattr(job, "open_recipe", flaky_recipe)
    found = await job.run_job(options_of(tmp_path, "through"))
    assert found is not None
    assert found.weights_sha256 == wanted.weights_sha256, flaky.failed
    assert bool(flaky.failed) == bool(failing)
    assert len(called) >= 6 * 3 * 19, "all of a step's operators are actors"


async def test_ranks_whose_operators_fail_and_that_are_killed(tmp_path: Path, seed: int) -> None:
    (tmp_path / "text").write_text(TEXT)
    plain = options_of(tmp_path, "plain")
    wanted = job.run_plain(plain)
    digests: list[str] = []

    async def keep(event: HostEvent) -> None:
        if isinstance(event, RankReport) and event.payload.get("kind") == "result":
            digests.append(event.payload["weights_sha256"])

    shape, training = plain.model, plain.training
    settings = {
        "--width": shape.width,
        "--heads": shape.heads,
        "--layers": shape.layers,
        "--context": shape.context,
        "--shards": training.shards,
        "--sequences-per-shard": training.sequences_per_shard,
        "--warmup": training.warmup_steps,
        "--steps": training.steps,
        "--data": plain.data,
        "--out": tmp_path / "ranks",
    }
    config = HostConfig(
        target=flaky_job.__file__,
        arguments=(str(seed), *(str(word) for setting in settings.items() for word in setting)),
        world_size=2,
        environment={"ZBMD_FAULT": "rank1:step.reduce:2"},
        preload=(job.__name__,),
    )
    ended = await Host(config, observer=keep).run()
    assert ended.exit_code == 0, ended.reason
    assert digests == [wanted.weights_sha256]
