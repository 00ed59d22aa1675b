"""The benchmark of the engine measures every operator and the step; PyTorch is named where it is missing."""

from __future__ import annotations

import sys

import pytest

from zbmd.tools.lab.bench.training import engine as bench_engine
from zbmd.training.config import GPTConfig
from zbmd.transport.errors import UserError

SMALL = GPTConfig(context=8, width=16, heads=2, layers=1)


def test_every_operator_and_the_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "TURN_S", 0.0)
    found = bench_engine.rows(SMALL, samples=1, rounds=2, threads=1, beside=False)
    assert found[-1].what == "step" and len(found) == 9
    assert all(one.time_us > 0 and one.noise.low <= one.noise.value <= one.noise.high for one in found)
    shown = bench_engine.table(found, tokens_a_step=8)
    assert "attention" in shown and "tokens a second: zbmd" in shown


def test_a_missing_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'zbmd\[torch\]'"):
        bench_engine.rows(SMALL, samples=1, rounds=1, threads=1, beside=True)


def test_numbers_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main(["--samples", "0"])
    assert "--samples is 1 to 65536" in capsys.readouterr().err
