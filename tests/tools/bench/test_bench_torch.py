"""The benchmarks of PyTorch: both backends take turns, and must come to the same losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from zbmd.tools.bench.figures import read_figures
from zbmd.tools.lab.bench.collectives import torch_calls
from zbmd.tools.lab.bench.training import torch_steps as bench_torch
from zbmd.tools.lab.bench.training.torch_steps import check_losses

pytestmark = pytest.mark.optional
SMALL = ["--rounds", "1", "--steps", "2", "--width", "8", "--layers", "1", "--tokens", "4"]


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def test_ddp_and_fsdp2_are_timed_beside_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_torch.main(SMALL) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said if "2 ranks" in line] == ["ddp", "fsdp2"]
    assert [line.split()[0] for line in said if line.startswith(("zbmd", "gloo"))] == ["zbmd", "gloo"] * 2


def test_other_losses_are_told() -> None:
    check_losses("ddp", [5.0, 4.0, 3.0, 2.0], [5.0, 4.00001])
    for theirs in (4.1, math.nan):
        with pytest.raises(RuntimeError, match="turn 1: the loss is 4"):
            check_losses("ddp", [5.0, 4.0], [5.0, theirs])


def test_bad_numbers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_torch.main(["--width", "7"]) == 2
    assert "divisible by 4" in capsys.readouterr().err


def test_calls_are_timed_beside_gloo_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "figures.jsonl"
    asked = ["--rounds", "1", "--sizes", "8,1K", "--calls", "send", "all_to_all", "--record", str(record)]
    assert torch_calls.main(asked) == 0
    measured = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    cases = [(call, size) for call in ("send", "all_to_all") for size in ("8", "1K")]
    assert measured == [[*case, who] for case in cases for who in ("zbmd", "gloo")]
    figures = read_figures(record)
    assert [figure.goal for figure in figures] == ["≥ 2 × gloo"] * 2 + ["≥ 1.5 × gloo"] * 2
    assert all(figure.peer == "gloo" and figure.met is not None for figure in figures)
