"""An actor that is a process: it runs a command at a place, and ends with its process.

So a supervisor of actors supervises hosts and devices as well, with all its strategies. `devices` has the
workers of this host. A supervised node is a process that runs a node on some host, and moves to another host
if that fails:

    hosts = Placements(PlacementMachine([Placement(name="a"), Placement(name="b")]), probe)
    command = ("ssh", "-tt", "-o", "ServerAliveInterval=1", "{host}", "zbmd-node", "up", "--join", address)
    await system.supervise([node_child("spare", hosts, command)], back_off=BackOff())

`{host}` is the name of the host. With `ssh -tt` the node ends with the command. If the supervisor's process
is in the cluster (a node's actors, or a `Session.connect()`), a node is also lost when the cluster goes on
without it: its host may be down or stopped while the command runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, assert_never

import structlog

from zbmd.actors.core.actor import Actor
from zbmd.actors.core.ref import Down, Reason, ReasonKind
from zbmd.actors.errors import ActorStartFailed
from zbmd.actors.process.exit import describe_exit
from zbmd.actors.process_pool import placement as p
from zbmd.actors.process_pool.forks import Fork
from zbmd.actors.routing.routes import Routes
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.transport.errors import ZbmdError

NODE_READY: Final = r"^\[zbmd\]: .* view \d+: "
"""What `zbmd-node up` says once it is a member."""
ASK_AGAIN_S: Final = 5.0
"""Whether a node is lost, after nobody could be asked."""
_LIFE: Final = re.compile(r"\b(node[1-9]\d{0,18})#(\d{1,18})\b")
NODE_STOP_S: Final = 15.0
"""A node is let go by its cluster, and ends its jobs."""


OUTPUT_CHUNK_BYTES: Final = 1 << 16
LINE_BYTES_MAX: Final = 4096
LINES_KEPT: Final = 20
READY_S: Final = 60.0
PROBE_S: Final = 30.0

log: Final = structlog.stdlib.get_logger("zbmd.process")


class NoPlacement(ZbmdError):
    """All places are taken or in quarantine; the supervisor tries again as its back-off says."""


class Placements:
    """The places of a supervisor's children: the driver of `PlacesMachine`. Used on one loop.

    probe: says of a place what is wrong with it, or nothing.
    """

    def __init__(self, machine: p.PlacementMachine, probe: Callable[[str], Awaitable[str]]) -> None:
        self._machine = machine
        self._probe = probe
        self.news = asyncio.Event()
        """Set whenever something has changed, for who waits for a state; who waits clears it."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def states(self) -> dict[str, p.PlacementState]:
        """Return how the places stand."""
        return self._machine.states

    def take(self, child: str) -> str:
        """Return a place for the child. Raises `NoPlacement`."""
        for action in self._handle(p.Wanted(child=child)):
            if isinstance(action, p.Assigned):
                log.info("placed", child=child, place=action.place, reason=action.reason)
                return action.place
            if isinstance(action, p.Refused):
                raise NoPlacement(action.reason)
        raise AssertionError("a child is assigned or refused")

    def release(self, child: str, *, failed: bool, reason: str) -> None:
        """The child has ended."""
        if self._machine.where(child) is not None:
            self._handle(p.Released(child=child, failed=failed, reason=reason))

    async def close(self) -> None:
        """End timers and probes. Idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._probes:
            task.cancel()
        if self._probes:
            await asyncio.wait(self._probes)

    def _handle(self, event: p.Event) -> list[p.Action]:
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        self.news.set()
        for action in actions:
            match action:
                case p.Quarantined(place=place, until_ns=until_ns, reason=reason):
                    log.warning("in quarantine", place=place, reason=reason)
                    delay_s = max(0, until_ns - time.monotonic_ns()) / 1e9
                    fired = partial(self._handle, p.QuarantineEnded(place=place))
                    self._timers[place] = asyncio.get_running_loop().call_later(delay_s, fired)
                case p.Probe(place=place):
                    task = asyncio.get_running_loop().create_task(self._run_probe(place))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
                case p.Reopened(place=place):
                    log.info("healthy again", place=place)
                case p.Assigned() | p.Refused():
                    pass
                case _:
                    assert_never(action)
        return actions

    async def _run_probe(self, place: str) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                problem = await self._probe(place)
        except (ZbmdError, OSError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._handle(p.Probed(place=place, problem=problem))


def lifetime_linked(command: Sequence[str]) -> list[str]:
    """Return the command, so that it ends with this process, however that ends."""
    return [sys.executable, "-m", "zbmd.transport.host.process", str(os.getpid()), *command]


class CommandProcess:
    """A process of a command that leads a session of its own, used as a `Fork` is."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.pid = process.pid
        self.stdin = process.stdin
        self.stdout = process.stdout
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Return its exit code, or minus the signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """The same, once it has ended."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """To the process and what it has started in its session; it is not reaped yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Its pipes end with it."""


class ProcessActor(Actor):
    """Runs a command at a place that it holds until it ends.

    Its `started` is over when the process is `ready`. It stops the process with SIGTERM, and with SIGKILL
    when its own time is up. Code 0 is a normal end, any other a failure. The process is killed with this
    actor, and with this whole process, however that ends.
    """

    captured = False
    ready_s: float = READY_S

    def __init__(self, places: Placements) -> None:
        self.places = places
        self.place = ""
        self.process: CommandProcess | Fork | None = None
        self._tail: deque[str] = deque(maxlen=LINES_KEPT)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._why_lost = ""
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def command(self) -> Sequence[str]:
        """Return the command to run at `place`."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Variables beside those of this process."""
        return {}

    def first_words(self) -> bytes:
        """Return the first bytes on standard input, which stays open for as long as this actor lives."""
        return b""

    async def ready(self) -> None:
        """Wait until the process is what it should be."""

    async def until_lost(self) -> str:
        """Once it is ready: wait until it is known to be lost, whatever its command does; why."""
        never: asyncio.Future[str] = self.system.loop.create_future()
        return await never

    async def launch(self) -> CommandProcess | Fork:
        """Start the process: here, of the command."""
        process = await asyncio.create_subprocess_exec(
            *lifetime_linked(self.command()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.environment()},
            start_new_session=True,
        )
        return CommandProcess(process)

    async def until_line(self, holds: Callable[[str], bool]) -> str:
        """For `ready`: wait for a line of its output, and return it."""
        seen: str | None = None
        while seen is None:
            self._changed.clear()
            seen = next((line for line in self._tail if holds(line)), None)
            if seen is None:
                await self._changed.wait()
        return seen

    async def started(self) -> None:
        """Take a place, run the command there, and wait until it is ready."""
        cell = self._running_cell()
        cell.watch(self._over)
        self.place = self.places.take(self.ref.actor)
        self.process = await self.launch()
        if not cell.is_alive:  # killed meanwhile
            self._kill()
            return
        self.process.stdin.write(self.first_words())
        loop = self.system.loop
        reading = loop.create_task(self._read(self.process), name=f"output of {self.ref.actor}")
        waiting = loop.create_task(self._wait(self.process, reading), name=f"end of {self.ref.actor}")
        self._tasks = [reading, waiting]
        for task in self._tasks:
            self.system.linger(task)
        getting_ready = loop.create_task(self.ready(), name=f"{self.ref.actor} gets ready")
        try:
            done, _ = await asyncio.wait(
                [getting_ready, waiting], timeout=self.ready_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                late = f"not ready {self.ready_s:g} s after its start: {self._end()}"
                raise ActorStartFailed(f"{self.ref.actor} at {self.place}: {late}")
            if not getting_ready.done():
                raise ActorStartFailed(f"{self.ref.actor} at {self.place}: {self._end()}")
            getting_ready.result()
            self._watching = loop.create_task(self._watch(), name=f"{self.ref.actor} may be lost")
            self.system.linger(self._watching)
        except BaseException:
            getting_ready.cancel()
            self._kill()
            raise

    async def _watch(self) -> None:
        """It may be lost while its command goes on. What nobody counts on any more is killed."""
        self._why_lost = await self.until_lost()
        self._kill()

    async def stopping(self, reason: Reason) -> None:
        """Ask the process to end and wait until it has ended."""
        self._stopping = True
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await asyncio.wait(self._tasks)

    def _end(self) -> str:
        if self._why_lost:
            return self._why_lost
        code = None if self.process is None else self.process.returncode
        output = f"; it said: {self._tail[-1]}" if self._tail else ""
        return f"{'it runs' if code is None else describe_exit(code)}{output}"

    async def _wait(self, process: CommandProcess | Fork, reading: asyncio.Task[None]) -> None:
        code = await process.wait()
        await asyncio.wait([reading], timeout=1.0)  # what it has started may hold the pipe open
        reading.cancel()
        process.close()
        if not self._stopping and self._running_cell().is_alive:
            kind = ReasonKind.NORMAL if code == 0 else ReasonKind.FAILED
            self.system.exit(self.ref, Reason(kind, f"at {self.place}: {self._end()}"))

    async def _read(self, process: CommandProcess | Fork) -> None:
        rest = b""
        while data := await process.stdout.read(OUTPUT_CHUNK_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-LINE_BYTES_MAX:]
            for line in lines:
                text = line[:LINE_BYTES_MAX].decode(errors="replace")
                self._tail.append(text)
                log.debug("output", process=self.ref.actor, line=text)
            self._changed.set()

    def _over(self, down: Down) -> None:
        """The end of this incarnation, killed or not: the process goes with it, and the place is free."""
        if self._watching is not None:
            self._watching.cancel()
        self._kill()
        failed = not down.reason.is_normal and down.reason.kind is not ReasonKind.KILLED
        self.places.release(self.ref.actor, failed=failed, reason=str(down.reason))

    def _kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)


class NodeProcess(ProcessActor):
    """A node that is started by a command, from being a member until its command ends or it is lost."""

    stopping_s = NODE_STOP_S

    def __init__(
        self, places: Placements, command: Sequence[str], ready: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(places)
        self._command = tuple(command)
        self._ready = re.compile(ready)
        self._environment = dict(environment)
        self._life: tuple[str, int] | None = None
        """The process and the incarnation that it became a member as, if it has said so."""

    def command(self) -> Sequence[str]:
        """See `ProcessActor`."""
        return [word.replace("{host}", self.place) for word in self._command]

    def environment(self) -> Mapping[str, str]:
        """See `ProcessActor`."""
        return {name: value.replace("{host}", self.place) for name, value in self._environment.items()}

    async def ready(self) -> None:
        """Wait for the line of its output that says so."""
        line = await self.until_line(lambda line: self._ready.search(line) is not None)
        found = _LIFE.search(line)
        self._life = None if found is None else (found[1], int(found[2]))

    async def until_lost(self) -> str:
        """See `ProcessActor`: the cluster goes on without it."""
        routes = self.system.service(Routes)
        if self._life is None or routes is None:
            return await super().until_lost()
        while True:
            try:
                reason = await routes.until_gone(*self._life)
            except ZbmdError as error:
                log.info("nobody tells whether a node is lost", node=self._life[0], reason=str(error))
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            process, life = self._life
            return f"the cluster goes on without {process}#{life}: {reason}"


def node_child(
    name: str,
    hosts: Placements,
    command: Sequence[str],
    *,
    ready: str = NODE_READY,
    environment: Mapping[str, str] | None = None,
    restart: Restart = Restart.PERMANENT,
) -> ChildSpec:
    """Return a node, for a supervisor. ready: a pattern of the line that says that the command is up."""
    args = (hosts, tuple(command), ready, environment or {})
    return ChildSpec(name=name, actor=NodeProcess, args=args, restart=restart, shutdown_s=NODE_STOP_S)
