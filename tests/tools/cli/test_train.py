"""`zbmd train`: recipes from all sources, real runs on a mesh, also after a kill, and bad input in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from programs import PROGRAMS
from support.processes.launcher import Launcher
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.entry import zbmd as cli
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.train.command import RECIPE_NAME, SETTINGS, merged, options_of, recipe_of
from zbmd.training.checkpoint.index import KEEP_DEFAULT, Retention
from zbmd.training.checkpoint.sharded import checkpoint_in, read_names
from zbmd.training.job.overwrite import CLAIM_NAME, claimed
from zbmd.training.job.records import METRICS_NAME, TENSORBOARD_NAME
from zbmd.training.model.gpt import GPT
from zbmd.training.model.hugging_face import load_gpt2
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.training.run.ledger import LOG_NAME, read_header, read_log
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.task import HUGGING_FACE_DIRECTORY, TrainResult
from zbmd.transport import kill_points as faults

SMALL = {
    "context": "8",
    "width": "16",
    "heads": "2",
    "layers": "1",
    "shards": "3",
    "sequences_per_shard": "2",
    "steps": "6",
    "warmup": "2",
    "checkpoint_every": "2",
    "evaluate_every": "3",
    "evaluate_windows": "4",
}


def recipe(**changes: str) -> TrainOptions:
    found = merged({**SMALL, **changes}, {}, None)
    return options_of({name: value for name, (value, _) in found.items()})


async def run(
    options: TrainOptions, ranks: int, *, fault: str = "", on_loss: OnLoss = OnLoss.STOP
) -> tuple[int, list[str]]:
    lines: list[str] = []

    class Output:
        async def write_line(self, line: OutputLine) -> None:
            lines.append(line.text.decode(errors="replace"))

    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(options.encode(),),
        world_size=ranks,
        on_loss=on_loss,
        environment={faults.FAULT_VARIABLE: fault},
        preload=("zbmd.training.sharded.run",),
    )
    return (await Host(config, output=Output()).run()).exit_code, lines


def result(lines: Sequence[str]) -> TrainResult:
    text = next((line for line in lines if line.startswith("{")), "")
    assert text, "\n".join(lines)
    return msgspec.json.decode(text, type=TrainResult)


def audited(out: Path) -> tuple[int, int, int, int]:
    """What the commit log of a run proves: its steps, and how many were lost, and samples lost or
    repeated."""
    found = audit_run(out)
    return found.steps, found.steps_lost, found.samples_skipped, found.samples_repeated


async def test_a_run_that_lost_a_rank_goes_on_further_with_another_mesh(tmp_path: Path) -> None:
    data = str(write_text(tmp_path / "text"))
    scaled = {"precision": "f16", "loss_scale": "16777216"}  # at first gradients overflow
    scaled |= {"layers": "2", "optimizer": "lion"}  # of one moment
    _, lines = await run(recipe(data=data, out=str(tmp_path / "whole"), steps="8", **scaled), 1)
    wanted = result(lines)
    out = tmp_path / "killed"
    options = recipe(data=data, out=str(out), ranks="2", mesh="pp=2", horizon="8", **scaled)
    # Killed while the second checkpoint, of step 4, is written: the first one is the last that is durable.
    exit_code, lines = await run(options, 2, fault="rank1:shards.written:2")
    found_at = checkpoint_in(out)
    assert exit_code != 0 and found_at is not None, lines
    assert (read_names(found_at).version, len(read_names(found_at).files)) == (2, 2)
    options = recipe(data=data, out=str(out), resume=str(out), ranks="2", mesh="dp=2", steps="8", **scaled)
    _, lines = await run(options, 2)
    left, named = [path.name for path in out.glob("checkpoint*")], read_names(found_at)
    assert named.version == 8 and not Retention().removed(left, named)
    found = result(lines)
    assert (found.weights_sha256, found.steps) == (wanted.weights_sha256, 8)
    assert found.held_out_loss == wanted.held_out_loss
    records = [msgspec.json.decode(line) for line in (out / METRICS_NAME).read_bytes().splitlines()]
    assert [one["step"] for one in records if "loss" in one][-6:] == [3, 4, 5, 6, 7, 8]
    assert audited(out) == (8, 0, 0, 0)
    last = [one for one in records if "loss" in one][-1]
    assert last["skipped"] > 0 and last["loss_scale"] == 2.0 ** (24 - last["skipped"])


async def test_all_ranks_are_killed_once_their_beginning_is_written_over(tmp_path: Path) -> None:
    """Their files say where the run began: its checkpoint is by then that of a later step."""
    data, out = str(write_text(tmp_path / "text")), str(tmp_path / "run")
    shared = {"data": data, "curve": "constant", "checkpoint_every": "1"}
    _, lines = await run(recipe(out=str(tmp_path / "whole"), **shared), 1)
    wanted = result(lines).weights_sha256
    await run(recipe(out=out, steps="2", **shared), 1)
    offloaded = {"resume": out, "offload": str(tmp_path / "files"), "ranks": "2", "mesh": "dp=2"}
    fault = "rank0:job.begin:3+rank1:job.begin:3"  # of step 5, when the checkpoint is that of step 4
    options = recipe(out=out, **shared, **offloaded)
    exit_code, lines = await run(options, 2, fault=fault, on_loss=OnLoss.REPLACE)
    assert exit_code == 0, lines
    found = result(lines)
    assert (found.weights_sha256, found.steps) == (wanted, 6), lines
    records = [msgspec.json.decode(line) for line in (Path(out) / METRICS_NAME).read_bytes().splitlines()]
    assert [one["step"] for one in records if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert audited(Path(out)) == (6, 0, 0, 0)


async def test_a_mesh_of_both_axes_trains_a_gpt2_on_byte_pairs(tmp_path: Path) -> None:
    data, out = str(write_text(tmp_path / "text")), tmp_path / "out"
    changes = {"family": "gpt2", "activation": "gelu", "tokens": "bpe", "vocabulary": "270"}
    options = recipe(data=data, out=str(out), ranks="4", mesh="dp=2,tp=2", tensorboard="on", **changes)
    _, lines = await run(options, 4)
    found = result(lines)
    weights, config, step = load_weights(out / WEIGHTS_NAME)
    assert (step, found.mesh) == (6, "dp=2,tp=2") and found.parameters == GPT(config).layout.parameter_count
    theirs, described = load_gpt2(out / HUGGING_FACE_DIRECTORY)
    assert theirs.tobytes() == weights.tobytes() and described == config
    (events,) = (out / TENSORBOARD_NAME).iterdir()
    assert audited(out) == (6, 0, 0, 0)
    tags = [value.tag for event in read_events(events) for value in event.summary.value]
    assert tags.count("loss") == 6 and tags.count("held_out_loss") == 3
    again = recipe(
        data=data,
        out=str(tmp_path / "more"),
        tokens="bpe",
        tokenizer=str(out / "tokenizer.json"),
        weights=str(out / HUGGING_FACE_DIRECTORY),
    )
    _, lines = await run(again, 1)
    assert result(lines).loss_last < found.loss_last


def read_events(path: Path) -> list[Any]:
    """TFRecords: length, its checksum, the event, its checksum."""
    data, found = path.read_bytes(), list[Any]()
    while data:
        length = int(np.frombuffer(data[:8], "<u8")[0])
        event = Event()
        event.ParseFromString(data[12 : 12 + length])
        found.append(event)
        data = data[16 + length :]
    return found


def test_recipes_come_from_line_environment_and_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'steps = 5\nwidth = 32\nlr = 1e-2\ntensorboard = "on"\noverlap = false\nevaluate-every = 7\n'
    )
    found = merged({"steps": "7"}, {"ZBMD_TRAIN_STEPS": "6", "ZBMD_TRAIN_WIDTH": "64"}, path)
    assert found["steps"] == (7, "--steps")
    assert found["width"] == (64, "ZBMD_TRAIN_WIDTH")
    assert found["lr"] == (0.01, str(path))
    assert found["tensorboard"] == (True, str(path)) and found["evaluate_every"][0] == 7
    assert found["overlap"] == (False, str(path))
    assert found["seed"] == (0, "default")
    assert {entry.name for entry in SETTINGS} == set(found)


def test_a_printed_recipe_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["train", "--data", "x", "--mesh", "dp=1,tp=1", "--recompute", "on", "--print-recipe"]) == 0
    )
    path = tmp_path / "recipe.toml"
    path.write_text(capsys.readouterr().out)
    wanted = merged({"data": "x", "mesh": "dp=1,tp=1", "recompute": "on"}, {}, None)
    assert {k: v for k, (v, _) in merged({}, {}, path).items()} == {k: v for k, (v, _) in wanted.items()}
    assert TrainOptions.decode(recipe(data="x").encode()) == recipe(data="x")


def test_a_run_has_a_directory_of_its_own_and_is_repeated_by_its_recipe(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under `zbmd-node run` its ranks are given; alone it starts them. Both end with the same weights."""
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    done = launcher.run("run", "-n", "2", "-m", "zbmd", "train", "--data", "text", "--out", "first", *small)
    assert done.code == 0, done
    first = launcher.directory / "first"
    assert audited(first) == (6, 0, 0, 0)
    assert cli.main(["train", str(first / RECIPE_NAME), "--print-recipe"]) == 0
    told = capsys.readouterr().out
    assert f'data = "{launcher.directory / "text"}"  # {first / RECIPE_NAME}' in told and "ranks = 2 " in told
    again = launcher.run("run", "-n", "2", "-m", "zbmd", "train", "first/recipe.toml", "--out", "first")
    assert again.code == 2 and "belongs to another run" in again.errors[-1], again
    again = launcher.run("run", "-n", "2", "-m", "zbmd", "train", "first/recipe.toml", "--out", "second")
    assert again.code == 0, again
    found = [result([line.partition(": ")[2] for line in one.out]) for one in (done, again)]
    assert found[0].weights_sha256 == found[1].weights_sha256
    bad = launcher.run("run", "-n", "3", "-m", "zbmd", "train", "--data", "text", "--mesh", "dp=2")
    assert bad.code == 2 and "a mesh of dp 2 has 2 ranks, and there are 3" in bad.errors[-1], bad


@pytest.mark.parametrize("options", [("--mesh", "dp=2"), ("--zero", "3")], ids=" ".join)
def test_a_run_that_is_asked_to_stop_saves_its_last_step_and_goes_on_later(
    launcher: Launcher, options: tuple[str, ...]
) -> None:
    """As before a spot instance ends. Nothing is lost, and what follows has the bits of one run."""
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    small += ["--data", "text", "--curve", "constant", "--checkpoint-every", "0", *options]
    run = ("run", "-n", "2", "-m", "zbmd", "train", *small)
    with launcher.start(*run, "--out", "a", "--steps", "100000") as running:
        running.until("^step 3 ")
        os.kill(running.pid, signal.SIGUSR1)  # saves, and goes on
        (first,) = running.until(r"step (\d+) saved: a/checkpoint.json")
        os.kill(running.pid, signal.SIGTERM)
        assert running.end() == 128 + signal.SIGTERM
    saved = list(re.finditer(r"step (\d+) saved: a/checkpoint.json", running.text))[-1]
    assert int(saved[1]) > int(first[1]) and running.text.endswith("[zbmd]: stopped: SIGTERM received\n"), (
        running.text
    )
    assert read_names(launcher.directory / "a/checkpoint.json").version == int(saved[1]) >= 3
    steps = str(int(saved[1]) + 2)
    further = launcher.run(*run, "--resume", "a", "--out", "a", "--steps", steps)
    whole = launcher.run(*run, "--out", "b", "--steps", steps)
    found = [result([line.partition(": ")[2] for line in one.out]) for one in (further, whole)]
    assert found[0].weights_sha256 == found[1].weights_sha256
    assert audited(launcher.directory / "a") == (int(steps), 0, 0, 0)


def test_a_rank_that_waits_for_a_view_ends_with_a_run_that_is_stopped(launcher: Launcher) -> None:
    """Rank 1 is lost, and one of its stage's neighbours has nothing to do."""
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    small += ["--data", "text", "--checkpoint-every", "0", "--steps", "100000", "--layers", "2"]
    run = ("run", "-n", "4", "--on-loss", "shrink", "-m", "zbmd", "train", *small, "--out", "run")
    run = (*run, "--mesh", "dp=2,pp=2")
    with launcher.start(*run, ZBMD_FAULT="rank1:job.begin:3") as running:
        running.until("^step 6 ")
        os.kill(running.pid, signal.SIGTERM)
        assert running.end() == 128 + signal.SIGTERM
    assert running.text.endswith("[zbmd]: stopped: SIGTERM received\n"), running.text


def test_a_run_that_was_killed_whole_and_is_resumed_notes_each_step_once(launcher: Launcher) -> None:
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    run = ("run", "-n", "2", "-m", "zbmd", "train", *small, "--data", "text", "--out", "run")
    run += ("--curve", "constant", "--checkpoint-every", "3")
    with launcher.start(*run, "--steps", "100000") as running:
        running.until("^step 8 ")
        running.until_holds((launcher.directory / "run/checkpoint.json").exists, "there is a checkpoint")
        os.kill(running.pid, signal.SIGKILL)
        running.end()
    metrics = launcher.directory / "run/metrics.jsonl"
    with metrics.open("ab") as torn:  # as on a disk that was full; the whole lines may end at the checkpoint
        torn.write(b'{"step":')
    steps = read_names(launcher.directory / "run/checkpoint.json").version + 20
    further = launcher.run(*run, "--resume", "run", "--steps", str(steps))
    assert further.code == 0, further
    noted = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [one["step"] for one in noted if "loss" in one] == list(range(1, steps + 1))


def test_a_run_is_overwritten_once_it_has_ended(launcher: Launcher) -> None:
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    train = ("-m", "zbmd", "train", *small, "--data", "text", "--out", "run", "--tensorboard", "on")
    run, out = ("run", "-n", "2", *train), launcher.directory / "run"
    with launcher.start(*run, "--steps", "100000", "--checkpoint-every", "3") as running:
        running.until("^step 8 ")
        refused = launcher.run(*run, "--overwrite", "on")
        assert refused.code == 2 and "a run is under way in run, so it is not over" in refused.errors[-1]
        running.until("^step 20 ")
        os.kill(running.pid, signal.SIGTERM)
        running.end()
    (out / "notes").write_text("of the user")
    again = launcher.run(*run)
    assert again.code == 2 and "continue that run with --resume, or remove its files" in again.errors[-1]
    done = launcher.run(*run, "--overwrite", "on", "--seed", "5")
    assert done.code == 0, done
    assert audited(out) == (6, 0, 0, 0)
    noted = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in noted if "loss" in one] == list(range(1, 7))
    assert (out / "notes").read_text() == "of the user" and "overwrite" not in (out / RECIPE_NAME).read_text()
    kept = KEEP_DEFAULT * (len(read_names(out / "checkpoint.json").files) + 1)  # and their indexes
    assert len(list(out.glob("checkpoint-*"))) == kept
    fresh = launcher.run(*run[:-4], "--out", "fresh", "--seed", "5")
    found = [result([line.partition(": ")[2] for line in one.out]) for one in (done, fresh)]
    assert found[0].weights_sha256 == found[1].weights_sha256


def test_a_run_without_checkpoints_says_that_it_saves_nothing(launcher: Launcher) -> None:
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    small += ["--data", "text", "--checkpoint-every", "0", "--precision", "float64", "--steps", "100000"]
    with launcher.start("run", "-n", "2", "-m", "zbmd", "train", *small, "--out", "run") as running:
        running.until("held_out_loss")
        os.kill(running.pid, signal.SIGTERM)
        assert running.end() == 128 + signal.SIGTERM
    assert re.search(r"step \d+ not saved: no checkpoints", running.text), running.text
    assert not list((launcher.directory / "run").glob("checkpoint*"))


def test_a_late_notice_of_a_replaced_rank_holds_nobody_up(launcher: Launcher) -> None:
    write_text(launcher.directory / "text")
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", value)]
    program = str(PROGRAMS / "training/late_notice.py")
    options = ("--on-loss", "replace", program, "train", "--data", "text", "--out", "run", *small)
    done = launcher.run("run", "-n", "2", *options, "--mesh", "tp=2", ZBMD_FAULT="rank1:job.begin:3")
    assert done.code == 0 and any("hears of it late" in line for line in done.out), done
    assert audited(launcher.directory / "run") == (6, 0, 0, 0)


def test_a_run_that_may_shrink_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    data, small = str(write_text(tmp_path / "text")), list[str]()
    for name, value in SMALL.items():
        small += [f"--{name.replace('_', '-')}", value]
    command = [sys.executable, "-m", "zbmd", "train", "--data", data, "--ranks", "3", *small]
    killed = {**os.environ, "ZBMD_FAULT": "rank0:job.begin:3"}
    for out, more, variables in (("a", [], os.environ), ("b", ["--on-loss", "shrink"], killed)):
        run = [*command, *more, "--out", str(tmp_path / out)]
        done = subprocess.run(run, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr
    found = [load_weights(tmp_path / out / WEIGHTS_NAME)[0].tobytes() for out in "ab"]
    assert found[0] == found[1] and audited(tmp_path / "b") == (6, 0, 0, 0)
    members = [record.members for record in read_log(tmp_path / "b" / LOG_NAME)[1]]
    assert members[0] == (0, 1, 2) and members[-1] == (1, 2)


def test_runs_that_start_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    """Without --out each has one of its own; one that is taken is refused, and nothing in it is changed."""
    data, small = str(write_text(tmp_path / "text")), list[str]()
    for name, value in SMALL.items():
        small += [f"--{name.replace('_', '-')}", value]
    train = [sys.executable, "-m", "zbmd", "train", "--data", data, "--ranks", "1", *small]
    runs = [
        subprocess.Popen([*train, "--seed", seed], cwd=tmp_path, stderr=subprocess.PIPE) for seed in "123"
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode(errors="replace")
    outs = [tmp_path / "zbmd-runs" / name for name in ("train", "train-2", "train-3")]
    recipes = [tomllib.loads((out / RECIPE_NAME).read_text()) for out in outs]
    assert sorted(recipe["seed"] for recipe in recipes) == [1, 2, 3]
    assert [read_header(out / LOG_NAME).seed for out in outs] == [recipe["seed"] for recipe in recipes]
    taken = tmp_path / "taken"
    with claimed(taken):
        refused = subprocess.run(
            [*train, "--out", str(taken)], stderr=subprocess.PIPE, text=True, check=False
        )
    assert refused.returncode == 2 and f"a run is under way in {taken}" in refused.stderr
    assert [path.name for path in taken.iterdir()] == [CLAIM_NAME]


def test_the_directory_of_a_run_that_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def out(*options: str) -> str:
        return str(recipe_of(["--data", "x", *options]).out)

    assert out() == "zbmd-runs/train"
    (tmp_path / "zbmd-runs/train").mkdir(parents=True)
    assert out() == "zbmd-runs/train-2"
    assert out("--resume", "runs/a/checkpoint.json") == "runs/a"
    assert out("--resume", "zbmd-runs/train") == "zbmd-runs/train"
    assert out("--resume", "zbmd-runs/train", "--out", "b") == "b"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "tp=3", "--ranks", "2"), "a mesh of tp 3 has 3 ranks, and there are 2"),
        (("--mesh", "dp=-1,tp=2", "--ranks", "3"), "does not divide 3 ranks"),
        (("--mesh", "ep=2", "--ranks", "2"), "unknown mesh axis ep; valid axes: dp, fsdp, pp, tp"),
        (("--schedule", "zb"), "--schedule: expected one of gpipe, 1f1b, zb-h1"),
        (("--steps", "many"), "--steps: expected a number, got 'many'"),
        (("--tokens", "words"), "--tokens: expected one of bytes, bpe, got 'words'"),
        (("--heads", "3"), "cannot be divided over 3 heads"),
        (("--ranks", "0"), "--ranks: expected 1 to 1022, got 0"),
        (("--precision", "float64"), "checkpoints hold float32"),
        (("/nowhere",), "the settings file cannot be read"),
        (("--weights", "a", "--resume", "b"), "--weights and --resume exclude each other: give one of them"),
    ],
)
def test_bad_recipes_are_explained(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--data", sys.executable, *options]) == 2
    assert said in capsys.readouterr().err
