"""A job of more ranks than a word has bits: real processes, and a kill beyond the first word."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

RANKS = 66


@pytest.mark.slow
def test_a_kill_behind_the_first_64_ranks_is_noticed_and_replaced(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", str(RANKS), "-m", "zbmd.tools.chaos.many_ranks")
    assert ended.code == 0, ended
    told = "\n".join(ended.out + ended.errors)
    assert f"rank {RANKS - 2} was killed (SIGKILL); {RANKS} ranks together again (epoch 2)" in told, ended
    assert re.search(rf"^\[rank0\]: all {RANKS} ranks are done$", told, re.MULTILINE), ended
