"""The sweep of kills at every instruction of every program: what it covers, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.collectives.algorithms import ALGORITHMS, Operation
from zbmd.tools import kill_programs
from zbmd.tools.kill_programs import RANKS, Family, Found, families, kill_family


def test_every_program_has_its_points() -> None:
    chosen = list(families(RANKS, ""))
    assert {(family.operation, family.algorithm, family.n) for family in chosen} == {
        (*kind, n) for kind in ALGORITHMS for n in RANKS
    }
    for family in chosen:
        points, kills = family.points(), family.kills(1)
        assert {point for _, point in kills} >= set(range(min(points))), family
        assert all(point < points[victim] for victim, point in kills), family
        # Before it enters, as it tells each of its peers, and at its end.
        assert min(points) >= family.n + 1, family


async def test_some_points_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    found = await kill_family(Family(Operation.REDUCE_SCATTER, "ring", 2), 5, tmp_path)
    assert not found.faults, found
    assert found.reached == found.tried > 1 and found.ends["MembersLost"]


async def test_a_wrong_result_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    planted = kill_programs.SCRIPT.replace(
        "return c.all_reduce(mine, algorithm=algorithm), total",
        "return c.all_reduce(mine, algorithm=algorithm), total + 1",
    )
    assert planted != kill_programs.SCRIPT
    monkeypatch.setattr(kill_programs, "SCRIPT", planted)
    monkeypatch.setattr(Family, "kills", lambda self, stride: [(0, 10_000)])
    found = await kill_family(Family(Operation.ALL_REDUCE, "eager", 2), 99, tmp_path)
    assert found.reached == 0 and any("WRONG" in fault for fault in found.faults), found


def test_who_is_silent_is_a_fault() -> None:
    found = Found(tried=1)
    kill_programs.judge(found, {}, 1, victim=0, point=0, n=2)
    assert found.ends == {"silent": 1} and len(found.faults) == 1
