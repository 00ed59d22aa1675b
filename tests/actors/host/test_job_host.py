"""Jobs over several nodes with real ranks: forked, linked, killed, replaced; what is left behind: nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import textwrap
from pathlib import Path

import pytest
from support.machines.job_world import JOB, world

from zbmd.actors.cluster.jobs.reports import RankDown, RankStarted, ViewChanged
from zbmd.actors.cluster.state.job_table import Stop
from zbmd.actors.process.early_template import descendants
from zbmd.actors.view import OnLoss, Outcome
from zbmd.transport.clock.deadlines import SECOND_NS


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
        w.submit(nodes_min=2, nodes_max=2, environment=(("ZBMD_LINKS", "tcp"),))
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
        # The second incarnation does not join.
        mute = (("MUTE_INCARNATION", "2"),)
        w.submit(nodes_min=2, nodes_max=2, start_timeout_ns=6 * SECOND_NS, environment=mute)
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
                with contextlib.suppress(ProcessLookupError):  # a rank ends by itself soon after its template
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
        w.write_script(bad)
        w.submit(nodes_max=2)
        job = await w.ended()
        assert job.outcome is Outcome.FAILED
        assert "failed with a usage error: exit code 2" in job.reason
