"""`--start-timeout`: how long a replacement may take to import and join, while the others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

SLOW = """
import os, signal, time
import zbmd

if os.environ["ZBMD_INCARNATION"] == "2":
    if os.environ["RANK"] == "1":
        time.sleep({seconds})  # an import, as it were


async def main():
    async with zbmd.join() as worker:
        if worker.incarnation == 1 and worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await worker.view(after=1)
        print("epoch", worker.epoch, flush=True)


zbmd.run(main())
"""


@pytest.fixture
def slow(launcher: Launcher) -> str:
    """A script whose second incarnation of rank 1 never joins."""
    (launcher.directory / "slow.py").write_text(SLOW.format(seconds=3600))
    return "slow.py"


def test_a_replacement_that_does_not_join_in_the_time_that_was_set_is_told_in_words(
    launcher: Launcher, slow: str
) -> None:
    ended = launcher.run("run", "-n", "2", "--max-restarts", "1", "--start-timeout", "500ms", slow)
    assert ended.code == 1, ended
    words = "rank1 failed: it was started 500ms ago and has not joined its job, whose other ranks wait for it"
    assert words in ended.errors[-1] and "more time with --start-timeout" in ended.errors[-1]


def test_another_one_is_tried_after_it(launcher: Launcher, slow: str) -> None:
    ended = launcher.run("run", "-n", "2", slow, ZBMD_START_TIMEOUT="500ms")
    assert ended.code == 0, ended
    (told,) = (line for line in ended.errors if "incarnation 2) failed" in line)
    assert "killed (SIGKILL): it was started 500ms ago" in told and "replacement starts" in told


def test_a_slow_import_is_no_failure_whatever_the_budget(launcher: Launcher) -> None:
    (launcher.directory / "slow.py").write_text(SLOW.format(seconds=6))  # 60 budgets
    ended = launcher.run("run", "-n", "2", "--recovery-budget", "100ms", "slow.py")
    assert ended.code == 0, ended
    assert sorted(ended.out) == ["[rank0]: epoch 2", "[rank1]: epoch 2"], ended
