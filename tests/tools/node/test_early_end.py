"""A rank that ends before the others: the last line of a run that failed for want of it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("elsewhere", "By then rank 0 had finished: operations that need it fail."),
        ("waits", "Before that: rank 0 closed the group; barrier #"),
    ],
)
def test_the_last_line_names_the_rank_that_is_missing(launcher: Launcher, how: str, told: str) -> None:
    script = str(PROGRAMS / "node" / "ends_early.py")
    ended = launcher.run("run", "-n", "2", "--on-loss", "stop", script, how)
    assert ended.code == 1, ended
    assert "The first failure was rank 1's: exit code 5." in ended.errors[-1], ended
    assert told in ended.errors[-1], ended
