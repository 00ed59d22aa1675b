"""Nodes of a cluster in one process, with jobs whose ranks are real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from programs import PROGRAMS

from support.cluster.memory_cluster import MemoryCluster, MemoryNode
from zbmd.actors.cluster.jobs.host_links import host_identity
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.reports import HostEvent, RankStarted
from zbmd.actors.cluster.state.job_table import Job, JobPhase, JobSpec, Submit
from zbmd.actors.process.early_template import descendants
from zbmd.actors.process.output import OutputLine
from zbmd.transport.capture.log import RingRecorder
from zbmd.transport.capture.recorder import Clocks, origin_of
from zbmd.transport.clock.hlc import HybridClock

EventT = TypeVar("EventT", bound=HostEvent)

TIMEOUT_S = 180.0
JOB = 11


class Place:
    """A node of the test: its membership, its jobs, and what these said."""

    def __init__(self, node: MemoryNode, changed: Callable[[], None]) -> None:
        self.node = node
        self.lines: list[str] = []
        self.events: list[HostEvent] = []
        self._changed = changed
        clock = HybridClock()
        recorder = RingRecorder(origin_of(host_identity(0)), Clocks(hybrid=clock))
        self.jobs = JobHost(
            node,
            recorder=recorder,
            clock=clock,
            output=self,
            preload=("zbmd.collectives.group.group",),
            on_event=self._on_event,
        )

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(f"{line.rank}#{line.incarnation}: {line.text.decode()}")
        self._changed()

    def _on_event(self, job: int, event: HostEvent) -> None:
        assert job == JOB
        self.events.append(event)
        self._changed()

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.events if isinstance(event, kind)]

    def pid(self, rank: int) -> int:
        """Of the rank's newest process that was started here."""
        started = [e for e in self.of(RankStarted) if e.rank == rank]
        return started[-1].pid


class World:
    """A cluster, the job on it, and what the test waits for."""

    def __init__(self, tmp_path: Path, size: int) -> None:
        self.news = asyncio.Event()
        self.done = tmp_path / "done"
        self.script = PROGRAMS / "node" / "follows_views.py"
        self._own_script = tmp_path / "job.py"
        self.cluster = MemoryCluster(size, self.news.set)
        self.places = [Place(node, self.news.set) for node in self.cluster.nodes.values()]

    def write_script(self, text: str) -> None:
        """Have the job run this text instead of `follows_views.py`."""
        self._own_script.write_text(text)
        self.script = self._own_script

    def submit(self, *, environment: tuple[tuple[str, str], ...] = (), **options: object) -> None:
        spec = JobSpec(
            **{  # type: ignore[arg-type]
                "job": JOB,
                "target": str(self.script),
                "arena_bytes": 1 << 20,
                "environment": (("DONE", str(self.done)), *environment),
                **options,
            }
        )
        self.places[0].node.command(Submit(spec=spec))

    def job(self) -> Job | None:
        views = [place.node.view for place in self.places if place.node.alive]
        return max(views, key=lambda view: view.epoch).jobs.job(JOB)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not holds():
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            lines = "\n".join(line for place in self.places for line in place.lines)
            pytest.fail(f"{what}: {self.job()}\n{lines}")

    async def members(self, members: str) -> None:
        """Wait until each of these ("0#1,1#2") has printed that it is in one view with exactly these."""
        wanted = members.split(",")

        def all_in() -> bool:
            found: dict[str, str] = {}
            for place in self.places:
                for line in place.lines:
                    if line.endswith(f" {members}"):
                        found[line.split(":")[0]] = line.split()[1]
            return sorted(found) == wanted and len(set(found.values())) == 1

        await self.until(all_in, f"{members} are never in one view")

    async def ended(self) -> Job:
        await self.until(lambda: (job := self.job()) is not None and job.phase is JobPhase.ENDED, "no end")
        job = self.job()
        assert job is not None
        return job


@asynccontextmanager
async def world(tmp_path: Path, size: int) -> AsyncGenerator[World]:
    """A cluster whose nodes run jobs. At the end nothing of it is left."""
    before = set(descendants(os.getpid()))
    made = World(tmp_path, size)
    try:
        await asyncio.gather(*(place.jobs.open() for place in made.places))
        yield made
    finally:
        for place in made.places:
            await place.jobs.close()
        made.cluster.close()
    assert set(descendants(os.getpid())) <= before
