"""Recorded loops: whatever kills their writer, the log has each step once, with its samples and its loss."""

from __future__ import annotations

import importlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import train

from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.run.audit import LoopAudit, Proof
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log
from zbmd.training.run.loop_steps import Drawn, Ids, LoopPlan
from zbmd.training.torch.ballots import Ballot

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional
recorder: Any = importlib.import_module("zbmd.training.torch.durable.recorder")
votes: Any = importlib.import_module("zbmd.training.torch.votes")

PROGRAM = PROGRAMS / "torch/recorded_loop.py"
RANKS, SAMPLES = 3, 50


def audited(out: Path) -> LoopAudit:
    found = audit_run(out)
    assert isinstance(found, LoopAudit)
    return found


def losses_in(out: Path) -> list[tuple[int, float]]:
    return [(record.version, loss_of(record)) for record in read_log(out / LOG_NAME)[1]]


def metrics_in(out: Path) -> list[tuple[int, float]]:
    lines = [msgspec.json.decode(line) for line in (out / METRICS_NAME).read_bytes().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@cache
def _losses() -> dict[str, list[tuple[int, float]]]:
    return {}


async def undisturbed(loader: str, out: Path) -> list[tuple[int, float]]:
    """Return the losses of an undisturbed run, as its ranks print them."""
    if loader not in _losses():
        result, lines = await train(PROGRAM, "plain", more={"OUT": str(out), "LOADER": loader})
        assert result.outcome is Outcome.SUCCEEDED and result.restarts == 0, "\n".join(lines)
        told = [re.search(r"step (\d+) rank 0: (.*)", line) for line in lines]
        _losses()[loader] = [(int(found[1]), float(found[2])) for found in told if found]
        assert losses_in(out) == metrics_in(out) == _losses()[loader]
    return _losses()[loader]


@pytest.mark.parametrize(
    ("loader", "fault", "more"),
    [
        ("sampler", "rank0:loop.prepared:3", {}),
        ("sampler", "rank0:loop.voted:3", {}),
        ("sampler", "rank0:loop.voted:3,rank0#2:loop.take:1,rank0#3:loop.logged:1", {}),
        ("sampler", "rank0:loop.logged:3", {"MISSED": "3"}),
        ("sampler", "rank0:loop.updated:6,rank1:loop.begin:5", {}),
        ("iterable", "rank0:loop.voted:2", {}),
        ("none", "rank0:loop.updated:2", {}),
    ],
)
async def test_the_log_of_a_killed_loop_is_that_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, fault: str, more: dict[str, str]
) -> None:
    """Killed before the vote, between commit and record, with a record that nobody else saw, in recovery."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed(loader, tmp_path / "undisturbed")
    out = tmp_path / "run"
    result, lines = await train(PROGRAM, "plain", fault, more={"OUT": str(out), "LOADER": loader, **more})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(",")), "\n".join(lines)
    assert any("as if the votes had not come" in line for line in lines) == bool(more)
    assert losses_in(out) == metrics_in(out) == wanted
    found = audited(out)
    assert found.is_whole and (found.steps, found.passes_unfinished) == (6, 0), found
    proves = {"sampler": Proof.SAMPLES, "iterable": Proof.BATCHES, "none": Proof.STEPS}[loader]
    assert found.proves is proves
    if loader == "sampler":
        for of_pass in range(2):
            each = [record for record in read_log(out / LOG_NAME)[1] if _pass_of(record) == of_pass]
            assert {i for record in each for ids in record.shards.values() for i in ids} == {*range(SAMPLES)}


def _pass_of(record: Any) -> int:
    return int(record.loop.of_pass)


@pytest.mark.parametrize(("workers", "fault"), [("0", "rank1:loop.updated:4"), ("2", "rank1:loop.updated:2")])
async def test_a_loader_with_a_state_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, fault: str
) -> None:
    """The replacement loads the loader's state of the last commit; the log has the indices of all samples.

    Behind the fourth step it has the votes of `run.every` to give first.
    """
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed("sampler", tmp_path / "undisturbed")
    out = tmp_path / "run"
    result, lines = await train(
        PROGRAM, "plain", fault, more={"OUT": str(out), "LOADER": "stateful", "WORKERS": workers}
    )
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == 1, "\n".join(lines)
    assert losses_in(out) == wanted
    found = audited(out)
    assert found.is_whole and (found.proves, found.samples) == (Proof.SAMPLES, 102)


@pytest.mark.parametrize(("loader", "samples"), [("workers", 102), ("ragged", 72), ("each", 300)])
async def test_each_sampler_deals_its_samples_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, samples: int
) -> None:
    """With workers that read ahead; without the ragged end; with all samples on each rank."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    result, lines = await train(
        PROGRAM, "plain", "rank1:loop.begin:2", more={"OUT": str(tmp_path), "LOADER": loader}
    )
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == 1, "\n".join(lines)
    found = audited(tmp_path)
    assert found.is_whole and found.proves is Proof.SAMPLES and found.samples == samples


async def test_a_directory_with_a_run_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    with loop(tmp_path / "run") as writer:
        writer.put(rows(1), 1)
    before = (tmp_path / "run" / LOG_NAME).read_bytes()
    result, lines = await train(PROGRAM, "plain", more={"OUT": str(tmp_path / "run")})
    assert result.outcome is Outcome.FAILED
    assert sum("belongs to another run" in line for line in lines) >= RANKS, "\n".join(lines)
    assert (tmp_path / "run" / LOG_NAME).read_bytes() == before


# ---- the recorder


@contextmanager
def loop(out: Path, *, fresh: bool = False) -> Generator[Any]:
    """The recorder of a writer, closed as when that ends."""
    out.mkdir(exist_ok=True)
    plan = LoopPlan(loop="SGD", ranks=2, parameters=3, model="m")
    writer = recorder.Recorder(out, run_id="a", plan=plan, seed=7, fresh=fresh)
    try:
        yield writer
    finally:
        writer.close()


def rows(step: int, loss: float = 1.0) -> tuple[bytes, ...]:
    """The votes of two ranks for a step; 0: for another transaction."""
    noted = [
        votes.Noted(
            step, ("loss",), (Drawn(kind=Ids.SAMPLES, of_pass=0, batch=step - 1, ids=(2 * step + rank,)),)
        )
        for rank in range(2)
    ]
    return tuple(votes.pack(Ballot(version=step), [{"loss": loss}], {}, each) for each in noted)


def test_a_torn_record_is_cut_off_and_written_again(tmp_path: Path) -> None:
    with loop(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.put(rows(step), 1)
    whole = (tmp_path / LOG_NAME).read_bytes()
    for cut in (1, 40, 100):
        (tmp_path / LOG_NAME).write_bytes(whole[:-cut])
        with loop(tmp_path, fresh=True) as writer:
            writer.amend(rows(3), 3, 2)
        assert losses_in(tmp_path) == metrics_in(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_record_that_nobody_saw_is_taken_back_with_its_metrics(tmp_path: Path) -> None:
    with loop(tmp_path) as writer:
        writer.put(rows(1), 1)
        writer.put(rows(2, 5.0), 1)
    with loop(tmp_path, fresh=True) as following:
        following.amend(rows(1), 1, 2)
        assert losses_in(tmp_path) == metrics_in(tmp_path) == [(1, 1.0)]
        following.put(rows(2, 3.0), 2)
    assert losses_in(tmp_path) == metrics_in(tmp_path) == [(1, 1.0), (2, 3.0)]


def test_votes_for_what_is_no_step_are_not_logged(tmp_path: Path) -> None:
    with loop(tmp_path) as writer:
        writer.put(rows(1), 1)
        writer.put(rows(0), 1)
    with loop(tmp_path, fresh=True) as writer:
        writer.amend(rows(0), 1, 2)
    assert losses_in(tmp_path) == [(1, 1.0)]


def test_a_tampered_file_is_found(tmp_path: Path) -> None:
    with loop(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.put(rows(step), 1)
    assert audited(tmp_path).is_whole
    data = bytearray((tmp_path / LOG_NAME).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / LOG_NAME).write_bytes(data)
    assert not audited(tmp_path).is_whole
