"""Models cut over real processes train as one process does, and data parallelism changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from programs.mesh_ranks import Case
from support.jobs.mesh_cases import Result, on_ranks
from support.jobs.small_jobs import SmallJobs

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT, parameter_shapes
from zbmd.training.model.tensor_parallel import TensorShards
from zbmd.training.optim import MuonConfig
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.optim.mixed_precision import Precision, Storage
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import AccumulationPlan
from zbmd.transport.errors import UserError

STEPS = 20
OURS = GPTConfig(context=8, width=16, heads=4, layers=1)
GPT2 = GPTConfig(family="gpt2", activation="gelu", vocabulary=259, context=8, width=16, heads=4, layers=1)
TRAINING = TrainingConfig(steps=STEPS, shards=2, sequences_per_shard=2, learning_rate=3e-4, warmup_steps=5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(str(write_text(directory / "text")), directory, context=OURS.context)


def alone(case: Case) -> Result:
    """The same in one plain process, with nothing of the mesh."""
    recipe = Recipe(GPT(case.model), Corpus(Path(case.corpus), context=case.model.context), case.training)
    weights = recipe.model.init(case.training.seed).astype(case.dtype)
    state, spare = (AdamWState(*(np.zeros_like(weights) for _ in range(3))) for _ in range(2))
    state.weights[:] = weights
    plan, losses = AccumulationPlan.of(case.training.shards, 0, case.training.shards), list[float]()
    buffers = [np.zeros_like(weights) for _ in range(plan.buffers)]
    for step in range(case.training.steps):
        ids, loss = recipe.sample_ids(step), 0.0
        for leaf in plan.leaves:
            loss += recipe.shard_gradient(state.weights, buffers[leaf.buffer], ids[leaf.shard], step=step)
            plan.perform(leaf.additions, buffers, slice(0, len(weights)))
        recipe.update(state, spare, buffers[next(iter(plan.partials.values()))], step=step)
        state, spare = spare, state
        losses.append(loss)
    losses.append(recipe.held_out_loss(state.weights, windows_max=20))
    return state.weights, losses


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def cases_of(corpus: Path, ranks: int) -> list[Case]:
    """Both families, each in one precision; in the other one with the other number of ranks.

    Dropout is the same however the model is cut, and 4 ranks have halves of samples.
    """
    thinned = replace(GPT2, dropout=0.1)
    kinds: list[tuple[GPTConfig, Precision]] = [(OURS, "float32"), (thinned, "float64")]
    if ranks != 2:
        kinds = [(GPT2, "float32"), (replace(OURS, dropout=0.1), "float64")]
    return [
        Case(
            name=model.family,
            mesh=f"tp={ranks}",
            model=model,
            training=TRAINING,
            corpus=str(corpus),
            dtype=dtype,
            recompute=model.family == "gpt2",
        )
        for model, dtype in kinds
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_that_is_cut_trains_as_a_whole_one(
    small_jobs: SmallJobs, ranks: int, corpus: Path, tmp_path: Path
) -> None:
    cases = cases_of(corpus, ranks)
    found = on_ranks(small_jobs, tmp_path, ranks, *cases)
    for case in cases:
        wanted = alone(case)
        limit = {"float32": 1e-6, "float64": 1e-12}[case.dtype]
        off = distance(found[case.name][0], wanted[0])
        assert 0 < off <= limit, (case.name, off)
        np.testing.assert_allclose(found[case.name][1], wanted[1], rtol=10 * limit)


def test_muon_takes_whole_matrices_of_what_is_cut(
    small_jobs: SmallJobs, corpus: Path, tmp_path: Path
) -> None:
    """Neither stages nor replicas change a bit, and tp no more than the order of its sums."""
    few = replace(TRAINING, steps=8, optimizer=MuonConfig())
    limits: dict[Precision, float] = {"float32": 1e-6, "float64": 1e-12}
    for dtype, limit in limits.items():
        cube, plane = (
            Case(
                name=mesh,
                mesh=mesh,
                model=replace(OURS, layers=2),
                training=few,
                corpus=str(corpus),
                dtype=dtype,
            )
            for mesh in ("dp=2,pp=2,tp=2", "tp=2")
        )
        weights, losses = on_ranks(small_jobs, tmp_path, 8, cube)[cube.name]
        wanted = on_ranks(small_jobs, tmp_path, 2, plane)[plane.name]
        assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1]), dtype
        off = distance(weights, alone(plane)[0])
        assert 0 < off <= limit, dtype


def test_data_parallelism_changes_no_bit(small_jobs: SmallJobs, corpus: Path, tmp_path: Path) -> None:
    few = replace(TRAINING, steps=4, shards=5)
    made = [
        Case(
            name=f"{mesh}-{overlap}", mesh=mesh, model=OURS, training=few, corpus=str(corpus), overlap=overlap
        )
        for mesh in ("dp=4", "dp=2,tp=2")
        for overlap in (True, False)
    ]
    found = on_ranks(small_jobs, tmp_path, 4, *made)
    wanted = alone(made[0])
    for overlap in (True, False):
        weights, losses = found[f"dp=4-{overlap}"]
        assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1])
    cut = Case(name="tp=2", mesh="tp=2", model=OURS, training=few, corpus=str(corpus))
    one_replica = on_ranks(small_jobs, tmp_path, 2, cut)["tp=2"]
    for overlap in (True, False):
        weights, losses = found[f"dp=2,tp=2-{overlap}"]
        assert (weights.tobytes(), losses) == (one_replica[0].tobytes(), one_replica[1])
    assert distance(one_replica[0], wanted[0]) <= 1e-6


def test_stages_change_no_bit_along_dp_and_tp(small_jobs: SmallJobs, corpus: Path, tmp_path: Path) -> None:
    """2 x 2 x 2 processes: the bits of tp=2 alone, and those of one process but for the sums of tp."""
    kinds: tuple[tuple[Precision, float], ...] = (("float32", 1e-6), ("bfloat16", 1e-3))
    for dtype, limit in kinds:
        case = Case(
            name="cube",
            mesh="dp=2,pp=2,tp=2",
            model=replace(OURS, layers=2, dropout=0.1 if dtype == "float32" else 0.0),
            training=replace(TRAINING, steps=10, shards=3),
            corpus=str(corpus),
            dtype=dtype,
            schedule="1f1b" if dtype == "float32" else "zb-h1",
        )
        weights, losses = on_ranks(small_jobs, tmp_path, 8, case)["cube"]
        plane = msgspec.structs.replace(case, name="plane", mesh="tp=2", schedule="1f1b")
        wanted = on_ranks(small_jobs, tmp_path, 2, plane)["plane"]
        assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1]), dtype
        whole = alone(case) if dtype == "float32" else alone_narrow(case, "bfloat16")
        assert 0 < distance(weights, whole[0]) <= limit, dtype
        np.testing.assert_allclose(losses, whole[1], rtol=10 * limit)


def alone_narrow(case: Case, storage: Storage) -> Result:
    """The same with weights and gradients of 16 bits in one plain process; float16 skips attempts."""
    recipe = Recipe(GPT(case.model), Corpus(Path(case.corpus), context=case.model.context), case.training)
    plain = PlainTrainer(recipe, storage=storage, loss_scale=case.loss_scale)
    losses = [plain.run_step().loss for _ in range(case.training.steps)]
    assert (plain.loss_scale.skipped > 0) == (storage == "float16")
    return plain.state.weights, [*losses, recipe.held_out_loss(plain.state.weights, windows_max=20)]


def test_16_bits_have_the_bits_of_one_process_along_dp_and_pp(
    small_jobs: SmallJobs, corpus: Path, tmp_path: Path
) -> None:
    """And along tp they are as near as the dtype: within 2 % of the way that the weights have gone."""
    few = replace(TRAINING, steps=10, shards=5)
    worlds: tuple[tuple[tuple[str, Storage], ...], ...] = (
        (("dp=2,pp=2", "float16"), ("dp=4", "bfloat16")),
        (("dp=2,pp=2", "bfloat16"), ("dp=2,tp=2", "float16")),
    )
    for kinds in worlds:
        cases = [
            Case(
                name=f"{mesh}-{dtype}",
                mesh=mesh,
                model=replace(OURS, layers=2),
                training=few,
                corpus=str(corpus),
                dtype=dtype,
                loss_scale=2.0**24,
            )
            for mesh, dtype in kinds
        ]
        found = on_ranks(small_jobs, tmp_path, 4, *cases)
        for (mesh, dtype), case in zip(kinds, cases, strict=True):
            wanted, (weights, losses) = alone_narrow(case, dtype), found[case.name]
            if "tp" not in mesh:
                assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1]), case.name
                continue
            way = wanted[0] - GPT(case.model).init(few.seed)
            assert 0 < np.linalg.norm(weights - wanted[0]) <= 0.02 * np.linalg.norm(way)
            np.testing.assert_allclose(losses, wanted[1], rtol=2e-3)


def test_stages_and_data_parallelism_have_the_bits_of_one_process(
    small_jobs: SmallJobs, corpus: Path, tmp_path: Path
) -> None:
    """Shards move between the pipelines meanwhile, as `--on-straggler rebalance` has it."""
    case = Case(
        name="chunks",
        mesh="pp=2,dp=2",
        model=replace(OURS, layers=4, dropout=0.1),
        training=replace(TRAINING, steps=4, shards=5),
        corpus=str(corpus),
        chunks=2,
        recompute=True,
        moves={1: (1, 4), 3: (4, 1)},
    )
    weights, losses = on_ranks(small_jobs, tmp_path, 4, case)["chunks"]
    wanted = alone(case)
    assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1])


@pytest.mark.parametrize(
    ("mesh", "rank", "poison", "said"),
    [
        ("dp=3", 1, "weight", r"the weights of blocks\.0\.mlp\.out\.weight: NaN \(1 of 1,024"),
        ("pp=2,tp=2", 1, "forward", r"the forward pass of blocks\.0: NaN"),
        ("pp=2,tp=2", 3, "backward", r"the backward pass of blocks\.1: NaN"),
    ],
)
def test_what_diverges_is_named_by_layer_rank_and_step(
    small_jobs: SmallJobs,
    mesh: str,
    rank: int,
    poison: Literal["weight", "forward", "backward"],
    said: str,
    corpus: Path,
    tmp_path: Path,
) -> None:
    """Along pp and tp all ranks have NaNs by the end, and lower ones than the one where it began."""
    ranks = 3 if mesh == "dp=3" else 4
    case = Case(
        name="poisoned",
        mesh=mesh,
        model=replace(OURS, layers=2),
        training=replace(TRAINING, shards=3),
        corpus=str(corpus),
        dtype="bfloat16" if ranks == 3 else "float32",
        poisoned=rank,
        poison=poison,
    )
    with pytest.raises(UserError, match=rf"step 0: .* It began on rank {rank}, in {said}"):
        on_ranks(small_jobs, tmp_path, ranks, case)


@pytest.mark.parametrize("config", [OURS, GPT2])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_is_cut_is_joined_again(config: GPTConfig, parts: int) -> None:
    shards = TensorShards(config, parts)
    flat = np.zeros(shards.whole.size)
    for index, view in enumerate(shards.whole.views(flat)):
        view[...] = 1e6 * index + np.arange(view.size).reshape(view.shape)
    held = [shards.cut(flat, part) for part in range(parts)]
    assert shards.joined(held).tobytes() == flat.tobytes()
    width, own = config.width, shards.layout(parts - 1).views(held[-1])
    qkv = list(parameter_shapes(config)).index("blocks.0.attn.qkv.weight")
    whole = shards.whole.views(flat)[qkv].reshape(width, 3, parts, width // parts)
    assert np.array_equal(own[qkv].reshape(width, 3, width // parts), whole[:, :, -1])


@pytest.mark.parametrize(
    ("config", "parts", "said"),
    [
        (OURS, 3, "4 heads cannot be divided over 3"),
        (replace(OURS, context=9), 2, "9 positions cannot be divided over 2"),
        (replace(OURS, vocabulary=1), 2, "1 tokens cannot be divided over 2 ranks"),
    ],
)
def test_models_that_cannot_be_cut_are_explained(config: GPTConfig, parts: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        TensorShards(config, parts)
