"""A training run that is killed as a whole goes on in memory, from its snapshot process: the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.jobs.held_runs import (
    GATE,
    HOLDER,
    STEPS,
    damage,
    job,
    kill_all_when_held,
    killed,
    last_committed,
    open_gate,
    saved_in,
    started,
    undisturbed,
    until_held,
    weights_of,
)
from support.processes.polling import until

from zbmd.actors.snapshots.client import look
from zbmd.tools.entry import zbmd as command
from zbmd.tools.runs.snapshots import DAMAGED, WHOLE, held_runs
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import RunMeasures
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.job.overwrite import holders_of
from zbmd.training.run.ledger import LOG_NAME, read_log

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

FIRST, AHEAD = 3, 5
"""The gate before the first checkpoint, and the step of one."""
SAVED = ("--checkpoint-every", "12")
"""One checkpoint before `GATE`, and none of the last step there, which a run would go on from."""
WRITTEN = 15
"""The gate at which it is waited for."""


@contextmanager
def saving(launcher: Launcher, run: Path, ranks: int, *arguments: str) -> Generator[Running]:
    """A run with a checkpoint, which a snapshot process has written: ranks stand still, and publish none."""
    with started(launcher, *arguments, gates=(FIRST, WRITTEN, GATE)) as running:
        until_held(running, ranks, run)
        open_gate(run, FIRST)
        running.until_holds((run / SHARDS_NAME).exists, "there is a checkpoint")
        open_gate(run, WRITTEN)
        running.until(rf"^step {GATE - 2} loss")  # all stand still, and what they have done is in the log
        yield running


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, ()), (2, ()), (2, ("--mesh", "pp=2")), (2, ("--zero", "3"))],
    ids=["one", "replicas", "stages", "sharded"],
)
def test_all_is_killed_at_once_and_the_next_run_has_the_same_bits(
    launcher: Launcher, run: Path, ranks: int, more: tuple[str, ...]
) -> None:
    calm = undisturbed(launcher)
    holder = killed(launcher, ranks, *job(ranks, *more))
    committed = last_committed(run)
    assert committed < GATE
    assert not (run / SHARDS_NAME).exists(), "there is no file to go on from"
    (held,) = held_runs([holder], run)
    assert not held.launcher and held.left_s > 0
    assert sorted({one.rank for one in held.versions if one.rank is not None}) == list(range(ranks))
    whole = [one.version for one in held.versions if one.state == WHOLE]
    assert set(whole) <= {committed - 1, committed, committed + 1}, held

    with started(launcher, *job(ranks, *more)) as again:
        code = again.end()
    assert code == 0, again.text
    assert f"process {held.holder} holds the memory of rank 0" in again.text
    first = int(re.findall(r"^step (\d+) loss", again.text, re.MULTILINE)[0])
    assert committed <= first <= committed + 2, "what is in the log may not have been reported"
    assert weights_of(again.text) == calm
    assert [one.version for one in read_log(run / LOG_NAME)[1]] == list(range(1, STEPS + 1))
    assert not holders_of(run), "the job has ended"


def failed(launcher: Launcher, run: Path) -> str:
    """Have a rank of a run die once its state is held, and the run fail of it; return what was printed."""
    fault = f"rank1:job.begin:{GATE + 5}"
    with started(launcher, *job(2), ZBMD_MAX_RESTARTS="0", ZBMD_FAULT=fault) as running:
        until_held(running, 2, run)
        open_gate(run)
        assert running.end() == 75, running.text
    return running.text


def test_a_run_that_failed_goes_on_too_and_its_last_line_says_so(launcher: Launcher, run: Path) -> None:
    calm = undisturbed(launcher)
    told = failed(launcher, run)
    assert "holds the state of this job for 1min: the same command goes on from there" in told
    with started(launcher, *job(2), ZBMD_MAX_RESTARTS="0") as again:
        assert again.end() == 0, again.text
    assert weights_of(again.text) == calm


def test_a_held_state_whose_directory_was_removed_is_explained(launcher: Launcher, run: Path) -> None:
    failed(launcher, run)
    (holder,) = holders_of(run)
    run.rename(away := launcher.directory / "away")
    with started(launcher, *job(2), ZBMD_MAX_RESTARTS="0") as refused:
        assert refused.end() == 2, refused.text
    assert "found none. Restore the run's directory" in refused.text, refused.text
    assert f"`zbmd snapshots --job {holder.job:016x} --drop`" in refused.text
    shutil.rmtree(run)
    away.rename(run)
    with started(launcher, *job(2), ZBMD_MAX_RESTARTS="0") as again:
        assert again.end() == 0, again.text
    assert [one.version for one in read_log(run / LOG_NAME)[1]] == list(range(1, STEPS + 1))


def test_the_holder_is_killed_while_the_run_goes_on_and_then_everything_else(
    launcher: Launcher, run: Path
) -> None:
    calm = undisturbed(launcher)
    with started(launcher, *job(2)) as running:
        running.until_holds(lambda: HOLDER in running.processes(), "there is a snapshot process")
        (holder,) = running.processes()[HOLDER]
        os.kill(holder, signal.SIGKILL)
        running.until(
            rf"the snapshot process {holder} is lost, killed \(SIGKILL\): another one takes its place"
        )
        kill_all_when_held(running, 2, run)
    open_gate(run)
    with started(launcher, *job(2)) as again:
        assert again.end() == 0, again.text
    assert "it goes on from there" in again.text and weights_of(again.text) == calm


def test_a_damaged_snapshot_is_named_and_another_rank_has_the_same(launcher: Launcher, run: Path) -> None:
    calm = undisturbed(launcher)
    holder = killed(launcher, 2, *job(2))
    damaged = damage(holder, 1)
    (held,) = held_runs([holder], run)
    found = sorted((one.rank, one.version) for one in held.versions if one.state == DAMAGED)
    assert damaged and found == [(1, version) for version in sorted(damaged)]
    with started(launcher, *job(2)) as again:
        assert again.end() == 0, again.text
    for version in damaged:
        assert re.search(rf"the state in memory is damaged, and is not used.*version={version}", again.text)
    assert weights_of(again.text) == calm


def test_a_damaged_snapshot_without_another_ends_the_run_with_the_checkpoint_named(
    launcher: Launcher, run: Path
) -> None:
    arguments = job(1, *SAVED)
    with saving(launcher, run, 1, *arguments) as running:
        holder = kill_all_when_held(running, 1, run)
    damage(holder, 0)
    with started(launcher, *arguments) as again:
        assert again.end() == 2, again.text
    assert "the state in memory is damaged" in again.text
    assert str(Path("run") / SHARDS_NAME) in again.text, "the last durable tier is named"


async def test_what_was_written_of_a_step_that_is_not_committed_is_dropped(
    launcher: Launcher, run: Path
) -> None:
    """Ranks hand a step over before they vote for it: without the vote it is not published."""
    calm = undisturbed(launcher)
    arguments = job(1, "--checkpoint-every", "5")
    with started(launcher, *arguments, gates=(FIRST, AHEAD + 1)) as running:
        until_held(running, 1, run)
        open_gate(run, FIRST)
        running.until_holds(lambda: bool(list(run.glob(f"checkpoint-{AHEAD}-*"))), "its shard is written")
        kill_all_when_held(running, 1, run)
    assert last_committed(run) == AHEAD - 1
    await until(lambda: not list(run.glob(f"checkpoint-{AHEAD}-*")))
    assert saved_in(run) == 0
    with started(launcher, *arguments, gates=()) as again:
        assert again.end() == 0, again.text
    assert weights_of(again.text) == calm and saved_in(run) == STEPS


def test_a_run_that_is_stopped_leaves_nothing_and_without_snapshots_none_is_held(
    launcher: Launcher, run: Path
) -> None:
    with started(launcher, *job(2)) as running:
        running.until(rf"^step {GATE - 1} loss")
        until_held(running, 2, run)
        os.kill(running.pid, signal.SIGTERM)
        running.until("SIGTERM received: ranks have")
        open_gate(run)
        assert running.end() == 128 + signal.SIGTERM, running.text
    launcher.assert_nothing_left(running.marker, running.text)
    assert not holders_of(run)
    with started(launcher, *job(2, out="other"), ZBMD_SNAPSHOTS="off") as running:
        running.until(rf"^step {STEPS} loss")
        assert HOLDER not in running.processes()


def test_what_is_held_goes_when_its_run_starts_over(launcher: Launcher, run: Path) -> None:
    holder = killed(launcher, 2, *job(2))
    ended = launcher.run(*job(2, "--overwrite", "on"))
    assert ended.code == 0, ended
    assert look(holder.name) is None


def test_other_code_is_refused_with_what_differs(launcher: Launcher, run: Path) -> None:
    """A script of one's own: the directory of the run is another run's then."""
    script, own = launcher.directory / "own.py", (PROGRAMS / "training" / "own_line.py").read_text()
    script.write_text(own)
    arguments = ("run", "-n", "2", "own.py", "run")
    killed(launcher, 2, *arguments)
    script.write_text(own.replace("0.3", "0.2"))
    with started(launcher, *arguments) as other:
        assert other.end() == 2, other.text
    assert "are not used: these snapshots are of another code" in other.text, other.text
    assert "belongs to another run" in other.text
    script.write_text(own)
    with started(launcher, *arguments) as again:
        assert again.end() == 0, again.text
    assert "it goes on from there" in again.text


def test_snapshots_lists_verifies_and_drops(
    launcher: Launcher, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["snapshots", str(launcher.directory)]) == 0
    assert "no state is held of that here" in capsys.readouterr().out
    with saving(launcher, run, 2, *job(2, *SAVED)) as running:
        holder = kill_all_when_held(running, 2, run)
    assert command.main(["snapshots", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (held,) = shown["runs"]
    assert int(held["job"], 16) == holder.job and held["launcher"] == 0
    assert {one["tier"] for one in held["versions"]} == {"memory"} and len(held["versions"]) == 4
    assert all(one["age_s"] is None or one["age_s"] >= 0 for one in held["versions"])
    assert shown["checkpoints"][0]["state"] == WHOLE and 12 <= shown["checkpoints"][0]["version"] < WRITTEN
    newest: dict[int, int] = {}
    for one in (one for one in held["versions"] if one["version"] is not None):
        newest[one["rank"]] = max(newest.get(one["rank"], 0), one["version"])
    with RunDatabase(run) as database:
        database.update()
        told = {one.name: dict(one.samples) for one in RunMeasures("x", run).collect(database.connection)}
    of_ranks = {rank: (("run", "x"), ("rank", str(rank))) for rank in newest}
    assert told["zbmd_snapshot_version"] == {of_ranks[rank]: newest[rank] for rank in newest}
    assert set(told["zbmd_snapshot_age_seconds"]) <= set(of_ranks.values())
    assert all(isinstance(age, float) and age >= 0 for age in told["zbmd_snapshot_age_seconds"].values())
    assert command.main(["snapshots", str(run)]) == 0
    assert "whole" in capsys.readouterr().out

    damage(holder, 0)
    (name, *_) = read_names(run / SHARDS_NAME).files  # one being written may lie beside it
    shard = run / name
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert command.main(["snapshots", str(run), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert DAMAGED in {one["state"] for one in shown["runs"][0]["versions"]}
    assert shown["checkpoints"][0]["state"] == DAMAGED

    assert command.main(["snapshots", str(run), "--drop"]) == 0
    assert not holders_of(run)
    assert command.main(["snapshots", "--drop"]) == 2
    assert command.main(["snapshots", str(run / "none")]) == 2
    capsys.readouterr()
