"""Ranks that really hang, and what the host says of each: who, in what, where, since when, and who waits."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import PROGRAMS

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport, RunResult
from zbmd.actors.hangs.verdict import HangNotice, OnHang
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.host_contracts import NodeStatus
from zbmd.actors.view import Outcome

TIMEOUT_S = 180.0
DEADLINE_NS = 3_000_000_000
"""Longer than a rank waits for a core on a busy machine: one that does is reported as well."""
FOR = r"for \d+(\.\d)? s"

RANKS = PROGRAMS / "actors/hanging_ranks.py"


class Job:
    """A host that runs `behaviour` on every rank until `enough` of its events says so; then it is stopped."""

    def __init__(
        self,
        behaviour: str,
        *,
        act: Callable[[Host, HostEvent], None] = lambda host, event: None,
        enough: Callable[[HangNotice], bool] = lambda notice: True,
        **options: Any,
    ) -> None:
        self.notices: list[HangNotice] = []
        self.lines: list[str] = []
        self.status: NodeStatus | None = None
        self._act = act
        self._enough = enough
        options.setdefault("world_size", 2)
        options.setdefault("progress_deadline_ns", DEADLINE_NS)
        config = HostConfig(
            target=str(RANKS),
            arguments=(behaviour,),
            arena_bytes=1 << 20,
            preload=("zbmd.collectives.group.group",),
            **options,
        )
        self.host = Host(config, output=self, observer=self._observe)

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(f"{line.rank}: {line.text.decode()}")

    async def run(self) -> RunResult:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.host.run()

    def the_notice(self) -> HangNotice:
        """Return the only hang that was reported."""
        assert len(self.notices) == 1, ([notice.text for notice in self.notices], self.lines)
        return self.notices[0]

    def line(self, text: str) -> str:
        """`hanging_ranks.py:41` of the line that holds the text."""
        lines = RANKS.read_text().splitlines()
        return f"{RANKS}:{next(n for n, line in enumerate(lines, 1) if text in line)}"

    async def _observe(self, event: HostEvent) -> None:
        self._act(self.host, event)
        if isinstance(event, HangNotice):
            self.notices.append(event)
            if self._enough(event):
                self.status = await self.host.status()
                self.host.stop("the test has seen enough", kill=True)


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.chdir(tmp_path)  # paths outside of it are shown whole


async def test_three_ranks_that_hang_each_in_its_own_way() -> None:
    """One blocks its loop, one runs native code that keeps the GIL, one has an actor that never answers."""
    told: set[str] = set()

    def enough(notice: HangNotice) -> bool:
        told.add(notice.text)
        return len(told) == 3

    job = Job("each_in_its_own_way", enough=enough, world_size=4)
    await job.run()
    assert len(job.notices) == 3, [notice.text for notice in job.notices]
    blocked, native, slow = sorted(job.notices, key=lambda notice: notice.culprits)
    assert blocked.culprits == ((1, 1),)
    assert re.match(f"rank1 has made no progress {FOR}: ", blocked.text), blocked.text
    assert f"at {job.line('BLOCKS HERE')} in load_batch" in blocked.text
    assert "its event loop is blocked in task worker" in blocked.text
    assert any("in Busy.work" in line for line in blocked.stack)
    assert native.culprits == ((2, 1),)
    assert "lives, but runs no Python: native code keeps the GIL (its main thread sleeps" in native.text
    assert slow.culprits == ((3, 1),)
    assert slow.text.startswith("rank3/slow "), slow.text
    assert f"{job.line('WAITS HERE')} in Slow.work" in slow.text
    assert slow.text.endswith("rank0/worker waits for it")
    assert job.status is not None and set(job.status.hangs) == told


async def test_a_rank_that_never_enters_a_collective() -> None:
    job = Job("never_enters_a_collective", world_size=3)
    await job.run()
    notice = job.the_notice()
    # The number counts the operations by which the group has measured its links, too.
    said = rf"rank 2 never entered all_reduce #\d+ of epoch 1; ranks 0-1 wait in it {FOR};"
    assert re.search(said, notice.text), notice.text
    assert f"at {job.line('ELSEWHERE')} in never_enters_a_collective" in notice.text
    assert "step 41: load" in notice.text
    assert notice.culprits == ((2, 1),)


async def test_a_stopped_rank_and_that_it_goes_on() -> None:
    stopped, pid = False, 0

    def act(host: Host, event: HostEvent) -> None:
        nonlocal stopped, pid
        if isinstance(event, RankReport) and event.rank == 1 and not stopped:
            pid = host.ranks[1].pid
            stopped = host.send_signal(1, signal.SIGSTOP)
        if isinstance(event, HangNotice) and not event.over:
            host.send_signal(1, signal.SIGCONT)

    job = Job("meets_for_ever", act=act, enough=lambda notice: notice.over)
    await job.run()
    found, over = job.notices
    said = rf"rank 1 \(pid {pid}\) is stopped \(SIGSTOP\): kill -CONT {pid} lets it go on, {FOR}"
    assert re.search(said, found.text), found.text
    assert "rank 0 waits in" in found.text and "barrier #" in found.text
    assert found.culprits == ((1, 1),)
    assert over.over and over.text == f"over: {found.text}"


async def test_two_actors_that_ask_each_other() -> None:
    job = Job("deadlocks")
    await job.run()
    notice = job.the_notice()
    assert re.match(f"a deadlock {FOR}: ", notice.text), notice.text
    at = f"(handler Busy.work, at {job.line('ASKS HERE')} in Busy.work)"
    assert f"rank0/worker {at} waits for rank1/worker" in notice.text
    assert f"rank1/worker {at} waits for rank0/worker" in notice.text
    assert notice.culprits == ((0, 1), (1, 1))


async def test_what_hangs_is_replaced_if_so_asked() -> None:
    job = Job("blocks_once", on_hang=OnHang.REPLACE, enough=lambda notice: False)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, job.lines
    assert result.restarts == 1
    assert job.notices[0].next_step == "rank 1 is ended, as if it had died"
    assert result.failures[0].code == -signal.SIGKILL
