"""Jobs over several nodes with real ranks: forked, linked, killed, replaced; what is left behind: nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import textwrap
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from memory_cluster import MemoryCluster, MemoryNode

from zbmd.actors.cluster.job_host import JobHost
from zbmd.actors.cluster.jobs import Job, JobPhase, JobSpec, Stop, Submit
from zbmd.actors.host_events import HostEvent, RankDown, RankStarted, ViewChanged
from zbmd.actors.host_links import host_identity
from zbmd.actors.host_output import OutputLine
from zbmd.actors.reaper import descendants
from zbmd.actors.view import OnLoss, Outcome
from zbmd.transport.budget import RECOVERY_BUDGET_NS_MIN
from zbmd.transport.capture.recorder import Clocks, origin_of
from zbmd.transport.capture.ring import RingRecorder
from zbmd.transport.hlc import HybridClock

TIMEOUT_S = 60.0
JOB = 11

FOLLOWS_VIEWS = """
import asyncio, os, signal, socket
from zbmd.actors.member import join

def cut_connections():
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_INET and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cut_connections)
    async with join(inbox_bytes=1 << 18) as node:
        while True:
            view = node.latest
            members = ",".join(f"{m.rank}#{m.incarnation}" for m in view.members if node.epoch == view.epoch)
            print(f"{node.epoch} {os.environ['LOCAL_RANK']} {members}")
            view = await node.view(after=node.epoch)
            if os.path.exists(os.environ["DONE"]):
                break

asyncio.run(main())
"""


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
            preload=("zbmd.actors.member",),
            on_event=self._on_event,
        )

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(f"{line.rank}#{line.incarnation}: {line.text.decode()}")
        self._changed()

    def _on_event(self, job: int, event: HostEvent) -> None:
        assert job == JOB
        self.events.append(event)
        self._changed()

    def of(self, kind: type[HostEvent]) -> list[HostEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def pid(self, rank: int) -> int:
        """Of the rank's newest process that was started here."""
        started = [e for e in self.events if isinstance(e, RankStarted) and e.rank == rank]
        return started[-1].pid


class World:
    """A cluster, the job on it, and what the test waits for."""

    def __init__(self, tmp_path: Path, size: int) -> None:
        self.news = asyncio.Event()
        self.done = tmp_path / "done"
        self.script = tmp_path / "job.py"
        self.script.write_text(FOLLOWS_VIEWS)
        self.cluster = MemoryCluster(size, self.news.set)
        self.places = [Place(node, self.news.set) for node in self.cluster.nodes.values()]

    def submit(self, **options: object) -> None:
        spec = JobSpec(
            **{  # type: ignore[arg-type]
                "job": JOB,
                "target": str(self.script),
                "arena_bytes": 1 << 20,
                "environment": (("DONE", str(self.done)),),
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


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def test_a_job_over_two_nodes_with_a_rank_killed(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        w.submit(nodes_min=2, nodes_max=2, ranks_per_node=2)
        await w.members("0#1,1#1,2#1,3#1")
        assert [len(place.of(ViewChanged)) for place in w.places] == [1, 1]
        os.kill(w.places[1].pid(3), signal.SIGKILL)
        await w.members("0#1,1#1,2#1,3#2")
        assert any(re.fullmatch(r"3#2: \d+ 1 .*", line) for line in w.places[1].lines), "LOCAL_RANK is 1"
        (down,) = (event for event in w.places[1].events if isinstance(event, RankDown))
        assert (down.rank, down.code, down.expected) == (3, -9, False)
        job = w.job()
        assert job is not None and job.restarts_total == 1


async def test_ranks_whose_links_break_link_up_anew(tmp_path: Path) -> None:
    def epochs(rank: int) -> list[int]:
        found = (re.fullmatch(rf"{rank}#1: (\d+) 0 0#1,1#1", line) for p in w.places for line in p.lines)
        return [int(match[1]) for match in found if match]

    async with world(tmp_path, 2) as w:
        environment = (("DONE", str(w.done)), ("ZBMD_LINKS", "tcp"))
        w.submit(nodes_min=2, nodes_max=2, environment=environment)
        for times in (1, 2, 3):
            await w.until(
                lambda times=times: len(epochs(0)) == len(epochs(1)) == times,  # type: ignore[misc]
                "they are not linked",
            )
            os.kill(w.places[times % 2].pid(times % 2), signal.SIGUSR1)
        assert epochs(0)[:3] == epochs(1)[:3] == sorted(epochs(1)[:3])
        job = w.job()
        assert job is not None and job.restarts_total == 0
        assert not any(place.of(RankDown) for place in w.places)


async def test_a_rank_that_never_joins_is_killed_and_another_one_is_tried(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        # The second incarnation does not join; the budget makes that short.
        mute = "import os, signal\nif os.environ['ZBMD_INCARNATION'] == '2':\n    signal.pause()\n"
        w.script.write_text(mute + FOLLOWS_VIEWS)
        w.submit(nodes_min=2, nodes_max=2, recovery_budget_ns=RECOVERY_BUDGET_NS_MIN)
        await w.members("0#1,1#1")
        os.kill(w.places[1].pid(1), signal.SIGKILL)
        await w.members("0#1,1#3")
        reasons = [event.code for event in w.places[1].events if isinstance(event, RankDown)]
        assert reasons == [-9, -9]


async def test_a_job_ends_when_all_of_its_ranks_have(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        w.submit(nodes_min=2, nodes_max=2)
        await w.members("0#1,1#1")
        w.done.touch()
        os.kill(w.places[0].pid(0), signal.SIGKILL)  # the view that follows lets them look at the file
        job = await w.ended()
        assert (job.outcome, job.reason) == (Outcome.SUCCEEDED, "every rank finished")


async def test_a_hosts_work_goes_to_a_spare_one_and_it_comes_back(tmp_path: Path) -> None:
    async with world(tmp_path, 3) as w:
        w.submit(nodes_min=2, nodes_max=2)
        await w.members("0#1,1#1")
        place = w.places[1]
        # The whole host: no part of it says a word any more.
        place.node.die()
        for pid in descendants(os.getpid()):
            if pid in {place.jobs.template_pid, place.pid(1)}:
                os.kill(pid, signal.SIGKILL)
        await w.members("0#1,1#2")
        assert [event.rank for event in w.places[2].events if isinstance(event, RankStarted)] == [1]
        place.node.again(w.places[0].node)
        await w.until(lambda: place.node.view.epoch > 0, "it never comes back")
        job = w.job()
        assert job is not None and [entry.node and entry.node.id for entry in job.ranks] == [0, 2]


async def test_a_node_that_is_cut_off_kills_its_ranks(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        w.submit(nodes_min=1, nodes_max=2)
        await w.members("0#1,1#1")
        w.places[1].node.cut_off()
        await w.until(lambda: bool(w.places[1].of(RankDown)), "its rank goes on")
        await w.members("0#1")
        w.places[1].node.again(w.places[0].node)
        await w.members("0#1,1#2")


async def test_a_template_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async with world(tmp_path, 1) as w:
        w.submit(ranks_per_node=2)
        await w.members("0#1,1#1")
        os.kill(w.places[0].jobs.template_pid, signal.SIGKILL)
        await w.members("0#2,1#2")


async def test_a_job_is_stopped_and_what_cannot_start_says_why(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        w.submit(nodes_max=2, on_loss=OnLoss.STOP)
        await w.members("0#1,1#1")
        w.places[1].node.command(Stop(job=JOB, reason="enough"))
        job = await w.ended()
        assert (job.outcome, job.reason) == (Outcome.STOPPED, "enough")
    (tmp_path / "job.py").write_text("")
    bad = textwrap.dedent("raise SystemExit(2)")
    async with world(tmp_path, 2) as w:
        w.script.write_text(bad)
        w.submit(nodes_max=2)
        job = await w.ended()
        assert job.outcome is Outcome.FAILED
        assert "failed for a reason that only its user can mend: exit code 2" in job.reason
