"""Captures of real nodes replay to the same answers: membership, detector, jobs."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

from programs import PROGRAMS
from support.cluster.cluster_nodes import BUDGET, Nodes
from support.cluster.etcd_server import free_ports

from zbmd.tools.replay.players import secrets_for
from zbmd.transport import capture


def replayed(directory: Path, cookie: Path) -> Counter[str]:
    """Return how many streams of each name were replayed to the same answers; fails at one that was not."""
    verdicts = list(capture.replay_log(directory, secrets=secrets_for(cookie)))
    others = [verdict for verdict in verdicts if not isinstance(verdict, capture.Identical)]
    assert verdicts and not others, others
    return Counter(verdict.stream for verdict in verdicts)


async def test_a_run_over_nodes_with_a_kill_is_replayed(nodes: Nodes) -> None:
    door = f"127.0.0.1:{free_ports(1)[0]}"
    options = ("--nnodes", "1:2", "--on-loss", "shrink", "-n", "1", "--recovery-budget", "2s")
    runs = [
        await nodes.start(
            f"n{n}", "run", "--rdzv-endpoint", door, "--node-rank", str(n), *options,
            "--capture", "log", str(PROGRAMS / "node/views.py"), ZBMD_ARENA="1MiB",
        )
        for n in range(2)
    ]  # fmt: skip
    await runs[0].until(r"rank \d of 2")
    await runs[1].until(r"rank \d of 2")
    (nodes.directory / "done").touch()
    await runs[1].kill()
    assert await runs[0].ended() == 0, str(runs[0])
    found = replayed(nodes.directory / "log", nodes.directory / "cookie")
    assert found["one job"] == found["jobs"] == found["cluster"] == found["detector"] == 2, found
    hosts = {path.name for path in (nodes.directory / "log").iterdir() if path.name.startswith("host-")}
    assert len(hosts) == 2, hosts


async def test_a_node_that_is_up_is_replayed_with_all_of_its_lives_and_jobs(nodes: Nodes) -> None:
    (nodes.directory / "done").touch()
    log = ("--capture", str(nodes.directory / "log"))
    first = await nodes.up("n1", "--recovery-budget", BUDGET, *log)
    await first.until("view 1: ")
    for _ in range(2):
        second = await nodes.up("n2", "--join", nodes.address("n1"), *log)
        await nodes.agreed("n1", "n2")
        second.signal(signal.SIGTERM)  # a kill would take the last tenth of a second of its log along
        assert await second.ended() == 0, str(second)
    jobs = [
        await nodes.command("n1", "submit", "--follow", "-n", "1", str(PROGRAMS / "node/views.py"))
        for _ in range(2)
    ]
    assert [code for code, _ in jobs] == [0, 0], jobs
    assert (await nodes.command("n1", "down"))[0] == 0
    assert await first.ended() == 0
    found = replayed(nodes.directory / "log", nodes.directory / "cookie")
    assert found["jobs"] == found["cluster"] == found["detector"] == 3, found
    folders = sorted(path for path in (nodes.directory / "log").iterdir() if path.name.startswith("job-"))
    assert len(folders) == 2
    for folder in folders:
        replayed(folder, nodes.directory / "cookie")
