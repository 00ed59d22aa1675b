"""`--stop-grace`: a run that is stopped leaves its ranks the time to save, on one host and on several."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from programs import PROGRAMS
from support.cluster.cluster_nodes import BUDGET, Nodes
from support.cluster.etcd_server import free_ports

if TYPE_CHECKING:
    from support.cluster.cluster_nodes import Run
    from support.processes.launcher import Launcher

SAVES = str(PROGRAMS / "node" / "saves.py")


def test_ranks_that_save_for_longer_than_the_budget_are_waited_for(launcher: Launcher) -> None:
    with launcher.start("run", "-n", "2", "--recovery-budget", "500ms", SAVES, "slowly") as running:
        running.until("ready", 2)
        running.process.send_signal(signal.SIGTERM)
        running.until(r"\[zbmd\]: SIGTERM received: ranks have 30s to end \(--stop-grace\); once more to end")
        running.until("saved", 2)
        assert running.end() == 128 + signal.SIGTERM, running.text
    assert "[zbmd]: stopped: SIGTERM received\n" in running.text


def test_ranks_that_do_not_end_in_the_grace_that_was_set_are_named(launcher: Launcher) -> None:
    with launcher.start("run", "-n", "2", SAVES, "never", ZBMD_STOP_GRACE="200ms") as running:
        running.until("ready", 2)
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 128 + signal.SIGINT, running.text
    assert "received: ranks have 200ms to end" in running.text
    assert "stopped: SIGINT received; killed after --stop-grace: rank" in running.text


def test_no_grace_at_all_is_a_setting_too(launcher: Launcher) -> None:
    (launcher.directory / "job.toml").write_text("stop-grace = 0\n")
    shown = launcher.run("run", "--config", "job.toml", "--show-config")
    assert 'stop_grace = "0s"  # job.toml' in shown.out
    refused = launcher.run("run", "--stop-grace", "soon", SAVES)
    assert refused.code == 2 and "--stop-grace: 'soon' is not a duration" in refused.errors[0]


async def two_nodes(nodes: Nodes, *argv: str, needed: str = "2") -> list[Run]:
    """Start a run over two nodes, and wait until its ranks are ready."""
    door = ("--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--nnodes", needed, "--on-loss", "shrink")
    runs: list[Run] = []
    for number in ("0", "1"):
        options = (*door, "--recovery-budget", BUDGET, "--node-rank", number, "-n", "1")
        runs.append(await nodes.start(f"n{number}", "run", *options, *argv, cwd=None, ZBMD_ARENA="1MiB"))
    for run in runs:
        await run.until("ready")
    return runs


async def test_a_job_that_is_taken_from_all_its_nodes_saves_together(nodes: Nodes) -> None:
    """As Slurm and spot instances do: SIGTERM to every node. None may leave before all ranks have saved."""
    runs = await two_nodes(nodes, SAVES, "together")
    for run in runs:
        run.signal(signal.SIGTERM)
    codes = [await run.ended() for run in runs]
    assert codes == [128 + signal.SIGTERM] * 2, "\n".join(map(str, runs))
    for run in runs:
        assert any(line.endswith("saved") for line in run.lines), run


async def test_a_node_that_is_taken_out_saves_and_the_others_go_on(nodes: Nodes) -> None:
    runs = await two_nodes(nodes, SAVES, "slowly", needed="1:2")
    runs[1].signal(signal.SIGTERM)
    assert await runs[1].ended() == 128 + signal.SIGTERM, str(runs[1])
    assert any(line.endswith("saved") for line in runs[1].lines), runs[1]
    await runs[0].until("-1 is gone")
    assert not any("asked" in line for line in runs[0].lines), runs[0]
    runs[0].signal(signal.SIGTERM)
    assert await runs[0].ended() == 128 + signal.SIGTERM, str(runs[0])
    assert any(line.endswith("saved") for line in runs[0].lines), runs[0]


async def test_a_second_signal_takes_the_rest_of_the_grace(nodes: Nodes) -> None:
    runs = await two_nodes(nodes, SAVES, "never")
    for run in runs:
        run.signal(signal.SIGTERM)
        await run.until("asked")
        run.signal(signal.SIGTERM)
    codes = await asyncio.gather(*(run.ended() for run in runs))
    assert codes == [128 + signal.SIGTERM] * 2, "\n".join(map(str, runs))
