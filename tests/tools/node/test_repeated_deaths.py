"""Ranks that die in one way again and again: the run ends after the second time, and says of what."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

REPEATS = str(PROGRAMS / "node" / "repeats.py")
KILLED = """\
import os, signal, zbmd
async def main():
    async with zbmd.join():
        os.kill(os.getpid(), signal.{end})
zbmd.run(main())
"""
LIMIT_BYTES = 600 << 20


def test_the_same_error_twice_ends_the_run_with_it(launcher: Launcher) -> None:
    ended = launcher.run("run", "-n", "2", "--max-restarts", "5", REPEATS, "error")
    assert ended.code == 1, ended
    assert ended.out.count("[rank1]: begun 2") == 1 and "[rank1]: begun 3" not in ended.out, ended
    told = ended.errors[-1]
    assert "rank1 failed again as a rank did before, with no progress in between: ValueError at " in told, (
        ended
    )
    assert f"{REPEATS}:" in told and "ValueError: no 1 at 0x" in told, ended


@pytest.mark.parametrize(("end", "code"), [("SIGKILL", 75), ("SIGABRT", 1)])
def test_ranks_that_somebody_kills_end_the_job_with_the_code_to_requeue(
    launcher: Launcher, end: str, code: int
) -> None:
    (launcher.directory / "killed.py").write_text(KILLED.format(end=end))
    ended = launcher.run("run", "-n", "1", "--on-loss", "stop", "killed.py")
    assert ended.code == code, ended


@contextlib.contextmanager
def limited() -> Generator[list[str]]:
    """A command that runs another one in a cgroup with a limit of memory."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.rpartition(":")[2] for line in lines if ":memory:" in line), None)
    if own is None:
        pytest.skip("needs the memory controller of cgroup v1")
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"zbmd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may make no cgroup: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        group.rmdir()


@pytest.mark.optional
def test_memory_that_ends_a_rank_twice_ends_the_run_with_advice(launcher: Launcher) -> None:
    with limited() as before:
        ended = launcher.run("run", "-n", "2", "--max-restarts", "5", REPEATS, "memory", before=before)
    assert ended.code == 1, ended
    assert "[rank1]: begun 2" in ended.out and "[rank1]: begun 3" not in ended.out, ended
    told = ended.errors[-1]
    assert (
        "rank1 was lost twice, with no progress in between: killed by the kernel for want of memory" in told
    )
    assert "is limited to 600.0 MiB, and used 600.0 MiB" in told and "a smaller batch" in told, ended
