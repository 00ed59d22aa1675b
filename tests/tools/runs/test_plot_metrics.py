"""`zbmd plot` of a run on a mesh, which keeps metrics and profiles in place of a commit log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import structlog

from zbmd.tools.runs.plot_data import picture_of_metrics, read_metrics, read_picture
from zbmd.tools.runs.plot_draw import headline, told
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.profiler.lines import RankProfile, RunLine, StepLine, lines_path
from zbmd.training.profiler.peak import MachineDescription
from zbmd.transport.errors import UserError

MS = 1_000_000


def metrics(directory: Path, *lines: dict[str, float]) -> Path:
    path = directory / METRICS_NAME
    with path.open("ab") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")
    return path


def life(rank: int, incarnation: int, ms_of: dict[int, int]) -> RankProfile:
    run = RunLine(
        version=1,
        rank=rank,
        incarnation=incarnation,
        world_size=2,
        host="h",
        boot_id="b",
        pid=1,
        monotonic_ns=0,
        unix_ns=0,
        ranks_on_host=2,
        machine=MachineDescription(processor="m", processors=2, blas="b"),
        peak=None,
        units=(),
    )
    return RankProfile(run, tuple(step(number, ms) for number, ms in ms_of.items()))


def step(number: int, ms: int) -> StepLine:
    return StepLine(
        step=number,
        begin_ns=number * 1000 * MS,
        end_ns=(number * 1000 + ms) * MS,
        ns={"forward": ms * MS},
        unit_ns={},
        passes={},
        flops=0,
        hardware_flops=0,
        overlap=None,
    )


LOSSES = [{"step": number, "loss": 5.0 / number} for number in range(1, 5)]
LIVES = [
    life(0, 1, {1: 10, 2: 10, 3: 30, 4: 10}),
    life(1, 1, {1: 12, 2: 9}),
    life(1, 2, {3: 11, 4: 9}),
]


def test_a_replaced_rank_is_told_where_its_successor_begins(tmp_path: Path) -> None:
    lines = read_metrics(metrics(tmp_path, *LOSSES, {"step": 4, "held_out_loss": 2.5}))
    picture = picture_of_metrics(lines, LIVES, None)
    assert picture is not None and picture.unit == "token"
    assert picture.step_ms.values.tolist() == [12.0, 10.0, 30.0, 10.0]
    assert picture.evaluated.steps.tolist() == [4.0] and picture.held_out.values.tolist() == [2.5]
    assert [(s.rank, s.incarnation, s.first, s.last) for s in picture.stays] == [
        (0, 1, 1, 4),
        (1, 1, 1, 2),
        (1, 2, 3, 4),
    ]
    (change,) = picture.changes
    assert (change.step, change.step_ms, told(change)) == (3, 30.0, ["rank 1 killed"])
    assert headline(picture) == "4 steps on 2 ranks, through 2 epochs"


def test_the_last_run_of_a_directory_is_drawn(tmp_path: Path) -> None:
    path = metrics(tmp_path, *LOSSES, *LOSSES[:2])
    assert [line.step for line in read_metrics(path)] == [1, 2]
    path.write_bytes(path.read_bytes() + b'{"step":3,"lo')  # as a kill has left it
    assert [line.step for line in read_metrics(path)] == [1, 2]


def test_damaged_lines_are_left_out_and_reported(tmp_path: Path) -> None:
    path = metrics(tmp_path, *LOSSES)
    path.write_bytes(b"[]\n\xff\n" + path.read_bytes() + b'{"step":4,"lo')
    with structlog.testing.capture_logs() as told:
        assert [line.step for line in read_metrics(path)] == [1, 2, 3, 4]
    assert [(one["log_level"], one["path"], one["first"]) for one in told] == [("warning", str(path), "1, 2")]


def test_a_run_without_profiles_is_drawn(tmp_path: Path) -> None:
    metrics(tmp_path, *LOSSES)
    picture = read_picture(tmp_path)
    assert (picture.ranks, picture.step_ms_median, picture.spent) == ((0,), None, None)


def test_a_run_that_did_no_step_is_told(tmp_path: Path) -> None:
    metrics(tmp_path)
    with pytest.raises(UserError, match="holds no step yet"):
        read_picture(tmp_path)
    assert not lines_path(tmp_path, 0, 1).exists()
