"""Elastic groups under real kills: at the instructions of an operation and of its commit, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jobs.elastic_job import LINES_MAX, ElasticJob
from support.jobs.elastic_rank import AT_END, Kill

from zbmd.actors.view import OnLoss, Outcome
from zbmd.collectives.communicator.cost_model import MANY_HOSTS, ONE_HOST


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def check_sum(job: ElasticJob, k: int) -> dict[str, Any]:
    """That all who saw the end of operation k saw the same, and that a sum is of its contributors."""
    of, error = job.end_of(k)
    for found in job.told[k].values():
        if not error:
            total = k * sum(10.0**rank for rank in of)
            assert found["value"] == [total, total], found
    return {"of": of, "error": error, "ranks": sorted(job.told[k])}


async def test_operations_without_a_death(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, "sum.py", [None] * 5, {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines)
    for k in range(1, 6):
        assert check_sum(job, k) == {"of": (0, 1, 2), "error": "", "ranks": [0, 1, 2]}


async def test_a_refresh_waits_for_no_view_beyond_the_one_it_wants(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, "refresh.py", [None] * 6)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines)
    assert {tuple(told["of"]) for by in job.told.values() for told in by.values()} == {(0, 1, 2)}


NOTHING: set[str] = set()
MODES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "preserve": ({"inputs": "preserve"}, {"all", "survivors"}, NOTHING),
    "recompute": ({"inputs": "recompute"}, {"all", "survivors", "InputsOverwritten"}, NOTHING),
    "adopt": ({"inputs": "adopt"}, {"all"}, {"survivors"}),
    "wait": ({"inputs": "preserve", "on_loss": "wait_for_replacement"}, {"all"}, NOTHING),
    "abort": ({"inputs": "preserve", "on_loss": "abort"}, {"all", "MembersLost"}, NOTHING),
}
"""Of each mode: the arguments, how operations end, all of which is to be seen, and how they may end besides:
who dies just behind an operation has published nothing for the next one, or has."""

ALGORITHM = "direct"
POINTS_MAX = 16
"""More than the program of three ranks, and its commit, have."""


STRIDE = 2
"""Every so many-th point is for a mode, so two modes together have all of them."""


def plan(world_size: int, first: int) -> list[Kill]:
    """One kill an operation: at points of its program, and of its commit; a calm one at the end.

    A point that there is not kills nobody.
    """
    places = [(run, point) for run in (1, 2) for point in range(first, POINTS_MAX, STRIDE)]
    return [(k % world_size, run, point) for k, (run, point) in enumerate([(1, 0), *places])] + [None]


@pytest.mark.parametrize("mode", MODES)
async def test_a_kill_at_every_other_instruction(tmp_path: Path, mode: str) -> None:
    arguments, expected, besides = MODES[mode]
    kills = plan(3, first=list(MODES).index(mode) % STRIDE)
    job = ElasticJob(tmp_path, "sum.py", kills, {"algorithm": ALGORITHM, **arguments})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    seen: set[str] = set()
    deaths: set[int] = set()
    for k, kill in enumerate(kills, 1):
        end = check_sum(job, k)
        # A rank that dies once all have the result is missing in the next operation.
        earlier = kills[k - 2] if k - 1 in deaths else None
        struck = {victim[0] for victim in (earlier, kill) if victim}
        if job.died_in(k):
            deaths.add(k)
        absent = set(range(3)) - set(end["ranks"])
        assert absent <= struck, (k, kill, end)
        how = "all" if len(end["of"]) == 3 else "survivors"
        seen.add(end["error"] or how)
        if mode == "adopt" and not deaths & {k - 1}:
            # What the dead had published counts: without it only who died after the operation before is.
            assert how == "all", (k, end)
        assert deaths & {k - 1, k} or (how == "all" and not end["error"]), (k, end)
    assert len(deaths) > 4 and expected <= seen <= expected | besides, (deaths, seen)


OPERATIONS = 6
ABORTED = (11, 12)
"""Operations with an `out` whose members die once data has moved: they fail on all."""
POINTS = ((1, 0), (1, 5), (1, 2), (1, 8), (2, 1), (2, 3))
"""Before it enters, while data moves, before and behind that, and in the commit."""


@pytest.mark.parametrize("inputs", ["preserve", "adopt"])
async def test_operations_whose_results_differ_by_rank(tmp_path: Path, inputs: str) -> None:
    kills: list[Kill] = []
    for run, point in POINTS:
        kills += [((len(kills) + i + i // 3) % 3, run, point) for i in range(OPERATIONS)]
    job = ElasticJob(tmp_path, "rows_by_rank.py", kills, {"inputs": inputs}, arguments=ABORTED)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    deaths: set[int] = set()
    aborted: set[int] = set()
    ways: dict[str, set[str]] = {"all": set(), "survivors": set()}
    for k in range(1, len(kills) + 1):
        of, error = job.end_of(k)
        if job.died_in(k):
            deaths.add(k)
        for found in job.told[k].values():
            assert error or found["value"][1], found
        aborted |= {k} if error and k in ABORTED else set()
        if error:  # a root that has died, in it or just behind the operation before, has taken it along
            assert error == "MembersLost" and deaths & {k - 1, k}, job.told[k]
            continue
        name = next(iter(job.told[k].values()))["value"][0]
        if k in deaths:
            ways["all" if len(of) == 3 else "survivors"].add(name)
    assert len(deaths) > OPERATIONS and aborted, deaths
    # A dead rank's input was still counted, in each of five operations if it is adopted, or was not.
    found = (ways["all"] if inputs == "adopt" else ways["survivors"]) - {"scatter"}
    assert len(found) == 5, ways


@pytest.mark.parametrize("mode", ["preserve", "recompute", "adopt"])
async def test_many_arrays_in_one_operation(tmp_path: Path, mode: str) -> None:
    kills: list[Kill] = [(k % 3, run, point) for k, (run, point) in enumerate(MANY_POINTS)]
    job = ElasticJob(tmp_path, "many_arrays.py", kills, MODES[mode][0])
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    deaths, sizes = 0, set[int]()
    for k in range(1, len(kills) + 1):
        of, error = job.end_of(k)
        assert error in ({"", "InputsOverwritten"} if mode == "recompute" else {""}), job.told[k]
        assert error or all(all(found["value"]) for found in job.told[k].values()), job.told[k]
        deaths += job.died_in(k)
        sizes.add(len(of))
    assert deaths > 3 and 3 in sizes, (deaths, sizes)


MANY_POINTS = ((1, 2), (2, 2), (2, 4), (3, 2), (3, 5), (4, AT_END))
"""In each of the three packs, and in the commit."""
UNEVEN_POINTS = ((1, 0), (1, 2), (2, 2), (2, 4), (3, 1))
"""Before they tell each other how many rows there are, meanwhile, while these move, and in the commit."""
UNEVEN_ENDS: list[Kill] = [None, (0, 3, AT_END), None, (1, 3, AT_END), None, (2, 3, AT_END), None]
"""Once all have the rows."""


@pytest.mark.parametrize("mode", ["preserve", "adopt", "wait"])
async def test_operations_of_uneven_rows(tmp_path: Path, mode: str) -> None:
    kills: list[Kill] = []
    for run, point in UNEVEN_POINTS:
        kills += [((len(kills) + i + i // 3) % 3, run, point) for i in range(3)]
    kills += UNEVEN_ENDS
    job = ElasticJob(tmp_path, "uneven_rows.py", kills, MODES[mode][0])
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    ends: dict[str, set[int]] = {}
    deaths = 0
    for k in range(1, len(kills) + 1):
        of, error = job.end_of(k)
        assert not error and all(found["value"][1] for found in job.told[k].values()), job.told[k]
        deaths += job.died_in(k)
        ends.setdefault(next(iter(job.told[k].values()))["value"][0], set()).add(len(of))
    assert deaths > 6, deaths
    # Rows of the dead are absent, or count, or their operation has waited for them.
    assert all(3 in sizes for sizes in ends.values()) and len(ends) == 3, ends
    if mode != "adopt":  # who dies just behind an operation has published nothing for the next
        assert any(2 in sizes for sizes in ends.values()) == (mode == "preserve"), ends


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_tagged_messages_while_a_rank_dies_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    monkeypatch.setenv("ZBMD_LINKS", links)
    job = ElasticJob(tmp_path, "tags.py", [None] * 3)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    for k in (1, 2, 3):
        assert job.end_of(k) == ((0, 1, 2), ""), job.told[k]
        assert all(found["value"][1] for found in job.told[k].values()), job.told[k]
    told = {rank: found["value"][0] for rank, found in job.told[2].items()}
    assert told == {0: [[2], [2], [2], [2], True], 1: [[2], [2], [2], [2], True], 2: []}, job.lines[
        -LINES_MAX:
    ]
    assert job.told[3][2]["incarnation"] == 2
    # What was measured when the group was founded is by what all choose, who came later, too.
    models = {found["value"][2] for by in job.told.values() for found in by.values()}
    assert len(models) == 1 and not models & {str(ONE_HOST), str(MANY_HOSTS)}, models
    # And each view's members have tried whether they can read each other's memory, as a plain group's have.
    assert {found["value"][3] for by in job.told.values() for found in by.values()} == {links == "auto"}


async def test_calls_from_threads_outlive_a_death(tmp_path: Path) -> None:
    kills: list[Kill] = [None, None, (1, 1, 3), (2, 1, 0), (0, 1, 5), None]
    job = ElasticJob(tmp_path, "threads.py", kills, {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    assert job.end_of(1) == ((0, 1, 2), "") and {3, 4, 5} == {k for k in (3, 4, 5) if job.died_in(k)}
    for k in (1, 3, 4, 5, 6):  # the first calls were the split, and operation 2
        of, error = job.end_of(k)
        total = k * sum(10.0**rank for rank in of)
        assert not error and of, job.told[k]
        assert all(found["value"][:2] == [total, total] for found in job.told[k].values()), job.told[k]
    assert all(found["value"][2] == [2] for rank, found in job.told[4].items() if rank != 2), job.told[4]


async def test_an_absent_root_fails_its_operation_and_not_the_group(tmp_path: Path) -> None:
    kills: list[Kill] = [(2, 1, 0), None, None]
    job = ElasticJob(tmp_path, "rooted.py", kills, {"inputs": "preserve"}, on_loss=OnLoss.SHRINK)
    result = await job.run()
    assert [job.end_of(k) for k in (1, 2, 3)] == [((0, 1), ""), ((), "MembersLost"), ((0, 1), "")]
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    assert {found["value"][0] for found in job.told[3].values()} == {33.0}
