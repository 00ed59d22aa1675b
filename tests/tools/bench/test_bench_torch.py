"""The benchmark of PyTorch: both backends take turns, and must come to the same losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from zbmd.tools.bench.figures import read_figures
from zbmd.tools.bench.stats import ALONE
from zbmd.tools.bench.torch_calls import CASES, DDP, STEPS, check_losses
from zbmd.tools.entry import zbmd as cli

SMALL = ["--rounds", "1", "--steps", "2", "--width", "8", "--layers", "1", "--tokens", "4"]


@pytest.mark.optional
def test_calls_and_steps_are_timed_beside_gloo_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    record = tmp_path / "figures.jsonl"
    asked = ["bench", "torch", "--vs", "gloo", "--sizes", "8,64K", *SMALL]
    assert cli.main([*asked, "--json", "--record", str(record)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["benchmark"] == "torch" and told["peers"][0]["name"] == "gloo"
    rows = [(row["case"], row["who"]) for row in told["rows"]]
    twice = dict.fromkeys(STEPS, 1)
    contenders = {case: ("zbmd", "gloo", *([ALONE] if case in DDP else [])) for case in CASES}
    assert rows == [
        (case, who) for case in CASES for _ in range(twice.get(case, 2)) for who in contenders[case]
    ]
    assert all(row["time_us_p50"] > 0 for row in told["rows"])
    figures = list(read_figures(record))
    goals = {figure.what.split()[1].strip(","): figure.goal for figure in figures}
    assert (
        goals["send"] == "≥ 2 × gloo"
        and goals["all_reduce"] == "≥ 3 × gloo"
        and goals["fsdp2"] == "≥ 2 × gloo"
    )
    shares = [figure for figure in figures if "communication" in figure.what]
    assert [(figure.goal, figure.peer) for figure in shares] == [("≤ 0.4 × gloo", "gloo")] * len(DDP)


def test_other_losses_are_told() -> None:
    check_losses("ddp", [5.0, 4.0, 3.0, 2.0], [5.0, 4.00001])
    for theirs in (4.1, math.nan):
        with pytest.raises(RuntimeError, match="turn 1: the loss is 4"):
            check_losses("ddp", [5.0, 4.0], [5.0, theirs])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--width", "7"], "divisible by 4"),
        (["--ranks", "1"], "--ranks: 2 to 16"),
        (["--cases", "scan"], "scan"),
        (["--vs", "mpi"], "mpi"),
    ],
)
def test_bad_input_is_told(asked: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "torch", *asked]) == 2
    assert words in capsys.readouterr().err
