"""Whether anybody is taken for dead or hanging who is not, with all cores busy and all settings as they come.

    python -m zbmd.tools.chaos.soak_detector [--minutes 10] [--ranks N] [--nodes N] [--burners N]

Runs a job of N ranks under a host (death watch, watchdogs, judgement of hangs) and N nodes of a cluster on
loopback (heartbeats, views), beside processes that burn every core twice over. Nothing is killed, so whatever
hears of a loss, a hang, a new view or a node that stops itself is a false positive. The exit code is 1 if
there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

import zbmd
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankReport, ViewChanged
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.hangs.verdict import HangNotice
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.cli.options import script_parser
from zbmd.tools.cli.settings import cores

REPORT_EVERY = 200
ASK_S = 60.0


MINUTES_DEFAULT: Final = 10.0
LOAD_FACTOR: Final = 2
"""Burners a core."""
FORM_S: Final = 60.0
"""For the ranks and nodes to come together under load."""
BURNER: Final = (
    "import zbmd.transport.host.process as p, os; p.end_with_parent(os.getppid())\nwhile True: pass"
)
ARENA_BYTES: Final = 16 << 20
STOPPED: Final = "the soak is over"


class Ping(Contract, id="zbmd.soak.ping"):
    """The smallest question."""


class Echo(Actor):
    """Answers."""

    @on(Ping)
    async def ping(self, message: Ping) -> Ping:
        """Answer."""
        return message


def work() -> float:
    """Some milliseconds of numpy and of plain Python."""
    matrix = np.ones((256, 256), np.float32)
    total = float((matrix @ matrix).sum())
    return total + sum(range(20_000))


async def be_rank() -> None:
    """Barriers, asks between ranks and numpy, until the process ends."""
    async with zbmd.join() as worker:
        await worker.system.spawn(Echo, name="echo")
        group = await zbmd.group(worker)
        neighbour = worker.system.ref(f"rank{(worker.rank + 1) % worker.world_size}/echo")
        values = np.ones(50_000, np.float32)
        turns = 0
        while True:
            await group.all_reduce(values)
            values.fill(1.0)
            await neighbour.ask(Ping(), reply=Ping, timeout=ASK_S)
            await asyncio.to_thread(work)
            turns += 1
            if worker.rank == 0 and turns % REPORT_EVERY == 1:
                worker.report({"turns": turns})


@dataclass(slots=True)
class Soak:
    """False positives and progress so far."""

    false_positives: list[str] = field(default_factory=list[str])
    turns: int = 0
    views: int = 0
    over: bool = False
    working: asyncio.Event = field(default_factory=asyncio.Event)

    async def observe(self, event: HostEvent) -> None:
        """Take an event of the host."""
        match event:
            case RankReport(payload=payload):
                self.turns = max(self.turns, int(payload["turns"]))
                self.working.set()
            case ViewChanged():
                self.views += 1
                if self.views > 1:
                    self._wrong(f"a new view of the job: {event.view}")
            case HangNotice():
                self._wrong(f"a hang: {event.text}")
            case RankDown():
                self._wrong(f"rank {event.rank} ended: {event.reason}; {' / '.join(event.tail)}")
            case _:
                pass

    def node_line(self, line: str, *, formed: bool) -> None:
        """Take a line of a node: a false positive once the cluster stands."""
        if formed:
            self._wrong(f"a node: {line}")

    def _wrong(self, text: str) -> None:
        if not self.over:
            self.false_positives.append(text)

    async def write_line(self, line: OutputLine) -> None:
        """Drop a rank's line: it is no verdict, and its end is reported with the rank's."""


class Nodes:
    """A cluster of `zbmd-node up` processes on loopback."""

    def __init__(self, folder: Path, soak: Soak) -> None:
        self._folder = folder
        self._soak = soak
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._members: dict[str, int] = {}
        self._formed = False
        self._changed = asyncio.Event()

    async def form(self, count: int) -> None:
        """Start them and wait until each acts on a view of all. Raises `TimeoutError`."""
        async with asyncio.timeout(FORM_S):
            for number in range(count):
                name = f"soak{number}"
                joins = ["--join", self._address("soak0")] if number else []
                await self._start(name, joins)
                if not number:
                    await self._until(lambda: self._members.get("soak0", 0) >= 1)
            await self._until(lambda: sorted(self._members.values()) == [count] * count)
        self._formed = True

    async def close(self) -> None:
        """Kill them all."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes), *self._readers)

    async def _start(self, name: str, joins: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "ZBMD_COOKIE_FILE": str(self._folder / "cookie"),
            "ZBMD_STATE_DIR": str(self._folder / name),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "zbmd.tools.node.cli", "up"),
            *("--listen", "127.0.0.1:0", "--name", name, *joins),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        self._processes.append(process)
        self._readers.append(asyncio.create_task(self._read(name, process)))

    async def _read(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for data in process.stderr:
            line = data.decode(errors="replace").rstrip()
            found = re.search(r"view \d+: ([^(]*) \(", line)
            if found:
                self._members[name] = len(found[1].split(","))
            self._soak.node_line(f"{name}: {line}", formed=self._formed)
            self._changed.set()

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def _address(self, name: str) -> str:
        running = (self._folder / name / "running.json").read_text()
        found = re.search(r'"address":\s*"([^"]+)"', running)
        assert found is not None, running
        return found[1]


@contextlib.contextmanager
def burning(burners: int) -> Generator[None]:
    """Processes that do nothing but keep a core busy."""
    with contextlib.ExitStack() as stack:
        for _ in range(burners):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", BURNER]))
            stack.callback(burner.kill)
        yield


async def soak(seconds: float, ranks: int, nodes: int, burners: int) -> Soak:
    """Run everything for `seconds` once it stands."""
    found = Soak()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-soak-")))
        cluster = Nodes(folder, found)
        stack.push_async_callback(cluster.close)
        config = HostConfig(
            target="zbmd.tools.chaos.soak_detector", is_module=True, world_size=ranks, arena_bytes=ARENA_BYTES
        )
        host = Host(config, output=found, observer=found.observe)
        if nodes:
            await cluster.form(nodes)
        running = asyncio.create_task(host.run())
        async with asyncio.timeout(FORM_S):
            await found.working.wait()
        stack.enter_context(burning(burners))
        await asyncio.wait([running], timeout=seconds)
        if running.done():
            found.node_line(f"the job has ended: {running.result().reason}", formed=True)
        found.over = True
        host.stop(STOPPED, kill=True)
        await running
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if RankEnvironment.read(os.environ) is not None:
        zbmd.run(be_rank())
        return 0
    parser = script_parser("chaos.soak_detector", __doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES_DEFAULT)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--burners", type=int, default=LOAD_FACTOR * cores())
    arguments = parser.parse_args(argv)
    found = uvloop.run(soak(arguments.minutes * 60, arguments.ranks, arguments.nodes, arguments.burners))
    for text in found.false_positives:
        print(f"false positive: {text}")
    print(
        f"{arguments.minutes:g} min, {arguments.ranks} ranks, {arguments.nodes} nodes, {arguments.burners} "
        f"burners on {cores()} cores, load {os.getloadavg()[0]:.1f}: {found.turns} turns of the job, "
        f"{len(found.false_positives)} false positives"
    )
    return 1 if found.false_positives or not found.turns else 0


if __name__ == "__main__":
    sys.exit(main())
