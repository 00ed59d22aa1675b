"""`zbmd checkpoint convert`: a run becomes a model of Hugging Face, and its weights begin another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zbmd.tools.entry.zbmd import main
from zbmd.training.model.hugging_face import load_gpt2
from zbmd.training.model.weights import load_weights

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

SMALL = (
    *("--family", "gpt2", "--activation", "gelu", "--context", "8", "--width", "16", "--heads", "2"),
    *("--layers", "2", "--shards", "2", "--sequences-per-shard", "2", "--steps", "3", "--warmup", "1"),
    *("--evaluate-every", "0", "--evaluate-windows", "4", "--curve", "constant", "--data", "text"),
)


def test_two_ranks_train_a_model_that_becomes_safetensors_files_and_goes_on(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    here = launcher.directory
    (here / "text").write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    run = ("run", "-n", "2", "-m", "zbmd", "train", *SMALL)
    done = launcher.run(*run, "--out", "run", "--mesh", "dp=2")
    assert done.code == 0, done
    code = main(
        ["checkpoint", "convert", str(here / "run"), str(here / "hf"), "--to", "hf", "--shard-size", "9kB"]
    )
    assert code == 0 and "tensors, from zbmd to hf" in capsys.readouterr().out
    assert len(list((here / "hf").glob("model-*-of-*.safetensors"))) > 1
    flat, _ = load_gpt2(here / "hf")
    assert flat.tobytes() == load_weights(here / "run/weights.safetensors")[0].tobytes()
    again = launcher.run(*run, "--out", "again", "--weights", "hf")
    assert again.code == 0, again


def test_what_cannot_be_converted_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "x"), "--to", "hf"]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err
    words = [
        "checkpoint",
        "convert",
        str(tmp_path),
        str(tmp_path / "x"),
        "--to",
        "hf",
        "--shard-size",
        "some",
    ]
    assert main(words) == 2
    assert "--shard-size: " in capsys.readouterr().err
