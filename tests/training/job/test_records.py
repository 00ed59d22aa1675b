"""Records of a run: each step once, whoever has written them, and however that ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from zbmd.training.job.records import METRICS_NAME, Records, keep_until


def steps_in(directory: Path) -> list[int]:
    lines = (directory / METRICS_NAME).read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    return [msgspec.json.decode(line)["step"] for line in lines]


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A directory with the records of a run that was killed during a write."""
    records = Records(tmp_path, tensorboard=False)
    for step in range(1, 9):
        assert records.put(step, loss=1.0 / step, grad_norm=float("nan"))
    records.close()
    path = tmp_path / METRICS_NAME
    path.write_bytes(path.read_bytes()[:-7])
    return tmp_path


def test_a_replacement_goes_on_where_its_predecessor_was_killed(noted: Path) -> None:
    records = Records(noted, tensorboard=False, again=True)
    assert records.last_step("loss") == 7
    assert not records.put(7, loss=1.0)
    assert records.put(8, loss=0.5)
    records.close()
    assert steps_in(noted) == list(range(1, 9))


@pytest.mark.parametrize("first", [0, 5, 8])
def test_a_run_that_is_resumed_leaves_out_what_it_does_again(noted: Path, first: int) -> None:
    with (noted / METRICS_NAME).open("ab") as file:
        file.write(b"\n[]\n")
    keep_until(noted, first)
    records = Records(noted, tensorboard=False, first=first)
    for step in range(first + 1, 11):
        assert records.put(step, loss=0.25)
    records.close()
    # What was being written when the run was killed is lost, if it is not done again.
    assert steps_in(noted) == [step for step in range(1, 11) if step != 8 or first < 8]


def test_there_may_be_no_records(tmp_path: Path) -> None:
    keep_until(tmp_path, 3)
    assert not (tmp_path / METRICS_NAME).exists()
