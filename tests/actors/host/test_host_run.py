"""The host driven in-process: events, reports, signals, views and the ends of runs, with real ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import (
    HostEvent,
    RankDown,
    RankReport,
    RankStarted,
    RunResult,
    ViewChanged,
)
from zbmd.actors.rank.member import join
from zbmd.actors.view import OnLoss, Outcome, RankState
from zbmd.transport.errors import LocalProtocolError

TIMEOUT_S = 180.0

RANKS = PROGRAMS / "actors/host_jobs.py"


class Job:
    """A host, its events, and what a test does on each of them."""

    def __init__(
        self,
        behaviour: str,
        act: Callable[[Host, HostEvent], Awaitable[None]] | None = None,
        **options: Any,
    ) -> None:
        config = HostConfig(
            target=str(RANKS),
            arguments=(behaviour,),
            arena_bytes=1 << 20,
            preload=("zbmd.actors.rank.member",),
            **options,
        )
        self.events: list[HostEvent] = []
        self.output = Lines()
        self._act = act
        self.host = Host(config, output=self.output, observer=self._observe)

    async def _observe(self, event: HostEvent) -> None:
        self.events.append(event)
        if self._act is not None:
            await self._act(self.host, event)

    async def run(self) -> RunResult:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.host.run()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def test_a_run_from_start_to_end() -> None:
    job = Job("reports_once", world_size=2)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, job.output.lines
    assert (result.exit_code, result.restarts, result.failures) == (0, 0, ())
    assert sorted(job.output.lines) == ["0: hello from 0", "1: hello from 1"]
    reports = sorted(job.of(RankReport), key=lambda r: r.rank)
    assert [r.payload for r in reports] == [
        {"step": rank, "loss": 0.5, "path": ["a", {"b": None}]} for rank in range(2)
    ]
    (view,) = job.of(ViewChanged)
    assert view.view.ranks == (0, 1)
    downs = job.of(RankDown)
    assert all(down.normal and down.expected and down.reason == "exit code 0" for down in downs)
    assert len(downs) == 2


async def test_live_ranks_that_lose_their_link_are_linked_anew() -> None:
    job = Job("loses_its_links", world_size=2, environment={"ZBMD_LINKS": "tcp"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == 0, job.output.lines
    entered = sorted(line for line in job.output.lines if "entered" in line)
    assert entered == [f"{rank}: entered {epoch} [1, 1]" for rank in (0, 1) for epoch in (2, 3)]


async def test_a_kill_is_noticed_told_and_repaired() -> None:
    killed_ns = 0

    async def act(host: Host, event: HostEvent) -> None:
        nonlocal killed_ns
        if isinstance(event, RankReport) and event.payload == {"ready": True} and event.rank == 2:
            assert host.ranks[2].state is RankState.JOINED
            assert host.ranks[2].pid > 0
            killed_ns = time.monotonic_ns()
            assert host.send_signal(2, signal.SIGKILL)

    job = Job("reports_who_was_lost", act, world_size=3)
    result = await job.run()
    assert result.exit_code == 0, job.output.lines
    assert result.restarts == 1
    (down,) = result.failures
    assert (down.rank, down.incarnation, down.code) == (2, 1, -signal.SIGKILL)
    assert down.reason == "killed (SIGKILL)"
    assert "replacement starts" in down.next_step
    assert down.noticed_ns is not None
    assert killed_ns < down.noticed_ns <= down.confirmed_ns
    started = {(e.rank, e.incarnation): e for e in job.of(RankStarted)}
    assert set(started) == {(0, 1), (1, 1), (2, 1), (2, 2)}
    assert started[2, 2].asked_ns > down.noticed_ns
    first, second = job.of(ViewChanged)
    assert [m.incarnation for m in second.view.members] == [1, 1, 2]
    assert (first.view.epoch, second.view.epoch) == (1, 2)
    told = {e.rank: e.payload for e in job.of(RankReport) if "lost" in e.payload}
    assert set(told) == {0, 1}
    for rank, payload in told.items():
        assert payload["lost"] == [2, 1, False]
        assert payload["at_ns"] > killed_ns
        assert payload["epoch"] == 2
        assert payload["peers"] == [r for r in (0, 1, 2) if r != rank]


async def test_a_second_kill_during_the_recovery_is_repaired_too() -> None:
    async def act(host: Host, event: HostEvent) -> None:
        if isinstance(event, RankReport) and event.rank == 1 and event.incarnation == 1:
            host.send_signal(1, signal.SIGKILL)
        # The replacement dies as soon as it exists, and rank 0 with it.
        if isinstance(event, RankStarted) and (event.rank, event.incarnation) == (1, 2):
            host.send_signal(1, signal.SIGKILL)
            host.send_signal(0, signal.SIGKILL)

    job = Job("enters_a_second_view", act, world_size=3, max_restarts=10)
    result = await job.run()
    assert result.exit_code == 0, job.output.lines
    views = [event.view for event in job.of(ViewChanged)]
    epochs = [view.epoch for view in views]
    assert epochs == sorted(set(epochs))
    assert [m.incarnation for m in views[-1].members] == [2, 3, 1]
    assert result.restarts == 3


async def test_shrink_tells_who_is_lost() -> None:
    async def act(host: Host, event: HostEvent) -> None:
        if isinstance(event, RankReport) and event.rank == 0:
            host.send_signal(0, signal.SIGKILL)

    job = Job("prints_its_second_view", act, world_size=3, on_loss=OnLoss.SHRINK)
    result = await job.run()
    assert result.exit_code == 0
    assert result.reason == "finished without rank0"
    assert sorted(job.output.lines) == ["1: (1, 2) (0,) [2]", "2: (1, 2) (0,) [1]"]
    assert result.failures[0].next_step == "the run goes on without it"


async def test_a_failure_brings_the_tail_of_its_output() -> None:
    job = Job("raises_on_rank_1", world_size=2, on_loss=OnLoss.STOP)
    result = await job.run()
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)
    assert result.reason == "rank1 failed: exit code 1; on-loss is stop"
    (failure,) = result.failures
    assert failure.tail[-1] == "ValueError: what went wrong"
    assert failure.next_step == "the run ends"


async def test_stop_ends_the_run() -> None:
    async def act(host: Host, event: HostEvent) -> None:
        if isinstance(event, ViewChanged):
            host.stop("enough")

    job = Job("waits_for_a_second_view", act, world_size=2)
    result = await job.run()
    assert (result.outcome, result.reason) == (Outcome.STOPPED, "enough")
    assert result.exit_code != 0
    assert not result.failures


async def test_an_observer_that_raises_ends_the_run_with_its_error() -> None:
    async def act(host: Host, event: HostEvent) -> None:
        if isinstance(event, ViewChanged):
            raise KeyError("a bug in the observer")

    job = Job("waits_for_a_second_view", act, world_size=2)
    with pytest.raises(KeyError, match="a bug in the observer"):
        await job.run()


async def test_a_cancelled_run_leaves_nothing() -> None:
    formed = asyncio.Event()

    async def act(host: Host, event: HostEvent) -> None:
        if isinstance(event, ViewChanged):
            formed.set()

    job = Job("waits_for_a_second_view", act, world_size=2)
    running = asyncio.create_task(job.run())
    async with asyncio.timeout(TIMEOUT_S):
        await formed.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for info in job.host.ranks.values():
        with pytest.raises(ProcessLookupError):
            os.kill(info.pid or 2**22, 0)


async def test_a_rank_that_leaves_at_once_harms_nobody() -> None:
    job = Job("prints_its_peers", world_size=5)
    result = await job.run()
    assert result.exit_code == 0, job.output.lines
    assert result.restarts == 0
    assert len(job.output.lines) == 5


async def test_without_a_launcher_a_script_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "ZBMD_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZBMD_ARENA", "2MiB")
    async with join() as worker:
        assert (worker.rank, worker.world_size, worker.incarnation, worker.epoch) == (0, 1, 1, 1)
        assert not worker.peers
        assert worker.segment.arena.capacity_bytes == 2 << 20
        assert (await worker.view(after=0)).ranks == (0,)
        worker.report({"goes": "nowhere"})
        with pytest.raises(LocalProtocolError, match="runs alone"):
            await worker.view(after=1)
