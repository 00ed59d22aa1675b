"""The sweep of kills at every instruction of every program: what it covers, and a short run of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation
from zbmd.tools.chaos import kill_pool as kill_rank
from zbmd.tools.chaos import programs as kill_programs
from zbmd.tools.chaos.kill_pool import (
    AGAIN,
    FIRST,
    RANKS,
    RUNS,
    Family,
    Kill,
    KillOutcome,
    KillPool,
    PoolBroken,
    families,
    judge,
    kills_of,
)
from zbmd.tools.chaos.programs import Ledger, entry_of
from zbmd.transport.errors import UserError

RING = Family(Operation.REDUCE_SCATTER, "ring", 2)


def test_every_program_has_its_points() -> None:
    chosen = list(families(RANKS, ""))
    assert {(family.operation, family.algorithm, family.n) for family in chosen} == {
        (*kind, n) for kind in ALGORITHMS for n in RANKS
    }
    for family in chosen:
        points, kills = family.points(), kills_of(family, 1, RUNS)
        assert {(kill.victim, kill.point, kill.run) for kill in kills if not kill.beyond} == {
            (victim, point, run)
            for victim in range(family.n)
            for point in range(points[victim])
            for run in RUNS
        }
        assert sum(kill.beyond for kill in kills) == family.n * len(RUNS)
        # Before it enters, as it tells each of its peers, and at its end.
        assert min(points) >= family.n + 1, family
        assert len({kill.key for kill in kills}) == len(kills)


def test_some_points_of_a_program() -> None:
    kills = kills_of(RING, 3, RUNS)
    with KillPool(2) as pool:
        outcomes = [(kill, pool.kill(kill)) for kill in kills]
    assert [judge(kill, outcome) for kill, outcome in outcomes] == [[] for _ in kills]
    assert {outcome.died for kill, outcome in outcomes if not kill.beyond} == {True}
    ends = {end for _, outcome in outcomes for end in outcome.ends.values()}
    assert {"MembersLost [0]", "MembersLost [1]"} <= ends <= {"MembersLost [0]", "MembersLost [1]", "right"}


def test_a_wrong_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    operate = kill_rank.operate

    def planted(*asked: Any) -> tuple[Any, Any]:
        got, wanted = operate(*asked)
        return got, wanted + 1

    monkeypatch.setattr(kill_rank, "operate", planted)  # the ranks are forks: it is planted in them, too
    kill = Kill(Family(Operation.ALL_REDUCE, "eager", 2), 0, 99, FIRST, beyond=True)
    with KillPool(2) as pool:
        assert judge(kill, pool.kill(kill)) == ["rank 0 ended with WRONG", "rank 1 ended with WRONG"]


def test_what_is_judged_a_fault() -> None:
    calm = Kill(Family(Operation.ALL_REDUCE, "ring", 2), 0, 99, AGAIN, beyond=True)
    assert not judge(calm, KillOutcome(died=False, ends={0: "right", 1: "right"}, again={}))
    assert judge(calm, KillOutcome(died=False, ends={0: "ran direct", 1: "right"}, again={}))
    assert judge(calm, KillOutcome(died=True, ends={1: "right"}, again={1: "right"}))
    dies = Kill(calm.family, 0, 1, FIRST)
    assert judge(dies, KillOutcome(died=False, ends={0: "right", 1: "right"}, again={}))
    assert judge(dies, KillOutcome(died=True, ends={1: "MembersLost [1]"}, again={1: "right"}))
    assert judge(dies, KillOutcome(died=True, ends={1: "MembersLost [0]"}, again={1: "MembersLost [0]"}))
    assert not judge(dies, KillOutcome(died=True, ends={1: "MembersLost [0]"}, again={1: "right"}))
    slower = KillOutcome(died=True, ends={1: "before: MembersLost [0]"}, again={1: "right"})
    assert judge(dies, slower)
    later = Kill(calm.family, 0, 1, AGAIN)
    assert not judge(later, slower)
    assert judge(later, KillOutcome(died=True, ends={1: "before: WRONG"}, again={1: "right"}))


def test_who_ends_by_itself_breaks_the_pool() -> None:
    with KillPool(2) as pool:
        os.kill(pool.pid(1), signal.SIGKILL)
        with pytest.raises(PoolBroken, match="rank 1 ended by itself"):
            pool.kill(Kill(RING, 0, 99, FIRST, beyond=True))


def test_a_sweep_goes_on_where_it_was_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kills.jsonl"
    kills = kills_of(RING, 1, RUNS)
    ledger = Ledger(path)
    for kill in kills[:-1]:
        ledger.add(entry_of(kill, KillOutcome(died=not kill.beyond, ends={1: "right"}, again={}), []))
    with path.open("ab") as torn:
        torn.write(b'{"key": "half of a li')
    assert kill_programs.main(["--ranks", "2", "--only", "reduce_scatter/ring", "--ledger", str(path)]) == 0
    said = capsys.readouterr().out
    assert "1 tried now" in said and "0 faulty" in said
    assert all(map(Ledger(path).has, kills))
    path.write_bytes(b'{"no": 1}\n')
    with pytest.raises(UserError, match="line 1"):
        Ledger(path)
