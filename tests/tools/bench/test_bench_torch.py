"""The benchmark of PyTorch's data parallelism: both backends take turns, and must come to the same losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

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
