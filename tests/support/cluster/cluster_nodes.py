"""Nodes of a cluster as a user has them: `zbmd-node up`, each with a state directory, all on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.cluster import cluster_template
from support.processes.polling import until

TIMEOUT_S = 180.0
BUDGET = "2s"
"""The kernel proves most deaths: a node that gets no processor for a second is not to be taken for one."""


class Run:
    """One `zbmd-node`, its lines read as they come."""

    def __init__(self, what: str, pid: int) -> None:
        self.what = what
        self.pid = pid
        self.lines: list[str] = []
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Condition()
        self._open = 0
        self._readers: list[asyncio.Task[None]] = []

    async def read(self, fd: int) -> None:
        """Take the lines of one more stream."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
        self._open += 1
        self._readers.append(asyncio.create_task(self._read(reader)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            async with self._news:
                self.lines.append(line.decode().rstrip("\n"))
                self._news.notify_all()
        async with self._news:
            self._open -= 1
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
                    if not self._open:
                        break
                    await self._news.wait()
        except TimeoutError:
            pass
        pytest.fail(f"{self.what} never printed {pattern!r}:\n{self}")

    async def ended(self) -> int:
        """Wait for the end; the exit code, or minus the signal. Fails with all that was printed."""
        ending = [*self._readers, self.code]  # which go on if this gives up
        _, left = await asyncio.wait(ending, timeout=TIMEOUT_S)
        if left:
            pytest.fail(f"{self.what} never ended:\n{self}")
        return self.code.result()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if not self.code.done():
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """`kill -9`."""
        self.signal(signal.SIGKILL)
        await self.ended()

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Nodes:
    """Nodes that share a cookie, below one directory. Made by `nodes_in`."""

    def __init__(self, directory: Path, template: socket.socket) -> None:
        self.directory = directory
        self.runs: dict[str, Run] = {}
        self._all: list[Run] = []
        self._template = template
        self._by_pid: dict[int, Run] = {}
        self._codes: dict[int, int] = {}
        self._pids: asyncio.Queue[int] = asyncio.Queue()
        self._starting = asyncio.Lock()
        asyncio.get_running_loop().add_reader(template.fileno(), self._on_answer)

    def _on_answer(self) -> None:
        answer = json.loads(self._template.recv(cluster_template.REQUEST_BYTES_MAX) or b"{}")
        if "code" in answer:
            self._codes[answer["pid"]] = answer["code"]
            self._tell_codes()
        elif "pid" in answer:
            self._pids.put_nowait(answer["pid"])

    def _tell_codes(self) -> None:
        for pid in [pid for pid in self._codes if pid in self._by_pid]:
            self._by_pid.pop(pid).code.set_result(self._codes.pop(pid))

    async def remembers(self, name: str, others: int) -> None:
        """Return once a node has stored where so many others are."""
        state = self.directory / name / "node.json"
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: len(json.loads(state.read_bytes()).get("doors", ())) == others)

    def environment(self, name: str) -> dict[str, str]:
        """Of the node's commands."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ZBMD_") or k == "ZBMD_TEST_SESSION"}
        return {
            **kept,
            "ZBMD_COOKIE_FILE": str(self.directory / "cookie"),
            "ZBMD_STATE_DIR": str(self.directory / name),
            "COLUMNS": "200",
        }

    async def start(self, name: str, *argv: str, cwd: Path | None = None, **variables: str) -> Run:
        """Start `zbmd-node` as on the node's host."""
        out, errors = os.pipe(), os.pipe()
        request = {
            "argv": argv,
            "environment": {**self.environment(name), **variables},
            "cwd": str(cwd or self.directory),
        }
        async with self._starting:
            socket.send_fds(self._template, [json.dumps(request).encode()], [out[1], errors[1]])
            pid = await self._pids.get()
        for fd in (out[1], errors[1]):
            os.close(fd)
        run = self._by_pid[pid] = Run(f"{name} {argv[0]}", pid)
        self._all.append(run)
        self._tell_codes()
        await run.read(out[0])
        await run.read(errors[0])
        return run

    async def up(
        self,
        name: str,
        *argv: str,
        listen: str = "127.0.0.1:0",
        cwd: Path | None = None,
        **variables: str,
    ) -> Run:
        """Start a node; it has its own state directory."""
        options = ("--listen", listen, "--name", name, *argv)
        run = self.runs[name] = await self.start(name, "up", *options, cwd=cwd, **variables)
        return run

    async def command(self, name: str, *argv: str, **variables: str) -> tuple[int, str]:
        """Run another command as on the node's host, to its end: exit code and all that it printed."""
        run = await self.start(name, *argv, cwd=None, **variables)
        return await run.ended(), str(run)

    async def members(self, name: str) -> dict[str, Any]:
        """What `zbmd-node members --json` says on the node's host."""
        found: dict[str, Any] = await self._json(name, "members")
        return found

    async def jobs(self, name: str) -> list[dict[str, Any]]:
        """What `zbmd-node jobs --json` says on the node's host."""
        found: list[dict[str, Any]] = (await self._json(name, "jobs"))["jobs"]
        return found

    async def _json(self, name: str, command: str) -> dict[str, Any]:
        code, text = await self.command(name, command, "--json")
        assert code == 0, text
        found: dict[str, Any] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        return found

    def address(self, name: str) -> str:
        """The address at which the node listens."""
        return str(json.loads((self.directory / name / "running.json").read_text())["address"])

    async def form(self, *names: str) -> list[Run]:
        """A cluster of these nodes, the first being its founder; all act on the view of all."""
        first = await self.up(names[0], "--recovery-budget", BUDGET)
        await first.until(r"view 1: ")
        join_address = self.address(names[0])
        runs = [first, *[await self.up(name, "--join", join_address) for name in names[1:]]]
        await self.agreed(*names)
        return runs

    async def agreed(self, *names: str, after: dict[str, int] | None = None) -> None:
        """Wait until each of the nodes has acted on a view of just these."""
        for name in names:
            await self.runs[name].until(view_of(*names), after=(after or {}).get(name, 0))

    def marks(self) -> dict[str, int]:
        """The number of lines that each node has printed, for `after`."""
        return {name: len(run.lines) for name, run in self.runs.items()}

    async def close(self) -> None:
        """End all that still runs."""
        for run in self._all:
            run.signal(signal.SIGKILL)
        for run in self._all:
            await run.ended()
        asyncio.get_running_loop().remove_reader(self._template.fileno())


def view_of(*names: str) -> str:
    """A line that says that the node acts on a view of just these, in any order."""
    each = "".join(rf"(?=[^(]*\b{name}\b)" for name in names)
    return rf"view \d+: {each}\w+(, \w+){{{len(names) - 1}}} \("


@contextmanager
def node_template(*before: str) -> Generator[socket.socket]:
    """The process that nodes are forked from, for any number of tests: see `cluster_template`.

    before: a command that is to start it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        command = [*before, sys.executable, cluster_template.__file__, str(theirs.fileno())]
        environment = {**os.environ, cluster_template.MARKER: cluster_template.NO_MARKER}
        with theirs:
            template = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        try:
            ours.settimeout(TIMEOUT_S)
            ours.recv(cluster_template.REQUEST_BYTES_MAX)
            yield ours
        finally:
            ours.close()
            template.wait(TIMEOUT_S)


@asynccontextmanager
async def nodes_in(directory: Path, template: socket.socket) -> AsyncGenerator[Nodes]:
    """Nodes that are all gone afterwards. template: from `node_template`; one test uses it at a time."""
    nodes = Nodes(directory, template)
    try:
        yield nodes
    finally:
        await nodes.close()
