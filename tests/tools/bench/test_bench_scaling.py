"""The benchmark of weak scaling: jobs of one and two ranks and plain loops take turns."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from zbmd.tools.bench.stats import OURS
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.lab.bench.training import scaling as bench_scaling
from zbmd.tools.lab.bench.training.scaling import MANY, PLAIN_MANY, PLAIN_ONE, Scaling, evaluated

TINY = ["--context", "8", "--width", "8", "--heads", "2", "--layers", "1", "--shards", "2"]


def test_scaling_is_what_the_times_say() -> None:
    times = {OURS: [90.0, 110.0] * 3, MANY: [125.0] * 3, PLAIN_ONE: [95.0] * 3, PLAIN_MANY: [100.0] * 3}
    found = evaluated(times, ranks=2, tokens_a_rank=1000)
    assert found.scaling.value == pytest.approx(1.6) and found.floor.value == pytest.approx(1.9)
    assert found.of_floor.value == pytest.approx(1.6 / 1.9) and found.noise.value == pytest.approx(9 / 11)
    assert found.tokens_per_s == pytest.approx(
        {OURS: 10e3, MANY: 16e3, PLAIN_ONE: 1e6 / 95, PLAIN_MANY: 20e3}
    )
    shown = bench_scaling.table(found)
    assert "goal 1.85: missed" in shown and "zbmd, 2 ranks" in shown


def test_jobs_and_plain_loops_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_text(tmp_path / "text")
    code = bench_scaling.main([*TINY, "--data", str(data), "--rounds", "2", "--steps", "2", "--json"])
    found = msgspec.json.decode(capsys.readouterr().out, type=Scaling)
    assert code == int(found.scaling.value < found.goal)
    assert found.rounds == 2 and found.tokens_a_rank == 2 * 2 * 8
    assert all(ms > 0 for ms in found.step_ms.values()) and len(found.step_ms) == 4


def test_bad_numbers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_scaling.main(["--ranks", "1"]) == 2
    assert "--ranks is 2 to 32" in capsys.readouterr().err
