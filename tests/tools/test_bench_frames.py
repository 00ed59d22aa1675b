"""The benchmark of frames: that it measures what it says, not how fast that is."""

from __future__ import annotations

import json

import pytest

from zbmd.tools import bench_frames


def test_each_size_is_timed_idle_and_while_computing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_frames, "WARM_UP", 10)
    assert bench_frames.main(["--seconds", "0", "--sizes", "0,5000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["payload_bytes"], row["computing"]) for row in rows] == [
        (0, False),
        (5000, False),
        (0, True),
        (5000, True),
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] and row["per_second"] > 0 for row in rows)


def test_the_table_names_its_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_frames, "WARM_UP", 10)
    assert bench_frames.main(["--seconds", "0", "--sizes", "8", "--no-spin"]) == 0
    head, idle, computing = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["bytes", "p50", "us", "p99", "us"]
    assert idle.split()[:2] == ["8", "idle"] and computing.split()[:2] == ["8", "computing"]
