"""Elastic groups under real kills: at the instructions of an operation and of its commit, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jobs.elastic_job import AT_END, LINES_MAX, ElasticJob, Kill

from zbmd.actors.view import OnLoss, Outcome
from zbmd.collectives.communicator.cost_model import MANY_HOSTS, ONE_HOST

SUM = """
async def operate(group, rank, k):
    # Rank r brings 10^r * k, so a sum tells whose inputs it holds.
    x = np.full(300, 10.0**rank * k)
    if k // 2 % 2:  # else peers read it where it lies
        x = zbmd.from_array(x)
    done = await group.all_reduce(x, timeout=60, **MODE)
    return done, [float(done.value.min()), float(done.value.max())]
"""


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
    job = ElasticJob(tmp_path, SUM, [None] * 5, {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines)
    for k in range(1, 6):
        assert check_sum(job, k) == {"of": (0, 1, 2), "error": "", "ranks": [0, 1, 2]}


REFRESHED = """
async def operate(group, rank, k):
    # As refresh does when its turn comes, and the group has been brought to that view by its follower.
    await group._follow(group.epoch, 30)
    assert await group.refresh(timeout=30) == group.epoch
    return await group.all_reduce(np.ones(3), timeout=30), []
"""


async def test_a_refresh_waits_for_no_view_beyond_the_one_it_wants(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, REFRESHED, [None] * 6)
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
    job = ElasticJob(tmp_path, SUM, kills, {"algorithm": ALGORITHM, **arguments})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    seen: set[str] = set()
    deaths: set[int] = set()
    for k, kill in enumerate(kills, 1):
        end = check_sum(job, k)
        # Who dies once all have the result is missing in the next operation.
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


OWN = """
NAMES = ("reduce", "reduce_scatter", "gather", "scatter", "all_to_all", "all_gather")
UNTOUCHED = -1

async def refused(call):
    try:
        await call
    except zbmd.UserError as error:
        assert "(3, 7)" in str(error) and "a row for each rank" in str(error), error
        return
    raise AssertionError("an out without a row for each rank was taken")

def rooms(name, x):
    # An `out`, with what is given lying in it where it may.
    match name:
        case "reduce":
            return x, x
        case "gather" | "all_gather":
            out = zbmd.from_array(np.full((3, *x.shape), UNTOUCHED))
            out[1] = x
            return out[1], out
        case "all_to_all":
            return x, np.asfortranarray(np.full(x.shape, UNTOUCHED))
    return x, None

async def operate(group, rank, k):
    # Row d of rank r holds 100^k' of r and d: a row tells who made it, and for whom.
    name = NAMES[(k - 1) % len(NAMES)]
    root = k % 3
    length = (7, 3000)[(k - 1) // len(NAMES) % 2]  # every other time what is long goes to an `out`
    row = lambda r: np.array([[(10 * r + d) * 100 + k] * length for d in range(3)], np.int64)
    x, out = zbmd.from_array(row(rank)), None
    if length > 7:
        x, out = rooms(name, x)
    elif k == 5:  # harms nothing
        await refused(group.all_to_all(x, out=np.zeros((2, 7), np.int64)))
    before = None if out is None else out.copy()
    wanted = {"timeout": 60} | ({} if name == "scatter" else MODE) | ({} if out is None else {"out": out})
    if k in ABORTED:
        wanted["on_loss"] = "abort"
    try:
        match name:
            case "reduce" | "gather":
                done = await getattr(group, name)(x, root, **wanted)
            case "scatter":
                place = None if rank == root else np.zeros(length, np.int64)
                done = await group.scatter(x if rank == root else None, root, out=place, **wanted)
            case _:
                done = await getattr(group, name)(x, **wanted)
    except zbmd.PeerLost:
        assert out is None or np.array_equal(out, before), "an operation that failed has written"
        raise
    rows = {r: row(r) for r in range(3)}
    of = [rows[r] for r in done.contributors]
    expected = {
        "reduce": lambda: sum(of) if rank == root else None,
        "reduce_scatter": lambda: sum(of)[rank],
        "gather": lambda: np.stack(of) if rank == root else None,
        "scatter": lambda: rows[root][rank],
        "all_to_all": lambda: np.stack([row[rank] for row in of]),
        "all_gather": lambda: np.stack(of),
    }[name]()
    right = done.value is None if expected is None else np.array_equal(done.value, expected)
    if out is not None:
        n = 0 if expected is None else len(expected)
        right &= np.array_equal(out[n:], before[n:]) and (n == 0 or np.shares_memory(done.value, out))
    return done, [name, bool(right)]
"""
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
    job = ElasticJob(tmp_path, f"{OWN}\nABORTED = {ABORTED}", kills, {"inputs": inputs})
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


UNEVEN = """
NAMES = ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
ROWS = [3, 0, 2]  # of reduce_scatter_v, by rank

def rows_for(r, d, k):  # what rank r gives rank d: none, one or two rows
    return np.full(((r + 2 * d + k) % 3, 2), (10 * r + d) * 100 + k)

async def operate(group, rank, k):
    name, everybody = NAMES[(k - 1) % len(NAMES)], range(3)
    given = {r: [rows_for(r, d, k) for d in everybody] for r in everybody}
    sums = {r: np.arange(10).reshape(5, 2) * 10**r + k for r in everybody}
    mine = np.concatenate(given[rank])
    match name:
        case "all_gather_v":
            done = await group.all_gather_v(zbmd.from_array(mine), timeout=60, **MODE)
            blocks = [np.concatenate(given[r]) for r in done.contributors]
        case "reduce_scatter_v":
            done = await group.reduce_scatter_v(sums[rank], ROWS, timeout=60, **MODE)
            begin = sum(ROWS[:rank])
            blocks = [sum(sums[r] for r in done.contributors)[begin : begin + ROWS[rank]]]
        case "all_to_all_v":
            sends, receives = [len(rows) for rows in given[rank]], [len(given[s][rank]) for s in everybody]
            out = np.full((sum(receives), 2), -1) if k % 2 else None
            done = await group.all_to_all_v(mine, sends, receives, out=out, timeout=60, **MODE)
            blocks = [given[s][rank] for s in done.contributors]
            n = sum(map(len, blocks))
            assert out is None or (np.array_equal(out[:n], done.value) and (out[n:] == -1).all())
    counted = not done.rows or done.rows == tuple(len(block) for block in blocks)
    return done, [name, bool(counted and np.array_equal(done.value, np.concatenate(blocks)))]
"""
MANY = """
def arrays(rank, k):  # two that travel together, one of another dtype, and one that goes alone
    return [np.full(n, 10**rank * k, t) for n, t in ((3, "f4"), (5, "f8"), (70, "f4"), (1 << 16, "f4"))]

async def operate(group, rank, k):
    given = arrays(rank, k)
    done = await group.all_reduce_many(given, op="avg" if k % 2 else "sum", timeout=60, **MODE)
    total = k * sum(10**r for r in done.contributors)
    wanted = total / len(done.contributors) if k % 2 else total
    right = all(np.allclose(x, wanted) for x in done.value)
    kept = MODE["inputs"] == "recompute" or all(map(np.array_equal, given, arrays(rank, k)))
    return done, [bool(right), kept]
"""


@pytest.mark.parametrize("mode", ["preserve", "recompute", "adopt"])
async def test_many_arrays_in_one_operation(tmp_path: Path, mode: str) -> None:
    kills: list[Kill] = [(k % 3, run, point) for k, (run, point) in enumerate(MANY_POINTS)]
    job = ElasticJob(tmp_path, MANY, kills, MODES[mode][0])
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
    job = ElasticJob(tmp_path, UNEVEN, kills, MODES[mode][0])
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


TAGS = """
import asyncio
import os
import signal

LARGE = 20_000

async def exchange(group, rank, others, k):
    posted = [(to, n) for to in others for n in (3, LARGE)]
    sends = [group.send(np.full(n, 10.0 * rank + k), to, tag=10 * k + (n > 3)) for to, n in posted]
    sending, right = asyncio.gather(*sends), True
    for source, n in reversed([(source, n) for source in others for n in (3, LARGE)]):
        got = await group.recv(source, tag=10 * k + (n > 3), timeout=40)
        right &= got.array.size == n and bool((got.array == 10.0 * source + k).all())
    await sending
    return right

async def lost(call):
    try:
        await call
    except zbmd.PeerLost as error:
        return list(error.ranks)

async def operate(group, rank, k):
    told = []
    if k == 2 and LIFE == 1:
        if rank == 2:
            for source in (0, 1):  # both wait for what never comes
                await group.recv(source, tag=77, timeout=40)
            os.kill(os.getpid(), signal.SIGKILL)
        waits = [group.recv(2, tag=99, timeout=40), group.send(np.zeros(LARGE), 2, tag=55, timeout=40)]
        waits = [asyncio.ensure_future(lost(call)) for call in waits]
        await group.send(np.ones(1), 2, tag=77)
        told = [await call for call in waits]
        told += [await lost(group.send(np.ones(1), 2)), await lost(group.recv(tag=66, timeout=40))]
        told += [await exchange(group, rank, [1 - rank], 9)]  # who lives does not notice
    done = await group.barrier(on_loss="wait_for_replacement", timeout=60)
    known, right = group.group.communicator, await exchange(group, rank, [0, 1, 2], k)
    return done, [told, right, str(known.model), known._executor.reads_peers]
"""


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_tagged_messages_while_a_rank_dies_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    monkeypatch.setenv("ZBMD_LINKS", links)
    job = ElasticJob(tmp_path, TAGS, [None] * 3)
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


THREADS = """
import asyncio
from zbmd.transport.errors import LocalProtocolError

def blocked(group, rank, k):
    # On another thread than the loop's: this one waits, and the loop repairs the group meanwhile.
    told, call = [], group.blocking
    if k == 4 and rank != 2:
        try:
            call.recv(2, tag=7, timeout=40)  # which dies without a word
        except zbmd.PeerLost as error:
            told = list(error.ranks)
    done = call.all_reduce(np.full(300, 10.0**rank * k), timeout=60, **MODE)
    return done, [float(done.value.min()), float(done.value.max()), told]

def parted(group, rank):
    part = group.blocking.split(rank % 2, timeout=60)  # operation 1
    if rank != 1:
        part.blocking.send(np.full(3, rank), 2 - rank, tag=5)
        got = part.blocking.recv(tag=5, timeout=40)
        assert (got.source, int(got.array.sum())) == (2 - rank, 3 * (2 - rank)), got
    return part

async def operate(group, rank, k):
    if k == 1:
        try:
            group.blocking.barrier()
        except LocalProtocolError as error:
            assert "await" in str(error), error
        else:
            raise AssertionError("a call that holds up the loop was taken")
        await (await asyncio.to_thread(parted, group, rank)).close()
    return await asyncio.to_thread(blocked, group, rank, k)
"""


async def test_calls_from_threads_outlive_a_death(tmp_path: Path) -> None:
    kills: list[Kill] = [None, None, (1, 1, 3), (2, 1, 0), (0, 1, 5), None]
    job = ElasticJob(tmp_path, THREADS, kills, {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    assert job.end_of(1) == ((0, 1, 2), "") and {3, 4, 5} == {k for k in (3, 4, 5) if job.died_in(k)}
    for k in (1, 3, 4, 5, 6):  # the first calls were the split, and operation 2
        of, error = job.end_of(k)
        total = k * sum(10.0**rank for rank in of)
        assert not error and of, job.told[k]
        assert all(found["value"][:2] == [total, total] for found in job.told[k].values()), job.told[k]
    assert all(found["value"][2] == [2] for rank, found in job.told[4].items() if rank != 2), job.told[4]


ROOTED = """
async def operate(group, rank, k):
    x = zbmd.from_array(np.full(300, 10.0**rank * k))
    done = await (group.broadcast(x, 2, timeout=60) if k == 2 else group.all_reduce(x, timeout=60, **MODE))
    return done, [float(done.value.min()), float(done.value.max())]
"""


async def test_an_absent_root_fails_its_operation_and_not_the_group(tmp_path: Path) -> None:
    kills: list[Kill] = [(2, 1, 0), None, None]
    job = ElasticJob(tmp_path, ROOTED, kills, {"inputs": "preserve"}, on_loss=OnLoss.SHRINK)
    result = await job.run()
    assert [job.end_of(k) for k in (1, 2, 3)] == [((0, 1), ""), ((), "MembersLost"), ((0, 1), "")]
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    assert {found["value"][0] for found in job.told[3].values()} == {33.0}
