"""`--start-timeout`: how long a replacement may take to import and join, while the others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from programs import PROGRAMS

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

SLOW = str(PROGRAMS / "launched" / "slow_start.py")
NEVER = "3600"


def test_a_replacement_that_does_not_join_in_the_time_that_was_set_is_told_in_words(
    launcher: Launcher,
) -> None:
    ended = launcher.run("run", "-n", "2", "--max-restarts", "1", "--start-timeout", "500ms", SLOW, NEVER)
    assert ended.code == 1, ended
    words = "rank1 failed: it was started 500ms ago and has not joined its job, whose other ranks wait for it"
    assert words in ended.errors[-1] and "more time with --start-timeout" in ended.errors[-1]


def test_another_one_is_tried_after_it(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", SLOW, NEVER, ZBMD_START_TIMEOUT="6s")
    assert ended.code == 0, ended
    (told,) = (line for line in ended.errors if "incarnation 2) failed" in line)
    assert "killed (SIGKILL): it was started 6s ago" in told and "replacement starts" in told


def test_a_slow_import_is_no_failure_whatever_the_budget(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", "--recovery-budget", "100ms", SLOW, "1")  # 10 budgets
    assert ended.code == 0, ended
    assert sorted(ended.out) == ["[rank0]: incarnation 1", "[rank1]: incarnation 2"], ended
