"""A model's actors: the same bits as the plain run, whatever fails, and state that outlives who holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import flaky_job
from support.devices.flaky_operators import Flaky
from support.jobs.small_jobs import SmallJobs

from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.actors.supervision.supervisor import Children, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.supervised_recipe import SupervisedRecipe
from zbmd.tools.train.command import recipe_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Tensor
from zbmd.training.model.gpt import GPT, Operators
from zbmd.training.model_actors.actors import (
    Activations,
    ArrayData,
    Forward,
    LayerActor,
    pack,
    read_tensor,
    unpack,
)
from zbmd.training.model_actors.slot import RestartsExhausted
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.scenarios.training import plain_job
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import PeerLost, RemoteProtocolError, UserError

TEXT = " ".join(str(n) for n in range(2000))
SHAPE = (
    *("--context", "12", "--width", "16", "--heads", "2", "--layers", "2", "--shards", "3"),
    *("--sequences-per-shard", "1", "--warmup", "2", "--steps", "6", "--evaluate-every", "2"),
)


@pytest.fixture
def recipe() -> Recipe:
    """A small one of its own, since tests change its operators."""
    made = plain_job(2, 5).recipe
    return Recipe(GPT(made.model.config), made.corpus, made.config)


def made_of(recipe: Recipe) -> SupervisedRecipe:
    return SupervisedRecipe(recipe, recipe.model.init(recipe.config.seed))


def gradient(recipe: Recipe, weights: Array) -> tuple[float, bytes, list[int]]:
    grads: Array = np.full(recipe.model.layout.size, np.nan, np.float32)
    for slot in recipe.model.layout.slots:
        grads[slot.offset + slot.size : slot.offset + -(-slot.size // 16) * 16] = 0.0
    order: list[int] = []
    ids = recipe.sample_ids(0)[0]
    loss = recipe.shard_gradient(weights, grads, ids, step=0, on_grad_ready=order.append)
    return loss, grads.tobytes(), order


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, False), (0.2, False), (0.2, True)])
async def test_failures_forwards_and_backwards_leave_no_trace(
    system: ActorSystem, recipe: Recipe, seed: int, dropout: float, recompute: bool
) -> None:
    recipe.model = GPT(replace(recipe.model.config, dropout=dropout), recompute=recompute)
    weights = recipe.model.init(recipe.config.seed)
    plain = gradient(recipe, weights)
    flaky = Flaky(seed, share=0.03, failures_max=6)
    recipe.model.operators = flaky.around(recipe.model.operators)
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)
    for _ in range(4):
        found = await asyncio.to_thread(gradient, made, weights)
        assert found == plain, flaky.failed
    assert sum(slot.failures for slot in actors.slots) == len(flaky.failed)
    await actors.stop()


@pytest.mark.parametrize("name", [field.name for field in fields(Operators)])
@pytest.mark.parametrize("when", ["before", "backwards", "backwards, at the end"])
async def test_who_fails_is_who_ends(
    system: ActorSystem, recipe: Recipe, seed: int, name: str, when: str
) -> None:
    recipe.model = GPT(replace(recipe.model.config, dropout=0.2))
    weights, flaky = (
        recipe.model.init(recipe.config.seed),
        Flaky(seed, share=0.3, failures_max=1, only=f"{name}, {when}"),
    )
    recipe.model.operators = flaky.around(recipe.model.operators)
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)
    while not flaky.failed:
        await asyncio.to_thread(gradient, made, weights)
    assert {slot.name: slot.incarnations for slot in actors.slots if slot.incarnations > 1} == {
        f"model.{name}": 2
    }
    await actors.stop()


async def test_a_layer_that_fails_beside_its_operators_is_restarted(
    system: ActorSystem, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.model = GPT(recipe.model.config, recompute=True)
    weights = recipe.model.init(recipe.config.seed)
    plain = gradient(recipe, weights)
    made, left = made_of(recipe), [2, 1]
    actors = made.actors
    await actors.start(system)
    compute = LayerActor.compute

    def failing(self: LayerActor, *arguments: Any) -> Tensor:
        if self.number == 1 and left and left.pop():
            raise RuntimeError("half a block")
        return compute(self, *arguments)

    monkeypatch.setattr(LayerActor, "compute", failing)
    assert await asyncio.to_thread(gradient, made, weights) == plain
    lives = {slot.name: slot.incarnations for slot in actors.slots if slot.incarnations > 1}
    assert lives == {"model.blocks.0": 3}
    await actors.stop()


async def test_an_operator_that_never_works_is_given_up(system: ActorSystem, recipe: Recipe) -> None:
    weights, flaky = recipe.model.init(recipe.config.seed), Flaky(0, share=1.0, failures_max=1000)
    recipe.model.operators = flaky.around(recipe.model.operators)
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)
    with pytest.raises(
        RestartsExhausted, match="model was interrupted 8 times in a row; the last: Broken: embedding"
    ):
        await asyncio.to_thread(gradient, made, weights)
    await actors.stop()


async def test_any_actor_may_be_killed_while_it_works(system: ActorSystem, recipe: Recipe, seed: int) -> None:
    weights = recipe.model.init(recipe.config.seed)
    plain = gradient(recipe, weights)
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        working = asyncio.create_task(asyncio.to_thread(gradient, made, weights))
        slot = actors.slots[rng.integers(len(actors.slots))]
        for _ in range(int(rng.integers(20))):
            await asyncio.sleep(0)
        if slot.actor is not None:
            system.exit(slot.actor.ref, Reason(ReasonKind.KILLED, "a test"))
        assert await working == plain
    await actors.stop()


async def test_what_the_hook_raises_is_the_callers(system: ActorSystem, recipe: Recipe) -> None:
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)

    def hook(_: int) -> None:
        raise InterruptedError("the epoch is over")

    def run() -> None:
        weights = made.weights.weights
        ids = made.sample_ids(0)[0]
        made.shard_gradient(weights, np.zeros_like(weights), ids, step=0, on_grad_ready=hook)

    with pytest.raises(InterruptedError):
        await asyncio.to_thread(run)
    assert all(slot.failures == 0 for slot in actors.slots)
    await actors.stop()


async def test_an_update_that_fails_half_way_is_computed_again(
    system: ActorSystem, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, wanted, left = recipe.model.layout.size, PlainTrainer(recipe), [1]
    wanted.run_step()
    made = made_of(recipe)
    await made.actors.start(system)
    trainer, apply = PlainTrainer(made), Recipe.apply

    def failing(self: Recipe, old: AdamWState, new: AdamWState, *arguments: Any, **options: Any) -> None:
        apply(self, old, new, *arguments, **options)
        if left:
            left.pop()
            new.weights[: size // 2] = np.nan
            raise RuntimeError("half an update")

    monkeypatch.setattr(Recipe, "apply", failing)
    await asyncio.to_thread(trainer.run_step)
    assert trainer.state.weights.tobytes() == wanted.state.weights.tobytes()
    assert (made.actors.optimizer.failures, made.actors.optimizer.incarnations) == (1, 2)
    await made.actors.stop()


async def test_what_ends_the_step_is_no_failure_of_the_optimizer(system: ActorSystem, recipe: Recipe) -> None:
    made = made_of(recipe)
    await made.actors.start(system)

    def diverged() -> None:
        raise TrainingDiverged("not finite")

    def lost() -> None:
        raise PeerLost(1, "gone")

    for work, error in ((diverged, TrainingDiverged), (lost, PeerLost)):
        with pytest.raises(error):
            await asyncio.to_thread(made.actors.update, work)
    assert made.actors.optimizer.failures == 0
    await made.actors.stop()


async def test_state_outlives_the_actor_that_holds_it(system: ActorSystem, recipe: Recipe) -> None:
    made = made_of(recipe)
    actors = made.actors
    await actors.start(system)
    made.weights.weights[:], made.weights.step = 0.5, 7
    first = actors.tensors.actor
    assert first is not None
    system.exit(first.ref, Reason(ReasonKind.KILLED, "a test"))
    version, gain = await read_tensor(actors.tensors, "blocks.0.attn.norm.weight", timeout=60)
    assert actors.tensors.actor is not first
    assert version == 7 and gain.tolist() == [0.5] * recipe.model.config.width
    with pytest.raises(UserError, match="unknown parameter 'nobody'"):
        await read_tensor(actors.tensors, "nobody", timeout=60)
    root = actors.root
    assert root is not None
    told = await root.ask(WhichChildren(), reply=Children, timeout=60)
    assert [name for name, _, _ in told.children] == [
        "model.tensors",
        "model.optimizer",
        "model.operators",
        "model.layers",
    ]
    await actors.stop()


async def test_layers_answer_messages_with_the_committed_weights(system: ActorSystem, recipe: Recipe) -> None:
    rng, made = np.random.default_rng(1), made_of(recipe)
    weights, actors = made.weights.weights, made.actors
    weights += rng.standard_normal(len(weights), np.float32)
    wanted = recipe.model.logits(weights, tokens := rng.integers(0, 256, (3, 4)))
    await actors.start(system)
    x, layers = tokens.reshape(-1), actors.layer_slots.values()
    for slot in layers:
        found = await slot.ask(Forward(pack(x), 3), reply=Activations, timeout=60)
        assert found.y is not None, found.problem
        x = unpack(found.y)
    assert x.tobytes() == wanted.tobytes()
    wrong = await actors.layer_slots["head"].ask(Forward(pack(tokens)), reply=Activations, timeout=60)
    assert wrong.y is None and "head: unexpected int64 of shape" in wrong.problem
    high = await actors.layer_slots["embed"].ask(
        Forward(pack(np.array([256]))), reply=Activations, timeout=60
    )
    assert "expected tokens from 0 to 255" in high.problem
    await actors.stop()


def test_arrays_of_a_message_are_checked() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert unpack(pack(array.T)).tolist() == array.T.tolist()
    for wrong in (ArrayData("object", [1], b"12345678"), ArrayData("float32", [3], b"1234")):
        with pytest.raises(RemoteProtocolError):
            unpack(wrong)


CASES = {
    "dp=1": (),
    "dp=2": ("--mesh", "dp=2"),
    "pp=2": ("--mesh", "pp=2", "--schedule", "zb-h1"),
    "tp=2": ("--mesh", "tp=2", "--recompute", "on"),
    "zero 3": ("--zero", "3"),
    "tp=2, muon": ("--mesh", "tp=2", "--optimizer", "muon"),
    "zero 1, muon": ("--zero", "1", "--optimizer", "muon"),
    "zero 2, tp": ("--mesh", "dp=2,tp=2", "--zero", "2", "--optimizer", "muon"),
    "zero 3, pp": ("--mesh", "dp=2,pp=2", "--zero", "3", "--schedule", "zb-h1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_whose_actors_fail_and_that_are_killed(
    small_jobs: SmallJobs, tmp_path: Path, seed: int, case: str
) -> None:
    (tmp_path / "text").write_text(TEXT)

    def run(name: str, words: Sequence[str], fault: str = "") -> tuple[str, int]:
        recipe = recipe_of(
            [*SHAPE, *words, "--data", str(tmp_path / "text"), "--out", str(tmp_path / name)], ranks=ranks
        )
        flaky = "" if not name.startswith("flaky") else str(seed)
        program = flaky_job.__file__
        ended = small_jobs.program(program, flaky, recipe.encode(), ranks=ranks, ZBMD_FAULT=fault)
        assert ended.digest, ended.told
        return ended.digest, ended.told.count("actor failed in a direct call")

    ranks = 2 ** " ".join(CASES[case]).count("p=2") if "--mesh" in CASES[case] else 2
    ranks = 1 if case == "dp=1" else ranks
    wanted, _ = run("plain", CASES[case])
    fault = "rank1:job.begin:3" if ranks > 1 else ""
    found, failures = run("flaky", (*CASES[case], "--actors", "on"), fault)
    assert found == wanted
    assert failures >= 4
