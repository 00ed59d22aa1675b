"""Priorities among real ranks: the order is the same on all, and that of the calls' priorities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from programs import PROGRAMS
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.view import Outcome
from zbmd.transport.errors import UserError


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_what_is_urgent_goes_first_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    script = PROGRAMS / "collectives/priorities.py"
    ended = await run_and_kill_the_last(script, tmp_path, monkeypatch, ranks=3, links=links)
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["ready"] == {0, 1, 2} and ended.said["done"] == {0, 1}, ended.lines


async def test_a_group_without_priorities_says_so() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        for call in (group.barrier(priority=1), group.all_reduce(np.ones(1), priority=128)):
            with pytest.raises(UserError, match="priorities=True"):
                await call
        with pytest.raises(UserError, match="priorities=True"):
            group.blocking.barrier(priority=1)
        await group.barrier(priority=0)
        await group.close()
