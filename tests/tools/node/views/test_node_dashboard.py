"""`--dashboard` of launchers and nodes: what it shows live, that it disturbs no job, and that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes
from support.jobs.two_ranks import MODEL
from support.processes import polling

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.profiler.announcements import (
    FILE_BYTES_MAX,
    VARIABLE,
    RankLost,
    RunBegun,
    announce,
    read_announcements,
)

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("plotly")
pytest.importorskip("prometheus_client")
from support.browser import browser, in_a_browser  # noqa: E402 (imports aiohttp)

pytestmark = pytest.mark.optional
LIMIT_S = 180.0
ADDRESS = r"dashboard: (http://127\.0\.0\.1:\d+/)"
WAITS = str(PROGRAMS / "node" / "begins_run.py")


async def asked(address: str, what: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(address + what) as response:
        text = await response.text()
        assert response.status == 200, text
        return json.loads(text) if what.startswith("api") else text


def is_refused(port: int) -> bool:
    """Whether nobody listens at a port."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def until(address: str, what: str, holds: Callable[[Any], Any]) -> Any:
    """Ask until the answer is as it should be."""
    last: object = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    last = await asked(address, what)
                    if found := holds(last):
                        return found
                except aiohttp.ClientError as error:  # the dashboard is being started again
                    last = error
                await polling.pause()
    except TimeoutError:
        pytest.fail(f"{what} never was as expected: {last}")


def processes_of(live: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["process"]: one for host in live["hosts"] for one in host["processes"]}


def is_whole(live: dict[str, Any]) -> dict[str, Any] | None:
    """Return it if the node and both ranks, which are linked in shared memory, answer."""
    processes = processes_of(live)
    if len(processes) != 3 or {rank["state"] for rank in live["hosts"][0]["ranks"]} != {"joined"}:
        return None
    links = {link["process"]: link["carrier"] for link in processes["rank0"]["links"]}
    return live if links == {"node": "shm", "rank1": "shm"} else None


def dashboards(running: Running) -> list[int]:
    """The processes of the launcher that serve pages."""
    found: list[int] = []
    for pids in running.processes().values():
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] * (b"zbmd.tools.dashboard.command" in command)
    return found


def trained(launcher: Launcher) -> tuple[str, ...]:
    """A command line of a run of two ranks that goes on until it is stopped."""
    data = write_text(launcher.directory / "text")
    sizes = (*MODEL, "--shards", "2", "--sequences-per-shard", "1", "--steps", "1000000")
    return ("-m", "zbmd", "train", "--data", str(data), *sizes, "--mesh", "dp=2", "--out", "runs/live")


@in_a_browser
async def test_a_run_and_its_ranks_are_live_and_a_loss_has_its_cause(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = ("run", "-n", "2", "--dashboard", "127.0.0.1:0", *trained(launcher))
    with launcher.start(*command) as running:
        running.deadline_s += LIMIT_S  # a browser starts meanwhile, beside ranks that compute
        address = running.until(ADDRESS)[0][1]
        await until(address, "api/runs", lambda found: found["runs"] == ["live"])
        live = await until(address, "api/live", is_whole)
        (host,) = live["hosts"]
        assert host["job"]["restarts"] == 0
        assert any(row["name"] == "member" and row["waiting"] == 0 for row in host["actors"])

        async with browser(tmp_path_factory.mktemp("browser")) as page:
            await page.open(f"{address}cluster")
            await page.until("document.querySelector('#live')?.innerText.includes('rank1 shm')")
            (rank1,) = [rank["pid"] for rank in host["ranks"] if rank["rank"] == 1]
            os.kill(rank1, signal.SIGKILL)
            await page.until("document.querySelector('#live').innerText.includes('1 restarts')")
            assert not page.errors

        killed = 'zbmd_deaths_total{cause="killed (SIGKILL)",run="live"} 1.0'
        await until(address, "metrics", lambda text: killed in text and "zbmd_links{" in text)
        running.process.send_signal(signal.SIGTERM)
        running.end()


async def test_a_dashboard_that_is_killed_comes_back_and_the_job_goes_on(launcher: Launcher) -> None:
    with launcher.start("run", "-n", "1", "--dashboard", "127.0.0.1:0", WAITS) as running:
        address = running.until(ADDRESS)[0][1]
        await until(address, "api/runs", lambda found: found["runs"] == ["run"])
        (served,) = dashboards(running)
        os.kill(served, signal.SIGKILL)
        running.until(r"the dashboard has ended \(killed \(SIGKILL\)\)")
        await until(address, "api/runs", lambda found: found["runs"] == ["run"])
        assert dashboards(running) != [served]
        (launcher.directory / "done").touch()
        assert running.end() == 0, "no rank was lost by it"


async def test_nothing_is_left_of_a_launcher_that_is_killed(launcher: Launcher) -> None:
    with launcher.start("run", "-n", "1", "--dashboard", "127.0.0.1:0", WAITS) as running:
        address = running.until(ADDRESS)[0][1]
        await until(address, "api/runs", lambda found: found["runs"] == ["run"])
        assert dashboards(running)
        os.kill(running.process.pid, signal.SIGKILL)
    port = int(re.findall(r":(\d+)/", address)[0])
    await polling.until(lambda: is_refused(port))


def test_what_cannot_be_served_is_an_error_before_the_start(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = launcher.run("run", "-n", "1", "--dashboard", where, WAITS)
        assert ended.code == 2 and "Choose another address" in ended.errors[-1], str(ended)
        assert not (launcher.directory / "run").exists(), "no rank was started"
    ended = launcher.run("run", "-n", "1", "--dashboard", "nowhere", WAITS)
    assert ended.code == 2 and "--dashboard: 'nowhere' is not an address" in ended.errors[-1], str(ended)


async def test_a_node_shows_the_runs_of_its_ranks(nodes: Nodes) -> None:
    node = await nodes.up("n1", "--dashboard", "127.0.0.1:0")
    address = (await node.until(ADDRESS))[1]
    live = await until(address, "api/live", lambda found: found["hosts"] and found)
    assert live["hosts"][0]["target"] == "n1"
    job = await nodes.start("n1", "submit", "--follow", "-n", "1", WAITS)
    await until(address, "api/runs", lambda found: found["runs"] == ["run"])
    await until(address, "metrics", lambda text: 'zbmd_steps_total{rank="0",run="run"} 1.0' in text)
    (nodes.directory / "done").touch()
    assert await job.ended() == 0, str(job)
    node.signal(signal.SIGTERM)
    assert await node.ended() == 0, str(node)


# ---- the file in which runs are announced


def test_announcements_are_bounded_and_damage_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "announced"
    monkeypatch.setenv(VARIABLE, str(path))
    announce(RunBegun("/run"))
    assert not path.exists(), "the launcher has made it, or there is none"
    path.write_bytes(b"")
    announce(RunBegun("/run"))
    with path.open("ab") as file:
        file.write(b'{"kind":"run"}\n[[[\n\xff\n{"kind":"lost","rank":-1,"incarnation":1,"cause":"x"}\n')
    announce(RankLost(1, 2, "killed (SIGKILL)"))
    with path.open("ab") as file:
        file.write(b'{"kind":"run","directory":"/torn')
    assert read_announcements(path.read_bytes()) == [RunBegun("/run"), RankLost(1, 2, "killed (SIGKILL)")]
    path.write_bytes(b"x" * FILE_BYTES_MAX)
    announce(RunBegun("/run"))
    assert path.stat().st_size == FILE_BYTES_MAX
