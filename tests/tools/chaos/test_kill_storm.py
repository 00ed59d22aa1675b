"""The storm of kills by the clock: a short run of it in real processes, and what it takes for a fault."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import pytest

from zbmd.actors.cluster.jobs.reports import RankDown, RankStarted
from zbmd.tools.chaos import storm as kill_storm
from zbmd.tools.chaos.small_job import JobOutcome
from zbmd.tools.chaos.storm import Victims, kinds, main
from zbmd.training.redundancy.machine import LOST_WITH_BUDDY
from zbmd.transport.errors import UserError


def test_runs_with_kills_at_any_moment_end_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "3", "--seed", "2", "--only", "n=2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["seed 2, 3 settings", "3 runs, 0 wrong"]


async def test_only_who_lives_is_killed() -> None:
    sleepers = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
    victims = Victims(random.Random(0))
    await victims.kill([0.0])
    assert not victims.told
    for rank, one in enumerate(sleepers):
        victims.see(RankStarted(rank=rank, incarnation=1, pid=one.pid, asked_ns=0, at_ns=0))
    victims.see(ended(1, sleepers[1].pid))
    await victims.kill([0.0, 0.0])
    assert await sleepers[0].wait() == -signal.SIGKILL and victims.told
    assert sleepers[1].returncode is None
    sleepers[1].kill()
    await sleepers[1].wait()


def ended(rank: int, pid: int) -> RankDown:
    return RankDown(
        rank=rank,
        incarnation=1,
        pid=pid,
        code=-9,
        reason="",
        normal=False,
        expected=False,
        noticed_ns=None,
        confirmed_ns=0,
        tail=(),
        next_step="",
    )


def storm_of(monkeypatch: pytest.MonkeyPatch, end: JobOutcome | UserError, *, kills: int) -> int:
    """Return what the tool reports of a disturbed run that ends so, after so many kills."""
    runs = iter([JobOutcome(digest="a", failures=(), told=""), end])

    async def run(*_: Any, **__: Any) -> JobOutcome:
        await asyncio.sleep(0)  # the killing begins
        one = next(runs)
        if isinstance(one, UserError):
            raise one
        return one

    async def kill(self: Victims, delays_s: Any) -> None:
        self.told += ["rank 0 at 0.1 s"] * kills * bool(delays_s)

    monkeypatch.setattr(kill_storm, "run_small_job", run)
    monkeypatch.setattr(Victims, "kill", kill)
    return main(["--runs", "1", "--seed", "2"])


@pytest.mark.parametrize("kills", [1, 2])
def test_other_bits_are_a_fault(monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    assert storm_of(monkeypatch, JobOutcome(digest="b", failures=(), told=""), kills=kills) == 1
    assert storm_of(monkeypatch, JobOutcome(digest="a", failures=(), told=""), kills=kills) == 0


def test_a_state_may_be_lost_with_two_ranks_and_not_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storm_of(monkeypatch, UserError(f"it failed: {LOST_WITH_BUDDY}"), kills=2) == 0
    assert storm_of(monkeypatch, UserError(f"it failed: {LOST_WITH_BUDDY}"), kills=1) == 1
    assert storm_of(monkeypatch, UserError("it hung"), kills=2) == 1


def test_settings_are_all_of_the_sweep_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(kind) for kind in kinds()]
    assert len(names) == len(set(names)) >= 12 and "replicas n=3 auto" in names
    with pytest.raises(SystemExit):
        main(["--only", "tp=3"])
    assert "no setting contains 'tp=3'" in capsys.readouterr().err
