"""Kill points: declared once, armed by name, and deadly at the pass they were armed for."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS
from support.processes.polling import wait_until

from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.kill_points import Fault, Point, arm, declare, declared, hit, parse, reserve, spelled

HERE = declare("test_faults.here", "in this file")
THERE = declare("test_faults.there", "also in this file")

VICTIM = (sys.executable, str(PROGRAMS / "transport/fault_victim.py"))
PASSES = [f"{point} {turn}" for turn in range(4) for point in ("here", "there")]


@pytest.fixture(autouse=True)
def disarmed() -> Generator[None]:
    yield
    arm("nobody", 1, "")


def survived(spec: str, *, process: str = "rank1", incarnation: int = 1) -> tuple[int, int]:
    """The exit status of a real process under this `ZBMD_FAULT`, and how many passes it outlived."""
    done = subprocess.run(
        [*VICTIM, process, str(incarnation), "0"],
        env={"ZBMD_FAULT": spec, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=180,
        check=False,
    )
    passed = done.stdout.splitlines()
    assert passed == PASSES[: len(passed)]
    return done.returncode, len(passed)


@pytest.mark.parametrize(
    ("spec", "incarnation", "passes"),
    [
        ("rank1:a.here", 1, 0),
        ("rank1:a.there", 1, 1),
        ("rank1:a.here:3", 1, 4),
        ("rank1:a.there:4,rank1:a.here:2", 1, 2),
        ("rank1#2:a.there:2,rank1:a.here", 2, 3),
    ],
)
def test_a_process_dies_where_it_was_told(spec: str, incarnation: int, passes: int) -> None:
    assert survived(spec, incarnation=incarnation) == (-signal.SIGKILL, passes)


@pytest.mark.parametrize(
    ("spec", "incarnation"), [("", 1), ("rank1:a.here", 2), ("rank2:a.here,rank11:a.here", 1)]
)
def test_others_live(spec: str, incarnation: int) -> None:
    assert survived(spec, incarnation=incarnation) == (0, len(PASSES))


def test_every_declared_point_can_be_listed() -> None:
    assert declared()[HERE] == "in this file"
    assert {HERE, THERE} <= declared().keys()
    with pytest.raises(LocalProtocolError, match="declared twice"):
        declare("test_faults.here", "again")


@pytest.mark.parametrize("name", ["", "Vote.sent", "vote sent", "vote:sent", "vote,sent", ".sent"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="not written like"):
        declare(name, "wrong")


names = st.text("abcXYZ019", min_size=1, max_size=9)
a_fault = st.builds(
    Fault,
    process=names,
    point=st.sampled_from(["a", "vote.sent", "a1.b_2.c3"]),
    incarnation=st.integers(1, 10**9),
    count=st.integers(1, 10**9),
)


@given(st.lists(a_fault, max_size=8))
def test_entries_print_and_parse(entries: list[Fault]) -> None:
    assert parse(" , ".join(map(str, entries))) == tuple(entries)


@given(st.lists(st.lists(st.tuples(a_fault, st.booleans()), min_size=1, max_size=3), max_size=5))
def test_kills_of_one_entry_print_and_parse(entries: list[list[tuple[Fault, bool]]]) -> None:
    wanted = tuple(
        replace(kill, entry=number, lives=lives) if len(entry) > 1 else kill
        for number, entry in enumerate(entries, 1)
        for kill, lives in entry
    )
    assert parse(spelled(wanted)) == wanted


def test_one_that_is_only_waited_for_kills_nobody() -> None:
    with pytest.raises(UserError, match=r"'~rank1:a' kills nobody: join it with \+ to a kill"):
        parse("rank0:a,~rank1:a")


@contextmanager
def victim(spec: str, process: str, job: int) -> Generator[subprocess.Popen[str]]:
    """A process that ends when its input is closed, if it is not killed."""
    environment = {"ZBMD_FAULT": spec, "PYTHONPATH": ":".join(sys.path)}
    command = [*VICTIM, process, "1", str(job)]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def has_come(job: int, place: int) -> bool:
    """Whether somebody waits for the others of the first entry of a job, or is waited for."""
    return f"@zbmd-fault-{os.getuid()}-{job:x}-1-{place}\n" in Path("/proc/net/unix").read_text()


def passed(killed: subprocess.Popen[str]) -> int:
    """Wait until a process is killed; return how many passes it outlived."""
    assert killed.stdout is not None
    lines = killed.stdout.read().splitlines()
    assert lines == PASSES[: len(lines)]
    assert killed.wait() == -signal.SIGKILL
    return len(lines)


def test_processes_of_an_entry_wait_for_each_other_and_die() -> None:
    """The one that comes first waits; one of another job is not meant."""
    spec, job = "rank0:a.here+rank1:a.there:2+rank2:a.here:2,rank1:a.there:4", secrets.randbits(63)
    with victim(spec, "rank2", job ^ 1) as other, victim(spec, "rank0", job) as first:
        wait_until(lambda: has_come(job, 0))
        with victim(spec, "rank1", job) as second:
            wait_until(lambda: has_come(job, 1))
            assert first.poll() is None and second.poll() is None
            with victim(spec, "rank2", job) as last:
                assert [passed(one) for one in (first, second, last)] == [0, 3, 2]
        wait_until(lambda: has_come(job ^ 1, 2))
        assert other.poll() is None


def test_one_that_is_waited_for_goes_on() -> None:
    spec, job = "rank0:a.there+~rank1:a.there:2", secrets.randbits(63)
    with victim(spec, "rank0", job) as killed:
        wait_until(lambda: has_come(job, 0))
        assert killed.poll() is None
        with victim(spec, "rank1", job) as waited_for:
            assert passed(killed) == 1
            assert waited_for.communicate()[0].splitlines() == PASSES
            assert waited_for.returncode == 0


def test_native_code_kills_nobody_together_with_others() -> None:
    arm("rank0", 1, f"rank0:{HERE}+rank1:{THERE}")
    with pytest.raises(UserError, match=r"native code passes test_faults\.here, and waits there for nobody"):
        reserve(HERE, 3)
    assert reserve(THERE, 3) == -1


@pytest.mark.parametrize(
    "spec",
    [
        "rank1",
        "rank1:",
        ":a.here",
        "rank1:a.here:0",
        "rank1:a.here:x",
        "rank1#0:a.here",
        "rank1#:a",
        "a:B",
        "a:b+",
        "a:b+~",
    ],
)
def test_an_entry_that_cannot_be_read_says_how_to_write_it(spec: str) -> None:
    with pytest.raises(UserError, match=r"process\[#incarnation\]:point\[:count\]"):
        parse(spec)


def test_too_many_entries_and_unknown_points_are_refused() -> None:
    with pytest.raises(UserError, match="65 entries"):
        parse(",".join(["rank1:a"] * 65))
    with pytest.raises(UserError, match=r"'nothing.here'; declared are: .*test_faults.here"):
        arm("rank1", 1, "rank2:nothing.here")


@given(kill_at=st.integers(1, 200), batches=st.lists(st.integers(1, 50), max_size=20))
def test_native_code_is_told_at_which_of_its_passes_to_kill(kill_at: int, batches: list[int]) -> None:
    arm("rank0", 1, f"rank0:{HERE}:{kill_at}")
    passed = 0
    for passes in batches:
        at = reserve(HERE, passes)
        assert reserve(THERE, passes) == -1
        assert at == (kill_at - 1 - passed if passed < kill_at <= passed + passes else -1)
        passed += passes


def test_arming_again_forgets_what_was_armed() -> None:
    arm("rank0", 1, f"rank0:{HERE}")
    arm("rank1", 1, f"rank0:{HERE}")
    hit(HERE)
    assert reserve(HERE, 100) == -1
    with pytest.raises(LocalProtocolError, match="never declared"):
        reserve(Point("no.such"), 1)


def test_not_armed_a_pass_looks_at_nothing_else() -> None:
    assert not faults._armed
    hit(Point("never.declared"))
