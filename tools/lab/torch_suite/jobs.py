"""Jobs of ranks that run tests one after the other, and the results of a test on all of them.

A rank writes a file for each test. A job ends at the first test that fails, since nothing can be said of the
processes after it; the tests that are left run in another job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

BACKENDS: Final = ("gloo", "zbmd")
POLL_S: Final = 0.1
STOP_S_MAX: Final = 10.0
Verdict: TypeAlias = Literal["passed", "skipped", "failed"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a test. detail: the reason of a failure or a skip, of the first rank that has one."""

    backend: str
    test: str
    verdict: Verdict
    detail: str = ""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a test on one rank."""

    verdict: Verdict
    detail: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The tests that the ranks of a job run. folder: takes their results."""

    backend: str
    tests: tuple[str, ...]
    ranks: int
    folder: str


def rank_file(folder: Path, test: str, rank: int) -> Path:
    """Return the path of a rank's result."""
    return folder / f"{test}.{rank}"


def write_rank_result(folder: Path, test: str, rank: int, result: RankResult) -> None:
    """Write it, whole or not at all."""
    path = rank_file(folder, test, rank)
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_bytes(msgspec.json.encode(result))
    part.rename(path)


def read_rank_results(folder: Path, test: str, ranks: int) -> list[RankResult]:
    """Return the results of those ranks that have written one."""
    found = (rank_file(folder, test, rank) for rank in range(ranks))
    return [msgspec.json.decode(path.read_bytes(), type=RankResult) for path in found if path.exists()]


def verdict_of(plan: Plan, test: str, found: Sequence[RankResult], why_missing: str = "") -> Result:
    """Return the result of a test from those of its ranks."""
    failed = next((each for each in found if each.verdict == "failed"), None)
    if failed is None and len(found) < plan.ranks:
        failed = RankResult(verdict="failed", detail=why_missing)
    first = failed or next((each for each in found if each.verdict == "skipped"), found[0])
    return Result(backend=plan.backend, test=test, verdict=first.verdict, detail=first.detail)


def run_job(plan: Plan, limit_s: float, log: Path, report: Callable[[Result], None]) -> Result | None:
    """Run tests in one job until one fails; return that one's result. `report` gets those before it.

    limit_s: seconds for one test, after which the job is killed. log: takes what the ranks print.
    """
    folder = Path(plan.folder)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    command = [str(Path(sys.executable).with_name("zbmd-node")), "run", "-n", str(plan.ranks)]
    command += ["--on-loss", "stop", "--progress-deadline", "off", "--stop-grace", "1s", "--preload", "torch"]
    command += ["-m", "zbmd.tools.lab.torch_suite.rank", plan.folder]
    left = list(plan.tests)

    def passed() -> int:
        while left and len(found := read_rank_results(folder, left[0], plan.ranks)) == plan.ranks:
            result = verdict_of(plan, left[0], found)
            if result.verdict == "failed":
                break
            report(result)
            left.pop(0)
        return len(left)

    with log.open("ab") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            why = "a rank ended during the test" if _ended(job, passed, limit_s) else f"over {limit_s:g} s"
        finally:
            _end(job)
    if not passed():
        return None
    return verdict_of(plan, left[0], read_rank_results(folder, left[0], plan.ranks), why)


def _ended(job: subprocess.Popen[bytes], progress: Callable[[], int], limit_s: float) -> bool:
    """Wait for the end of a job; return False if it makes no progress for so long."""
    seen, since = progress(), time.monotonic()
    while job.poll() is None:
        time.sleep(POLL_S)
        now = progress()
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > limit_s:
            return False
    return True


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher, and with it the ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def run_all(
    backend: str,
    tests: Iterable[str],
    *,
    ranks: int,
    limit_s: float,
    log: Path,
    report: Callable[[Result], None],
) -> None:
    """Run the tests in as few jobs as may be; `report` gets each result, in order.

    A test that fails after others is run again in processes of its own: that result counts.
    """
    left, alone = list(tests), False

    def passed(result: Result) -> None:
        left.remove(result.test)
        report(result)

    while left:
        with tempfile.TemporaryDirectory(prefix="zbmd-torch-suite-") as folder:
            chosen = tuple(left[:1] if alone else left)
            first, plan = chosen[0], Plan(backend=backend, tests=chosen, ranks=ranks, folder=folder)
            failed = run_job(plan, limit_s, log, passed)
        alone = failed is not None and failed.test != first
        if failed is not None and not alone:
            passed(failed)
