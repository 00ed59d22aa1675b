"""`zbmd profile` and `zbmd trace` of real runs: data parallel with a kill, ZeRO, a mesh, and a pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.jobs.two_ranks import SAMPLED, SIZES, run

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.entry import zbmd as cli
from zbmd.tools.runs.goodput import Cause, read_runs
from zbmd.tools.runs.plot_data import read_picture
from zbmd.tools.runs.profile import clocks_of
from zbmd.training.profiler.lines import RankProfile, read_profiles
from zbmd.training.profiler.ring import RECORD, GroupLine, Spans, read_ring, ring_path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("data") / "text"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No peak of this machine is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checked_trace(runs: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `zbmd trace` writes: whole slices with times, each on a named track, that nest there."""
    path = runs[0] / "trace.json"
    assert cli.main(["trace", *map(str, runs)]) == 0
    assert str(path) in capsys.readouterr().out
    document = json.loads(path.read_bytes())
    assert document["otherData"] == {"written by": "zbmd trace"}
    events: list[dict[str, Any]] = document["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in tracks for e in slices)
    for track in tracks:
        own = [(e["ts"], -e["dur"]) for e in slices if (e["pid"], e["tid"]) == track]
        ends: list[float] = []
        for begin, minus in sorted(own):
            while ends and ends[-1] <= begin + 1e-6:
                ends.pop()
            assert not ends or begin - minus <= ends[-1] + 1e-3, f"slices of {track} cross"
            ends.append(begin - minus)
    return events


def named(events: list[dict[str, Any]], pid: int) -> set[str]:
    return {event["name"] for event in events if event["ph"] == "X" and event["pid"] == pid}


def table(runs: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["profile", *map(str, runs), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sum(found["share"].values()) == pytest.approx(1.0)
    return found


def flops_of(lives: Sequence[RankProfile], step: int) -> int:
    return sum(line.flops for life in lives for line in life.steps if line.step == step)


def ops_are_of(lives: Sequence[RankProfile], step: int) -> set[str]:
    """The names of a step's ops, whose FLOPs are those of its passes."""
    rows = [row for life in lives for line in life.ops if line.step == step for row in line.ops]
    computed = [line.hardware_flops for life in lives for line in life.steps if line.step == step]
    assert sum(row.flops for row in rows) == sum(computed) > 0
    return {row.op for row in rows}


async def test_a_run_with_a_kill(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = (*SIZES, "--data", data, "--out", str(out), "--evaluate-every", "3", *SAMPLED)
    await run(arguments, fault="rank1#1:mirror.prepared:3", on_loss=OnLoss.REPLACE)
    lives = read_profiles(out)
    assert [(life.run.rank, life.run.incarnation) for life in lives] == [(0, 1), (1, 1), (1, 2)]
    survivor, killed, replacement = lives
    assert [line.step for line in survivor.steps if line.step != 3] == [1, 2, 4, 5, 6]
    assert sum(line.step == 3 for line in survivor.steps) == 2  # it was given up, and done again
    assert [line.step for line in killed.steps] == [1, 2]
    assert {4, 5, 6} <= {line.step for line in replacement.steps}
    # A step's passes are those of the four shards, whoever made them.
    each = [unit.forward + unit.backward for unit in survivor.run.units]
    assert flops_of(lives, 2) == flops_of(lives, 5) == 4 * sum(each)
    assert any(line.overlap is not None and line.overlap.under_way_ns for line in survivor.steps)
    # The spans of the step in which it was killed are there.
    assert 3 in read_ring(ring_path(out, 1, 1)).records["step"]
    events = checked_trace([out], capsys)
    assert [e["args"]["name"].split(" on ")[0] for e in events if e["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
        "rank 1 #2",
    ]
    assert {"step 5", "forward blocks.0", "backward head", "optimizer", "comm", "evaluate"} <= named(
        events, 0
    )
    assert {"linear forward", "causal_attention backward", "update work", "sample_gen"} <= named(events, 0)
    assert {"linear", "rms_norm", "update", "all_reduce_shards"} <= ops_are_of(lives, 4)
    assert any(name.startswith("all_reduce_shards #") for name in named(events, 0))
    found = table([out], capsys)
    assert {"forward", "backward", "comm", "checkpoint", "idle"} <= found["share"].keys()
    assert 0 < found["mfu"] < found["hfu"] < 1 and [unit["name"] for unit in found["units"]] == [
        "embed",
        "blocks.0",
        "head",
    ]
    assert cli.main(["profile", str(out)]) == 0
    told = capsys.readouterr().out
    assert "MFU" in told and "slowest ops" in told and told.count("%") > 30
    assert all(row["of_peak"] > 0 < row["enqueue_ms"] for row in found["ops"] if row["op"] == "linear")
    (times,) = read_runs([out])
    assert [loss.ranks for loss in times.failures] == [(1,)] and times.failures[0].began_again_ns
    for rank, costs in enumerate(({Cause.REPAIR, Cause.DETECTION}, {Cause.RESTART})):
        of_rank = times.ranks[rank]
        assert sum(of_rank.values()) == times.wall_ns and min(of_rank.values()) >= 0
        assert all(of_rank[cause] for cause in {Cause.USEFUL, Cause.RECOMPUTED, Cause.START_UP} | costs)
    spent = read_picture(out).spent
    assert spent is not None and {"forward", "comm", "idle"} <= set(spent.names)
    assert spent.steps.tolist() == [1, 2, 3, 4, 5, 6] and (spent.ms.sum(axis=0) > 0).all()


async def test_zero(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SIZES, "--data", data, "--out", str(tmp_path / "run"), "--zero", "3", *SAMPLED)
    await run(arguments)
    lives = read_profiles(tmp_path / "run")
    each = sum(unit.forward + unit.backward for unit in lives[0].run.units)
    assert flops_of(lives, 4) == 4 * each
    events = checked_trace([tmp_path / "run"], capsys)
    assert {"forward blocks.0", "backward blocks.0", "optimizer", "grad_clip"} <= named(events, 1)
    assert any(name.startswith("all_gather #") for name in named(events, 1))
    assert {"linear", "update", "global_norm", "all_gather"} <= ops_are_of(lives, 4)
    assert table([tmp_path / "run"], capsys)["overlap"]["under_way_ns"] > 0


@pytest.mark.parametrize(("schedule", "promised"), [("1f1b", [2, 1]), ("gpipe", [4, 4])])
async def test_a_pipeline(
    schedule: str, promised: list[int], data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ("--mesh", "pp=2", "--balance", "on", "--schedule", schedule)
    arguments = (*SIZES, "--data", data, "--out", str(tmp_path / "run"), *stages)
    await run(arguments)
    lives = read_profiles(tmp_path / "run")
    for life, most in zip(lives, promised, strict=True):
        for line in life.steps:
            assert line.held is not None and line.held.microbatches == line.held.microbatches_max == most
            assert 0 < line.held.nbytes == line.held.nbytes_max
    assert cli.main(["profile", str(tmp_path / "run")]) == 0
    said = f"activations of rank 1: at most {promised[1]} micro-batches at once, of {promised[1]}"
    assert said in capsys.readouterr().out
    each = sum(unit.forward + unit.backward for unit in lives[0].run.units)
    assert flops_of(lives, 4) == 4 * each
    # Layers are parted by what they were measured to cost: the first stage may have the embedding alone.
    units = range(len(lives[0].run.units))
    first, second = (
        {unit for line in life.steps for unit in units if line.passes["forward"][unit]} for life in lives
    )
    assert first and second and not first & second and first | second == set(units)
    events = checked_trace([tmp_path / "run"], capsys)
    assert "bubble" in named(events, 0) | named(events, 1)
    assert table([tmp_path / "run"], capsys)["share"]["bubble"] > 0


# ---- clocks


def spans_on(boot: str, ahead_ns: int, times: Sequence[tuple[int, int]], like: Spans) -> Spans:
    """A rank on a host whose wall clock is `ahead_ns` ahead, in operations of these (begin, end) times."""
    run = msgspec.structs.replace(like.run, boot_id=boot, monotonic_ns=0, unix_ns=10**18 + ahead_ns)
    records = np.zeros(len(times), RECORD)
    records["track"], records["sequence"] = 1, range(1, len(times) + 1)
    records["begin_ns"], records["end_ns"] = zip(*times, strict=True)
    return Spans(run, (GroupLine(channel=0, epoch=1, members=(0, 1)),), ("all_reduce",), records)


async def test_clocks_of_hosts_are_brought_together_by_operations(data: str, tmp_path: Path) -> None:
    await run((*SIZES, "--data", data, "--out", str(tmp_path / "run")))
    real = [read_ring(ring_path(tmp_path / "run", rank, 1)) for rank in (0, 1)]
    # One host has one clock: what was waited for ends nowhere before the other rank came.
    first, second = clocks_of(real)
    assert first.error_ns == second.error_ns == 0
    for sequence in set(real[0].records["sequence"].tolist()) - {0}:
        one, other = (spans.records[spans.records["sequence"] == sequence] for spans in real)
        assert one["end_ns"][0] + first.shift_ns >= other["begin_ns"][0] + second.shift_ns
    here = spans_on("a", 0, [(1_000, 2_000), (5_000, 5_400), (9_000, 9_900)], real[0])
    there = spans_on("b", 7_000_000, [(1_100, 1_950), (5_050, 5_350), (8_000, 9_950)], real[0])
    first, second = clocks_of([here, there])
    assert second.error_ns is not None and 0 < second.error_ns <= 400
    assert abs(second.shift_ns - first.shift_ns) <= second.error_ns
    unmet = Spans(there.run, (), there.operations, there.records[:0])
    assert clocks_of([here, unmet])[1].error_ns is None


# ---- what cannot be asked for


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("profile", (), "no profile in"),
        ("trace", (), "no spans"),
        ("trace", ("--steps", "4:2"), "first and the last"),
    ],
)
def test_what_is_not_there_is_told(
    command: str,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([command, str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err
