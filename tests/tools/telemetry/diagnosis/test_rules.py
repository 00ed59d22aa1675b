"""The rules of a diagnosis: what follows from another failure is never the root, whatever came first."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.tools.telemetry.diagnosis.evidence import (
    Death,
    Evidence,
    Failure,
    Hang,
    Launcher,
    Place,
    Slow,
    failure_of,
    users_place,
)
from zbmd.tools.telemetry.diagnosis.findings import Cause, as_json, as_text
from zbmd.tools.telemetry.diagnosis.rules import diagnose

LAUNCHER = Launcher(
    host="a", pid=7, command="train.py", began_ns=1, last_ns=10**6, outcome="failed", exit_code=1, alive=False
)
OWN = Failure("ValueError", "bad sample", Place("train.py", 12, "read"))
LOST = Failure("PeerLost", "rank1 lost", Place("train.py", 30, "main"))


def death(rank: int, at_ns: int, *, failure: Failure | None = None, code: int = 1, **more: object) -> Death:
    given: dict[str, object] = {
        "rank": rank,
        "incarnation": 1,
        "at_ns": at_ns,
        "code": code,
        "reason": f"exit code {code}",
        "next_step": "the run ends",
        "failure": failure,
        **more,
    }
    return Death(**given)  # type: ignore[arg-type]


ROOTS = {
    Cause.EXCEPTION: {"failure": OWN},
    Cause.CRASHED: {"code": -int(signal.SIGSEGV)},
    Cause.KILLED: {"code": -int(signal.SIGKILL)},
    Cause.EXITED: {"code": 7},
    Cause.MEMORY: {"code": -int(signal.SIGKILL), "no_memory": True},
    Cause.DISK: {"failure": Failure("OSError", "[Errno 28] No space left on device")},
}


@given(
    cause=st.sampled_from(sorted(ROOTS, key=str)),
    who=st.integers(0, 5),
    times=st.lists(st.integers(2, 1000), min_size=6, max_size=6, unique=True),
    asked=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_a_rank_that_failed_for_anothers_end_is_never_the_root(
    cause: Cause, who: int, times: list[int], asked: list[bool]
) -> None:
    deaths = [
        death(rank, times[rank], **ROOTS[cause])  # type: ignore[arg-type]
        if rank == who
        else death(rank, times[rank], failure=None if asked[rank] else LOST, expected=asked[rank], code=1)
        for rank in range(6)
    ]
    deaths.sort(key=lambda one: one.at_ns)
    found = diagnose(Evidence(launchers=(LAUNCHER,), deaths=tuple(deaths)))
    assert found.root is not None
    assert (found.root.cause, found.root.ranks) == (cause, (who,))
    assert found.followed[-1] == "the run failed, exit code 1"


@given(st.permutations(range(3)), st.sampled_from(["shape", "dtype", "order"]), st.sampled_from([1, 3]))
def test_of_ranks_that_call_different_things_the_odd_one_is_named(
    order: list[int], what: str, known: int
) -> None:
    odd, calls = order[0], dict.fromkeys(range(3), "all_reduce(float32[64], sum, root=0)")
    calls[odd] = {
        "shape": "all_reduce(float32[65], sum, root=0)",
        "dtype": "all_reduce(float64[64], sum, root=0)",
        "order": "broadcast(uint8[64], sum, root=0)",
    }[what]
    deaths = []
    for place, rank in enumerate(order[:known]):
        other = odd if rank != odd else order[1]
        text = f"operation #9: rank {rank} called {calls[rank]} by plan 1, rank {other} called {calls[other]}"
        if known == 1:  # the run was ended before others could say what they had called
            (third,) = {0, 1, 2} - {rank, other}
            text += f" by plan 1, rank {third} called {calls[third]}"
        deaths.append(death(rank, place + 2, failure=Failure("Desynchronised", text), expected=place > 0))
    found = diagnose(Evidence(launchers=(LAUNCHER,), deaths=tuple(deaths)))
    assert found.root is not None
    assert (found.root.cause.value, found.root.ranks) == (f"collective-{what}", (odd,))


HANG = Hang(
    at_ns=50,
    text="rank 1 never entered all_reduce #9; rank1 is at train.py:7 in load",
    ranks=(1,),
    stack=(Place("/v/lib/python3.11/asyncio/runners.py", 118, "run"), Place("train.py", 7, "load")),
    process="runs",
)


def test_a_hang_is_the_root_of_the_end_that_it_led_to() -> None:
    ends = (death(0, 60, code=-15, expected=True), death(1, 61, code=-9, expected=True))
    found = diagnose(Evidence(launchers=(LAUNCHER,), deaths=ends, hangs=(HANG,)))
    assert found.root is not None
    assert (found.root.cause, found.root.ranks) == (Cause.BUSY, (1,))
    assert found.root.place == "train.py:7 in load"


def test_a_hang_that_is_over_or_comes_after_a_death_is_not_the_root() -> None:
    over = Hang(at_ns=55, text=f"over: {HANG.text}", ranks=(1,), stack=(), over=True)
    failed = death(2, 70, failure=OWN)
    for hangs, deaths in (((HANG, over), (failed,)), ((HANG,), (death(2, 10, failure=OWN),))):
        found = diagnose(Evidence(launchers=(LAUNCHER,), deaths=deaths, hangs=hangs))
        assert found.root is not None
        assert (found.root.cause, found.root.ranks) == (Cause.EXCEPTION, (2,))


@pytest.mark.parametrize(
    ("launcher", "cause"),
    [
        ({"outcome": ""}, Cause.LAUNCHER),
        ({"outcome": "", "nodes": 2}, Cause.NODE),
        ({"outcome": "", "rebooted": True}, Cause.HOST),
        ({"outcome": "refused", "cause": "PortInUse", "reason": "taken"}, Cause.ADDRESS),
        ({"outcome": "stopped", "reason": "SIGTERM received"}, Cause.ASKED),
    ],
)
def test_ends_of_launchers(launcher: dict[str, object], cause: Cause) -> None:
    given: dict[str, object] = {
        "host": "a",
        "pid": 7,
        "command": "train.py",
        "began_ns": 1,
        "last_ns": 9,
        "alive": False,
        **launcher,
    }
    found = diagnose(Evidence(launchers=(Launcher(**given),)))  # type: ignore[arg-type]
    assert found.root is not None
    assert found.root.cause is cause


def test_a_slow_link_between_two_of_many_hosts_is_the_root_until_it_is_over() -> None:
    def named(first: int, other: int, at_ns: int, *, over: bool = False) -> Slow:
        is_slow = "is no longer slow (cause link)" if over else "is slow: a step takes 1.83 times as long"
        text = f"the link between 10.0.0.{first} (rank {first}) and 10.0.0.{other} (rank {other}) {is_slow}"
        return Slow(rank=first, cause="link", step=at_ns, at_ns=at_ns, text=text, over=over)

    told = (named(1, 2, 5), named(1, 3, 6), named(1, 2, 7, over=True))
    found = diagnose(Evidence(launchers=(), slow=told))
    assert found.root is not None and found.root.cause is Cause.SLOW_LINK and found.root.ranks == (1, 3)
    assert "10.0.0.3 (rank 3) is slow" in found.root.summary and "between these two hosts" in found.root.do
    assert [one.ranks for one in found.others] == [(1, 2)], "it is over"


def test_a_run_that_is_done_has_no_root_but_what_it_survived_and_who_was_slow() -> None:
    done = Launcher(host="a", pid=7, command="t", began_ns=1, last_ns=9, outcome="done", alive=False)
    assert diagnose(Evidence(launchers=(done,))).root is None
    slow = Slow(rank=2, cause="data", step=40, at_ns=8, text="rank 2 is slow")
    found = diagnose(Evidence(launchers=(done,), slow=(slow,)))
    assert found.root is not None
    assert (found.root.cause, found.root.ranks) == (Cause.SLOW_DATA, (2,))
    killed = death(1, 5, code=-int(signal.SIGKILL))
    found = diagnose(Evidence(launchers=(done,), deaths=(killed,), slow=(slow,)))
    assert found.root is not None
    assert (found.root.cause, [one.cause for one in found.others]) == (Cause.KILLED, [Cause.SLOW_DATA])
    assert as_json(found)["root"]["cause"] == "killed"
    assert "root cause: killed" in "\n".join(as_text(found))


def test_the_line_that_is_named_is_the_users() -> None:
    words = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in main',
        '  File "/x/lib/python3.11/site-packages/numpy/core.py", line 3, in f',
        "numpy.exceptions.AxisError: axis 3 is out of bounds",
    ]
    failure = failure_of(words)
    assert failure == Failure("AxisError", "axis 3 is out of bounds", Place("train.py", 9, "main"))
    assert failure_of(["no traceback"], "DiskFull at /a/train.py:4|00") is None
    assert failure_of(["the disk is full"], "DiskFull at /a/train.py:4") == Failure(
        "DiskFull", "the disk is full", Place("/a/train.py", 4)
    )
    assert users_place(()) is None
