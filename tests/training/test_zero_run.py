"""ZeRO in real processes: every stage ends with the bits of one process alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from kept_lines import Lines

from zbmd.actors.host import Host, HostConfig
from zbmd.actors.runtime_env import LINKS_VARIABLE
from zbmd.tools.small_job import write_text
from zbmd.training import __main__ as training
from zbmd.training.job import open_recipe, run_plain
from zbmd.training.plain import PlainTrainer

STEPS = 50
SHAPE = ("--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--sequences-per-shard", "1")

EVERY_STAGE = """
import asyncio, hashlib, os, sys
import zbmd
from zbmd.training.__main__ import options_of, parser
from zbmd.training.job import open_recipe
from zbmd.training.zero.trainer import ZeroOptions, ZeroTrainer, arena_bytes_needed


OPTIONS = [ZeroOptions(stage=stage, prefetch=stage) for stage in (1, 2, 3)]

def train(node, group, recipe):
    for zero in OPTIONS:
        trainer = ZeroTrainer(node, group, recipe, zero)
        for _ in range(recipe.config.steps):
            done = trainer.run_step()
        digest = hashlib.sha256(trainer.weights().data).hexdigest()
        if node.rank == 0:
            print(f"stage {zero.stage}: {done.loss!r} {done.grad_norm!r} {digest}")
    group.blocking.barrier()

async def main():
    recipe = open_recipe(options_of(parser().parse_args(sys.argv[1:])), prepare=False)
    ranks = int(os.environ["WORLD_SIZE"])
    sizes = [arena_bytes_needed(recipe.model, recipe.config, zero, ranks=ranks) for zero in OPTIONS]
    async with zbmd.join(arena=sum(sizes)) as node:
        group = await zbmd.group(node)
        await asyncio.to_thread(train, node, group, recipe)
        await group.close()

zbmd.run(main())
"""


@pytest.mark.parametrize(("ranks", "links"), [(2, "tcp"), (4, "auto")])
async def test_every_stage_has_the_bits_of_one_process(ranks: int, links: str, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    arguments = (*SHAPE, "--steps", str(STEPS), "--shards", "8", "--data", str(data), "--out", str(tmp_path))
    recipe = open_recipe(training.options_of(training.parser().parse_args(arguments)))
    plain = PlainTrainer(recipe)
    steps = [plain.run_step() for _ in range(STEPS)]
    digest = hashlib.sha256(plain.state.weights.data).hexdigest()
    wanted = f"{steps[-1].loss!r} {steps[-1].grad_norm!r} {digest}"

    script, output = tmp_path / "job.py", Lines()
    script.write_text(EVERY_STAGE)
    config = HostConfig(
        target=str(script),
        arguments=arguments,
        world_size=ranks,
        environment={LINKS_VARIABLE: links},
        preload=("zbmd.training.zero.job",),
    )
    ended = await Host(config, output=output).run()
    told = "\n".join(output.lines)
    assert ended.exit_code == 0, told
    for stage in (1, 2, 3):
        assert f"0: stage {stage}: {wanted}" in output.lines, told


def test_the_job_alone_has_the_bits_of_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_text(tmp_path / "text")
    arguments = [*SHAPE, "--steps", "4", "--shards", "3", "--data", str(data)]
    plain = run_plain(training.options_of(training.parser().parse_args([*arguments, "--out", str(tmp_path)])))
    out = tmp_path / "zero"
    assert training.main([*arguments, "--out", str(out), "--zero", "2"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert (found["weights_sha256"], found["loss_last"]) == (plain.weights_sha256, plain.loss_last)
    assert (out / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--zero", "4"), "invalid choice"), (("--zero", "3", "--resume", "x"), "leave out --resume")],
)
def test_bad_input_is_told_in_words(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.main(["--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
