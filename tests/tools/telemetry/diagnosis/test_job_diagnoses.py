"""Diagnoses of jobs of a cluster: asked at any node, from what all nodes have recorded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import TIMEOUT_S, Nodes, Run

from zbmd.tools.entry import zbmd as cli

PROGRAM = PROGRAMS / "node/fails.py"
Diagnose = Callable[..., Awaitable[tuple[int, str, str]]]


def line_of(mark: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM}:{next(number for number, text in enumerate(lines, 1) if mark in text)} in load"


@pytest.fixture
def diagnose(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diagnose:
    """`zbmd diagnose` as on a node's host: exit code, and both streams."""

    async def run(name: str, *words: str) -> tuple[int, str, str]:
        for key, value in nodes.environment(name).items():
            monkeypatch.setenv(key, value)
        capsys.readouterr()
        code = await asyncio.to_thread(cli.main, ["diagnose", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


async def submitted(nodes: Nodes, how: str, *options: str) -> tuple[str, Run]:
    given = ("--nnodes", "2", "-n", "1", "--arena", "1MiB", *options)
    follower = await nodes.start("n1", "submit", "--follow", *given, str(PROGRAM), how)
    return (await follower.until(r"^[0-9a-f]{8,}$"))[0], follower


async def root_of(diagnose: Diagnose, job: str, *, names: str, state: str) -> dict[str, Any]:
    """Ask both nodes until they know: a rank's end is recorded once it is reaped and its output is read.

    They are asked one after the other: what is recorded in between is in the second answer alone.
    """
    found: list[dict[str, Any]] = []

    def is_known() -> bool:
        of_both = [(one["state"], (one["root"] or {}).get("cause")) for one in found]
        return of_both == [(state, names)] * 2 and found[0]["root"] == found[1]["root"]

    async with asyncio.timeout(TIMEOUT_S):
        while not is_known():
            found = [json.loads((await diagnose(node, job, "--json"))[1]) for node in ("n1", "n2")]
    assert found[0]["job"] == job, found
    sources = [name.partition(":")[0] for name in found[0]["sources"]]
    assert {"n1", "n2"} <= set(sources), sources
    root: dict[str, Any] = found[0]["root"]
    return root


async def host_of(nodes: Nodes, job: str, rank: int) -> str:
    (found,) = [one for one in await nodes.jobs("n2") if one["job"] == job]
    return f"{found['ranks'][rank]['node']} ({socket.gethostname()})"


async def test_an_error_a_kill_and_a_hang_are_named_from_any_node(nodes: Nodes, diagnose: Diagnose) -> None:
    await nodes.form("n1", "n2")

    job, follower = await submitted(nodes, "raises", "--max-restarts", "0")
    assert await follower.ended() == 1, str(follower)
    root = await root_of(diagnose, job, names="exception", state="failed")
    assert (root["ranks"], root["hosts"]) == ([1], [await host_of(nodes, job, 1)]), root
    assert root["place"] == line_of("FAILS HERE") and "sample 4711" in root["summary"], root

    killed, follower = await submitted(nodes, "waits", "--max-restarts", "1")
    first = await follower.until(r"\[rank1\]: pid (\d+)")
    os.kill(int(first[1]), signal.SIGKILL)
    second = await follower.until(rf"\[rank1\]: pid (?!{first[1]}\b)(\d+)")
    os.kill(int(second[1]), signal.SIGKILL)
    assert await follower.ended() == 1, str(follower)
    root = await root_of(diagnose, killed, names="killed", state="failed")
    assert (root["ranks"], root["hosts"]) == ([1], [await host_of(nodes, killed, 1)]), root
    assert "killed (SIGKILL)" in root["evidence"][0], root

    hung, _ = await submitted(nodes, "hangs", "--env", "ZBMD_PROGRESS_DEADLINE=2s")
    root = await root_of(diagnose, hung, names="hang-lock", state="running")
    assert (root["ranks"], root["hosts"]) == ([1], [await host_of(nodes, hung, 1)]), root
    assert root["place"] == line_of("HANGS HERE"), root

    code, text, _ = await diagnose("n2", job[:9])
    assert code == 1 and f"job: {job}" in text and f"at {line_of('FAILS HERE')}" in text, text
    code, text, _ = await diagnose("n2", str(PROGRAM), "--at", nodes.address("n1"))
    assert code == 1 and f"job: {hung}" in text, text  # the latest of that script
    code, _, errors = await diagnose("n1", "ffffffffffffffff")
    assert code == 2 and "or a job of the cluster" in errors, errors

    for name in ("n2", "n1"):
        await nodes.runs[name].kill()
    code, text, _ = await diagnose("n1", job)  # what this host has kept
    assert code == 1 and "no node runs here" in text and f"job: {job}" in text, text
