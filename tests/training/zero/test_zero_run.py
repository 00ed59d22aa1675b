"""ZeRO in real processes: every stage ends with the bits of one process alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.by_words import plain_by, recipe_by
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.rank.environment import LINKS_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.train.command import recipe_of
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.model.weights import load_weights
from zbmd.training.optim import MuonConfig, hidden_matrices
from zbmd.training.optim.mixed_precision import Storage
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.run import prepare, train
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.layout import shards_of
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

STEPS = 20
LAYERS = range(4)
SHAPE = ("--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--sequences-per-shard", "1")


async def test_what_does_not_come_again_is_told_with_what_is_known_of_it(tmp_path: Path) -> None:
    """The weights that rank 1 computes with err in one attempt at one step."""
    data = write_text(tmp_path / "text")
    arguments = (*SHAPE, "--steps", "3", "--shards", "8", "--data", str(data), "--out", str(tmp_path))
    recipe_by(arguments)
    script, output = PROGRAMS / "training/zero_errs_once.py", Lines()
    preload = ("zbmd.training.sharded.zero_trainer",)
    config = HostConfig(target=str(script), arguments=arguments, world_size=2, preload=preload)
    ended = await Host(config, output=output).run()
    assert ended.exit_code == 0, output.lines
    first = "The first time the losses that rank 1 computed were not finite, of logical shard [4-7]"
    said = re.compile(rf"told step 1: .* did not come again .* {first}")
    assert sum(said.search(line) is not None for line in output.lines) == 2, output.lines


def alone(recipe: Recipe, storage: Storage, steps: int) -> str:
    """The last lines of one plain process."""
    plain = PlainTrainer(recipe, storage=storage, loss_scale=2.0**24)
    done = [plain.run_step() for _ in range(steps)][-1]
    digest, skipped = hashlib.sha256(plain.state.weights.data).hexdigest(), plain.loss_scale.skipped
    assert (skipped > 0) == (storage == "float16")
    return f"{done.loss!r} {done.grad_norm!r} {skipped} {digest}"


@pytest.mark.parametrize(
    ("ranks", "links", "optimizer"), [(2, "tcp", "adamw"), (4, "auto", "adamw"), (5, "auto", "muon")]
)
async def test_every_stage_has_the_bits_of_one_process(
    ranks: int, links: str, optimizer: str, tmp_path: Path
) -> None:
    """Muon's as well, which gathers the matrices that the shards cut."""
    data = write_text(tmp_path / "text")
    arguments = (*SHAPE, "--steps", str(STEPS), "--shards", "8", "--data", str(data), "--out", str(tmp_path))
    recipe = recipe_by(arguments)
    if optimizer == "muon":
        recipe = Recipe(recipe.model, recipe.corpus, replace(recipe.config, optimizer=MuonConfig()))
        cut = [
            unit.cut_of(slot, 0)
            for unit in shards_of(OwnParts(recipe.model, (LAYERS,), stages=1, stage=0), ranks).units
            for slot in hidden_matrices(recipe.model.layout)
        ]
        assert any(one is not None and 0 < one.stop < one.each for one in cut), "no matrix is cut"
    wanted = {"float32": alone(recipe, "float32", STEPS)}
    if ranks > 2:
        wanted |= {storage: alone(recipe, storage, 6) for storage in ("bfloat16", "float16")}

    script, output = PROGRAMS / "training/zero_stages.py", Lines()
    config = HostConfig(
        target=str(script),
        arguments=arguments,
        world_size=ranks,
        environment={LINKS_VARIABLE: links, "OPTIMIZER": optimizer},
        preload=("zbmd.training.sharded.zero_trainer",),
    )
    ended = await Host(config, output=output).run()
    told = "\n".join(output.lines)
    assert ended.exit_code == 0, told
    named = re.compile(
        r"told step 0: .* It began on rank 1, in the weights of blocks\.0\.[a-z.]+: NaN \(1 of "
    )
    assert sum(named.search(line) is not None for line in output.lines) == ranks, told
    moved = [line for line in output.lines if "moved: " in line]
    assert moved and all("moved: True" in line for line in moved), told
    for storage, line in wanted.items():
        for stage in (1, 2, 3):
            assert f"0: {storage} stage {stage}: {line}" in output.lines, (line, told)


def test_shards_that_can_move_nowhere_are_refused_before_a_step(tmp_path: Path) -> None:
    words = (*SHAPE, "--shards", "8", "--out", str(tmp_path), "--on-straggler", "rebalance")
    prepare(recipe_of([*words, "--mesh", "dp=2,pp=2"], ranks=4), 4)
    for mesh in ("pp=4", "pp=2,tp=2"):
        with pytest.raises(UserError, match="has one place there: give dp or fsdp, or"):
            prepare(recipe_of([*words, "--mesh", mesh], ranks=4), 4)


async def test_the_job_alone_has_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    data, out = write_text(tmp_path / "text"), tmp_path / "zero"
    arguments = [*SHAPE, "--steps", "4", "--shards", "3", "--data", str(data), "--evaluate-windows", "512"]
    plain = plain_by([*arguments, "--out", str(tmp_path)])
    given = (*arguments, "--out", str(out), "--zero", "2")
    done = await train(recipe_of(given))
    assert done is not None
    assert (done.weights_sha256, done.loss_last) == (plain.weights_sha256, plain.loss_last)
    assert done.held_out_loss == plain.held_out_loss
    assert (out / "weights.safetensors").exists()
    audited = audit_run(out)
    assert (audited.steps, audited.steps_lost, audited.samples_skipped) == (4, 0, 0)


async def test_a_run_goes_on_from_its_checkpoint_further_with_other_ranks(tmp_path: Path) -> None:
    """Killed while the second checkpoint is written; then another stage on two ranks, from the first."""
    data, storage = write_text(tmp_path / "text"), "bfloat16"
    shared = (*SHAPE, "--shards", "4", "--data", str(data), "--precision", storage, "--curve", "constant")
    whole = [*shared, "--steps", "6", "--out", str(tmp_path / "plain")]
    wanted = plain_by(whole)

    async def run(ranks: int, fault: str, out: Path, *more: str) -> tuple[int, Lines]:
        output, fixed = Lines(), ("--shards", "4", "--curve", "constant", "--precision", storage)
        shared = (*SHAPE, *fixed, "--data", str(data), "--out", str(out), "--checkpoint-every", "2")
        options = recipe_of((*shared, *more), ranks=ranks)
        config = HostConfig(
            target="zbmd.training.sharded",
            is_module=True,
            arguments=(options.encode(),),
            world_size=ranks,
            on_loss=OnLoss.STOP,
            environment={faults.FAULT_VARIABLE: fault},
            preload=("zbmd.training.sharded.run",),
        )
        return (await Host(config, output=output).run()).exit_code, output

    killed, out = tmp_path / "killed", tmp_path / "again"
    exit_code, output = await run(3, "rank2:shards.written:2", killed, "--zero", "3", "--steps", "5")
    names = read_names(killed / SHARDS_NAME)
    assert exit_code != 0 and (names.version, len(names.files)) == (2, 3), output.lines
    exit_code, output = await run(2, "", out, "--zero", "1", "--resume", str(killed), "--steps", "6")
    assert exit_code == 0, "\n".join(output.lines)
    digest = hashlib.sha256(load_weights(out / "weights.safetensors")[0].data).hexdigest()
    assert digest == wanted.weights_sha256
    assert read_names(out / SHARDS_NAME).version == 6
