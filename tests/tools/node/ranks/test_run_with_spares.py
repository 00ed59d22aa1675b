"""`zbmd-node run --spare-ranks`: real ranks are killed, and what waited as a spare goes on as them."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from programs import PROGRAMS
from support.cluster.etcd_server import free_ports
from support.processes.stopping import stop

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.run.ledger import LOG_NAME, read_log

if TYPE_CHECKING:
    from pathlib import Path

    from support.processes.launcher import Launcher, Running

SCRIPT = str(PROGRAMS / "launched" / "spare.py")
PATIENT = ("run", "--spare-ranks", "1", "--recovery-budget", "20s")
"""A spare may take so long to answer, on a machine that is busy."""
WAITS = r"a spare rank waits \(pid (\d+)\)"
LOST = r"a spare rank \(pid (\d+)\) was lost: (.*)"


def is_rank(rank: int) -> str:
    """The line of a rank that has joined, as it knows itself and as its environment has it."""
    return rf"rank {rank} {rank} \d+ is (\d+)"


def pid(running: Running, pattern: str, count: int = 1) -> int:
    return int(running.until(pattern, count)[count - 1][1])


def test_a_killed_rank_is_its_spare_at_once_and_another_spare_waits(
    launcher: Launcher, tmp_path: Path
) -> None:
    with launcher.start(*PATIENT, "-n", "2", SCRIPT, str(tmp_path), "counts") as running:
        first, spare = pid(running, is_rank(1)), pid(running, WAITS)
        running.until(rf"\[spare\]: begins {spare} spare=True")  # by its own pipe, perhaps later
        status = json.loads("".join(launcher.run("status", "--json").out))
        assert [one["pid"] for one in status["nodes"][0]["spares"]] == [spare]
        assert {one["pid"] for one in status["nodes"][0]["ranks"]} == {first, pid(running, is_rank(0))}
        os.kill(first, signal.SIGKILL)
        assert pid(running, r"rank 1 is now the spare, pid (\d+) \(incarnation 2\)") == spare
        assert pid(running, is_rank(1), 2) == spare
        running.until(r"entered [2-9] with 2")
        second = pid(running, WAITS, 2)
        assert second != spare
        (tmp_path / "done").touch()
        assert running.end() == 0
    assert running.text.count(" failed: ") == 1, running.text


def test_a_spare_that_is_killed_disturbs_nobody_and_one_that_does_not_answer_is_passed_over(
    launcher: Launcher, tmp_path: Path
) -> None:
    with launcher.start("run", "-n", "2", "--spare-ranks", "1", SCRIPT, str(tmp_path), "counts") as running:
        os.kill(pid(running, WAITS), signal.SIGKILL)
        assert running.until(LOST)[0][2] == "killed (SIGKILL); another one is started"
        stuck = pid(running, WAITS, 2)
        assert " failed: " not in running.text
        stop(stuck)
        os.kill(pid(running, is_rank(1)), signal.SIGKILL)
        assert pid(running, is_rank(1), 2) != stuck
        running.until(r"entered [2-9] with 2")
        assert "is now the spare" not in running.text
        (tmp_path / "done").touch()
        assert running.end() == 0


def test_a_script_that_reads_its_rank_too_early_learns_why_and_runs_without_spares(
    launcher: Launcher, tmp_path: Path
) -> None:
    options = ("run", "-n", "2", "--spare-ranks", "1", "--max-restarts", "1")
    with launcher.start(*options, SCRIPT, str(tmp_path), "early") as running:
        first, last = (found[2] for found in running.until(LOST, 2))
        assert "RANK: this process is a spare (--spare-ranks) and has no rank yet" in first
        assert first.endswith("another one is started")
        assert last.endswith("no more spares are started, and lost ranks are forked (--max-restarts)")
        os.kill(pid(running, is_rank(1)), signal.SIGKILL)
        pid(running, is_rank(1), 2)
        (tmp_path / "done").touch()
        assert running.end() == 0


def test_spares_of_two_nodes_replace_ranks_of_their_own(launcher: Launcher, tmp_path: Path) -> None:
    at = f"127.0.0.1:{free_ports(1)[0]}"
    options = (*PATIENT, "--nnodes", "2", "--rdzv-endpoint", at, "-n", "1")
    rest = (SCRIPT, str(tmp_path), "counts")
    with (
        launcher.session(*options, "--node-rank", "0", *rest) as founder,
        launcher.session(*options, "--node-rank", "1", *rest) as other,
    ):
        pid(founder, WAITS)
        spare = pid(other, WAITS)
        os.kill(pid(other, is_rank(1)), signal.SIGKILL)
        assert pid(other, is_rank(1), 2) == spare
        founder.until(r"entered \d+ with 2", 2)
        (tmp_path / "done").touch()
        assert (founder.end(), other.end()) == (0, 0)
    assert "is now the spare" not in founder.text
    for running in (founder, other):
        launcher.assert_nothing_left(running.marker, running.text)


SHAPE = (
    *("--data", "text", "--steps", "20000", "--context", "16", "--width", "16", "--heads", "2"),
    *("--layers", "1", "--sequences-per-shard", "1", "--shards", "2", "--evaluate-every", "0"),
    *("--checkpoint-every", "0"),
)


def stop_after(running: Running, step: int) -> None:
    """End a run by a signal once it has committed a step."""
    running.until(rf"^step {step} loss")
    running.process.send_signal(signal.SIGTERM)
    running.end()


def digests(run: Path) -> dict[int, str]:
    """The digest of the state at each step that a run has committed."""
    return {record.version: record.digest for record in read_log(run / LOG_NAME)[1]}


def test_zbmd_train_goes_on_with_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    options = (*PATIENT, "-n", "2", "-m", "zbmd", "train", *SHAPE)
    with launcher.start(*options, "--out", "killed") as running:
        spare = pid(running, WAITS)
        os.kill(running.processes()["zbmd-rank1"][0], signal.SIGKILL)
        assert pid(running, r"rank 1 is now the spare, pid (\d+)") == spare
        step = int(running.until(r"rank 1 was killed .* back at step (\d+) after")[0][1])
        stop_after(running, step + 2)
    with launcher.start(*options, "--out", "calm") as running:
        stop_after(running, step + 2)
    found, wanted = digests(tmp_path / "killed"), digests(tmp_path / "calm")
    assert {found[n] == wanted[n] for n in range(1, step + 3)} == {True}


def test_spares_are_refused_where_lost_ranks_are_not_replaced(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", "--spare-ranks", "1", "--on-loss", "shrink", SCRIPT)
    assert ended.code == 2
    assert "--spare-ranks 1 with --on-loss shrink" in ended.errors[-1]
