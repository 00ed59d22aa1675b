"""Nodes of a cluster as a user has them: `zbmd-node up`, each with a state directory, all on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 40.0
BUDGET = "400ms"


class NodeRun:
    """One `zbmd-node up`, its lines read as they come."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.lines: list[str] = []
        self._news = asyncio.Condition()
        self._ended = False
        assert process.stderr is not None
        self._reader = asyncio.create_task(self._read(process.stderr))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            async with self._news:
                self.lines.append(line.decode().rstrip("\n"))
                self._news.notify_all()
        async with self._news:
            self._ended = True
            self._news.notify_all()

    async def until(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Wait for a line, the first `after` lines apart; fails with all that was printed."""
        wanted = re.compile(pattern)
        try:
            async with asyncio.timeout(TIMEOUT_S), self._news:
                while True:
                    for line in self.lines[after:]:
                        if found := wanted.search(line):
                            return found
                    if self._ended:
                        break
                    await self._news.wait()
        except TimeoutError:
            pass
        pytest.fail(f"{self.name} never printed {pattern!r}:\n{self}")

    async def ended(self) -> int:
        """Wait for the end; the exit code, or minus the signal."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._reader
            return await self.process.wait()

    async def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        await self.ended()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Nodes:
    """Nodes that share a cookie, below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs: dict[str, NodeRun] = {}

    def environment(self, name: str) -> dict[str, str]:
        """Of the node's commands."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ZBMD_") or k == "ZBMD_TEST_SESSION"}
        return {
            **kept,
            "ZBMD_COOKIE_FILE": str(self.directory / "cookie"),
            "ZBMD_STATE_DIR": str(self.directory / name),
            "COLUMNS": "200",
        }

    async def up(self, name: str, *arguments: str, listen: str = "127.0.0.1:0", **variables: str) -> NodeRun:
        """Start a node; it has its own state directory."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "zbmd.tools.node_cli"),
            *("up", "--listen", listen, "--name", name, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment(name), **variables},
            cwd=self.directory,
        )
        run = self.runs[name] = NodeRun(name, process)
        return run

    async def command(self, name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run `zbmd-node` as on the node's host: exit code, standard output and error."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "zbmd.tools.node_cli", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment(name), **variables},
            cwd=self.directory,
        )
        async with asyncio.timeout(TIMEOUT_S):
            out, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), errors.decode()

    async def members(self, name: str) -> dict[str, Any]:
        """What `zbmd-node members --json` says on the node's host."""
        code, out, errors = await self.command(name, "members", "--json")
        assert code == 0, errors
        found: dict[str, Any] = json.loads(out)
        return found

    def address(self, name: str) -> str:
        """Where the node listens."""
        running = json.loads((self.directory / name / "running.json").read_text())
        return str(running["address"])

    async def form(self, *names: str) -> list[NodeRun]:
        """A cluster of these nodes, the first being its founder; all act on the view of all."""
        first = await self.up(names[0], "--recovery-budget", BUDGET)
        await first.until(r"view 1: ")
        door = self.address(names[0])
        others = [await self.up(name, "--join", door) for name in names[1:]]
        runs = [first, *others]
        await self.agreed(*names)
        return runs

    async def agreed(self, *names: str, after: dict[str, int] | None = None) -> None:
        """Wait until each of the nodes acts on a view of just these."""
        for name in names:
            await self.runs[name].until(view_of(*names), after=(after or {}).get(name, 0))

    def marks(self) -> dict[str, int]:
        """How many lines each node has printed, for `after`."""
        return {name: len(run.lines) for name, run in self.runs.items()}


def view_of(*names: str) -> str:
    """A line that says that the node acts on a view of just these, in any order."""
    each = "".join(rf"(?=[^(]*\b{name}\b)" for name in names)
    return rf"view \d+: {each}\w+(, \w+){{{len(names) - 1}}} \("


@asynccontextmanager
async def nodes_in(directory: Path) -> AsyncGenerator[Nodes]:
    """Nodes that are all gone afterwards."""
    nodes = Nodes(directory)
    try:
        yield nodes
    finally:
        for run in nodes.runs.values():
            if run.process.returncode is None:
                run.process.kill()
        for run in nodes.runs.values():
            await run.ended()
