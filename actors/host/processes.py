"""The rank processes of a host: forked from its template, signalled, their output drained, their ends told.

Decides nothing: a desk (`ProcessDesk`) says what to fork and hears what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, assert_never

import structlog

from zbmd.actors.host.early_template import EarlyTemplate
from zbmd.actors.host.output import OutputSink
from zbmd.actors.host.process import RankProcess
from zbmd.actors.host.template import Exited, Forked, ForkFailed, ForkRequest
from zbmd.actors.host.template_client import TemplateClient, TemplateLost
from zbmd.transport.errors import UserError
from zbmd.transport.shm.death_notice import DeathNotice

log: Final = structlog.stdlib.get_logger("zbmd.actors.host")

KILLED_S_MAX = 1.0

ProcessKey: TypeAlias = tuple[int, int, int]
"""Job, rank and incarnation."""


class ProcessDesk(Protocol):
    """What is done with what the processes do. Called on the loop; must not block."""

    def forked(self, process: RankProcess) -> None:
        """The process exists."""
        ...

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """There is no such process."""
        ...

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """The process is gone and reaped. Returns what is to be called once its last line is delivered."""
        ...

    def template_lost(self, error: TemplateLost) -> None:
        """The template is gone, and every process goes with it: the ends of all of them follow."""
        ...


class RankProcesses:
    """All rank processes of one template. output: takes their lines; early: see `TemplateClient`."""

    def __init__(self, desk: ProcessDesk, output: OutputSink, *, early: EarlyTemplate | None = None) -> None:
        self._desk = desk
        self._output = output
        self._live: dict[ProcessKey, RankProcess] = {}
        self._draining: dict[ProcessKey, RankProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._template = TemplateClient(on_reply=self._on_reply, on_lost=self._on_template_lost, early=early)
        self._template_lost = False

    @property
    def template_pid(self) -> int:
        """The template's process id; 0 before it is ready."""
        return self._template.pid

    async def start(self, *, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the template and wait until it has imported `modules`. Raises as `TemplateClient.start`."""
        ready = await self._template.start(modules=modules, environment=environment)
        if ready.threads > 1:
            log.warning("the template has threads: forks may hang", threads=ready.threads)

    def find(self, key: ProcessKey) -> RankProcess | None:
        """The process, until it is reaped."""
        return self._live.get(key)

    def fork(self, request: ForkRequest) -> None:
        """Make a process; answered by the desk's `forked` or `fork_failed`. Raises `UserError`."""
        process = RankProcess(request.rank, request.incarnation, self._output, job=request.job)
        self._live[process.key] = process
        self._empty.clear()
        try:
            self._template.fork(request, stdout_fd=process.stdout_fd, stderr_fd=process.stderr_fd)
        except TemplateLost as error:
            asyncio.get_running_loop().call_soon(self._fork_failed, process, str(error))
        except UserError:
            self._forget(process)
            self._task(process.abandon())
            raise
        process.release_child_ends()

    def signal(self, key: ProcessKey, number: signal.Signals) -> bool:
        """Send a signal to a process; False if it is gone."""
        process = self._live.get(key)
        return process is not None and process.send_signal(number)

    def noticed(self, key: ProcessKey, notice: DeathNotice) -> bool:
        """The native watcher saw the end of a process; whether it was not known to be gone."""
        process = self._live.get(key) or self._draining.get(key)
        if process is None or notice.clean:
            return False
        process.notice = notice
        return key in self._live

    async def empty(self) -> None:
        """Wait until there is no process."""
        await self._empty.wait()

    async def settle(self) -> None:
        """Wait until every line of those who are gone is delivered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Kill what is left, wait for it, and let go of everything."""
        left = list(self._live.values())
        for process in left:
            process.send_signal(signal.SIGKILL)
        await self._template.close()
        forked = [process.ended.wait() for process in left if process.pid]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*forked), KILLED_S_MAX)
        for process in left:
            await process.abandon()
        for task in list(self._tasks):
            task.cancel()
            await asyncio.wait([task])

    def _on_reply(self, reply: Forked | ForkFailed | Exited, pidfd: int | None) -> None:
        process = self._live[reply.job, reply.rank, reply.incarnation]
        match reply:
            case Forked():
                assert pidfd is not None
                process.forked(reply.pid, pidfd, self._on_gone)
                self._desk.forked(process)
            case ForkFailed():
                self._fork_failed(process, reply.reason)
            case Exited():
                self._on_exited(process, reply.code)
            case _:
                assert_never(reply)

    def _on_template_lost(self, error: TemplateLost) -> None:
        """Every rank dies with the template; nobody is left to tell their exit codes."""
        self._template_lost = True
        self._desk.template_lost(error)
        for process in list(self._live.values()):
            if process.pid == 0:
                self._fork_failed(process, str(error))
            elif process.ended.is_set():
                self._on_gone(process)

    def _on_gone(self, process: RankProcess) -> None:
        """The kernel says so; the exit code comes from the template, unless that is gone too."""
        if self._template_lost and process.key in self._live:
            self._on_exited(process, -signal.SIGKILL)

    def _on_exited(self, process: RankProcess, code: int) -> None:
        self._draining[process.key] = process
        self._forget(process)
        process.exited()
        self._task(self._drain(process, self._desk.exited(process, code)))

    async def _drain(self, process: RankProcess, done: Callable[[], None]) -> None:
        await process.drained()
        self._draining.pop(process.key, None)
        done()

    def _fork_failed(self, process: RankProcess, reason: str) -> None:
        if process.key not in self._live:
            return
        self._forget(process)
        self._task(process.drained())
        self._desk.fork_failed(process, reason)

    def _forget(self, process: RankProcess) -> None:
        del self._live[process.key]
        if not self._live:
            self._empty.set()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
