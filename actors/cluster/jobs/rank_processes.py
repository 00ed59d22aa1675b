"""The rank processes of a host: fork, signal, drain output, report ends.

Decides nothing: a handler (`ProcessHandler`) decides what to fork and receives the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, assert_never

import structlog

from zbmd.actors.cluster.jobs.reports import RankDown
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.process.exit import describe_exit
from zbmd.actors.process.output import OutputPump, OutputSink
from zbmd.actors.process.template import Forked, ForkExited, ForkFailed, ForkRequest, Ready
from zbmd.actors.process.template_client import TemplateClient, TemplateLost
from zbmd.transport.errors import UserError
from zbmd.transport.shm.death_notice import DeathNotice

PRELOAD = ("asyncio", "uvloop", "numpy", "msgspec", "structlog", "zbmd", "zbmd.actors.rank.member")
"""Modules that a template imports before it forks ranks."""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def takes_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; see SigCgt in proc(5)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


class RankProcess:
    """One incarnation of one rank, from the decision to fork it until its last line is delivered."""

    def __init__(self, rank: int, incarnation: int, sink: OutputSink, *, job: int = 0) -> None:
        self.job = job
        self.rank = rank
        self.incarnation = incarnation
        self.pid = 0
        self.asked_ns = time.monotonic_ns()
        self.notice: DeathNotice | None = None
        self.confirmed_ns = 0
        self.cause = ""
        """See `zbmd.actors.process.exit`; its template reads it at its end."""
        self.killed_by = ""
        """The reason of its SIGKILL, for people, if it is known."""
        self.on_debugger: Callable[[RankProcess, bool], None] | None = None
        """Called when it stops in a debugger, and when it goes on."""
        self.takes_signals = True
        """Whether it may be sent any: not a process that somebody else has started."""
        self.was_spare = False
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        out_read, self.stdout_fd = os.pipe2(os.O_CLOEXEC)
        err_read, self.stderr_fd = os.pipe2(os.O_CLOEXEC)
        self._pumps = [
            OutputPump(out_read, rank=rank, incarnation=incarnation, stream="stdout", sink=sink, job=job),
            OutputPump(err_read, rank=rank, incarnation=incarnation, stream="stderr", sink=sink, job=job),
        ]
        self._pumps[1].on_debugger = self._debugging

    @property
    def key(self) -> tuple[int, int, int]:
        """Job, rank and incarnation."""
        return self.job, self.rank, self.incarnation

    def become(self, rank: int, incarnation: int) -> None:
        """It was a spare, and is that rank from now on."""
        self.rank, self.incarnation, self.was_spare = rank, incarnation, True
        self.asked_ns = time.monotonic_ns()
        for pump in self._pumps:
            pump.become(rank, incarnation)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of its standard error."""
        return tuple(self._pumps[1].tail)

    def down(self, code: int, *, expected: bool, next_step: str, why: str = "") -> RankDown:
        """Return the event of its end, once its last lines are known. why: it was ended from here."""
        return RankDown(
            rank=self.rank,
            incarnation=self.incarnation,
            pid=self.pid,
            code=code,
            reason=f"{describe_exit(code)}: {why}" if why else self.killed_by or describe_exit(code),
            no_memory=bool(self.killed_by),
            normal=code == 0,
            expected=expected,
            noticed_ns=self.notice.at_ns if self.notice is not None else None,
            confirmed_ns=self.confirmed_ns,
            tail=self.tail,
            next_step=next_step,
            cause=self.cause,
        )

    def _debugging(self, is_on: bool) -> None:
        if self.on_debugger is not None:
            self.on_debugger(self, is_on)

    def release_child_ends(self) -> None:
        """Close our copies of the child's pipe ends."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd >= 0:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = -1

    def forked(self, pid: int, pidfd: int, on_end: Callable[[RankProcess], None]) -> None:
        """The process exists; `on_end` is called once the kernel reports its end."""
        self.pid = pid
        self._pidfd = pidfd

        def gone() -> None:
            self._confirm()
            on_end(self)

        self._loop.add_reader(pidfd, gone)

    @property
    def pidfd(self) -> int:
        """Its pidfd; -1 before the process exists, and once it is reaped."""
        return self._pidfd

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to this process, never to a later one with its pid; return False if none was sent."""
        if self._pidfd < 0 or not self.takes_signals:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def exited(self) -> None:
        """The process is reaped; no more signals can be sent."""
        self._confirm()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def drained(self) -> None:
        """Wait until everything it wrote is delivered."""
        self.release_child_ends()
        await asyncio.gather(*(pump.finish() for pump in self._pumps))

    async def abandon(self) -> None:
        """Release everything, delivered or not."""
        self.exited()
        self.release_child_ends()
        for pump in self._pumps:
            await pump.cancel()

    def _confirm(self) -> None:
        if self.confirmed_ns == 0:
            self.confirmed_ns = time.monotonic_ns()
            self.ended.set()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)


log: Final = structlog.stdlib.get_logger("zbmd.actors.host")

KILLED_S_MAX = 1.0


def kept_after(kept_fd: int, ending: Sequence[RankProcess]) -> Sequence[int] | None:
    """Return the memory of a rank, and the pidfd of its process that is ending; None if there are several."""
    fds = [one.pidfd for one in ending if not one.ended.is_set()]
    return [kept_fd, *fds] if len(fds) < 2 and all(fd >= 0 for fd in fds) else None


OnReply: TypeAlias = Callable[[Forked | ForkFailed | ForkExited, int | None], None]
"""Takes a reply of a template, and with `Forked` the pidfd, which it then owns."""
OnLost: TypeAlias = Callable[[TemplateLost], None]


class Template(Protocol):
    """A source of processes: a `TemplateClient`, or processes that somebody else has started."""

    @property
    def pid(self) -> int:
        """See `TemplateClient`."""
        ...

    async def start(self, *, modules: Sequence[str], environment: Mapping[str, str]) -> Ready:
        """See `TemplateClient`."""
        ...

    def fork(
        self,
        request: ForkRequest,
        *,
        stdout_fd: int,
        stderr_fd: int,
        stdin_fd: int | None = None,
        kept_fds: Sequence[int] | None = None,
        spare_fd: int | None = None,
    ) -> None:
        """See `TemplateClient`."""
        ...

    async def close(self) -> None:
        """See `TemplateClient`."""
        ...


Adopts: TypeAlias = Callable[[OnReply, OnLost], Template]
"""Makes what takes the place of the template. Its processes are not ours: they get no signals."""

ProcessKey: TypeAlias = tuple[int, int, int]
"""Job, rank and incarnation."""


class ProcessHandler(Protocol):
    """Handles what processes do. Called on the loop; must not block."""

    def forked(self, process: RankProcess) -> None:
        """The process exists."""
        ...

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """The process could not be forked."""
        ...

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """The process is reaped. Returns a function to call once its last line is delivered."""
        ...

    def debugging(self, process: RankProcess, *, is_on: bool) -> None:
        """The process stops in a debugger, or goes on."""
        ...

    def template_lost(self, error: TemplateLost) -> None:
        """The template is gone, and every process with it; their ends are reported next."""
        ...


class RankProcesses:
    """All rank processes of one template. output: takes their lines; early: see `TemplateClient`.

    adopts: takes its place, if these processes are started by somebody else;
    stdin_rank: the rank that has this process's standard input; None for no one.
    """

    def __init__(
        self,
        handler: ProcessHandler,
        output: OutputSink,
        *,
        early: EarlyTemplate | None = None,
        adopts: Adopts | None = None,
        stdin_rank: int | None = None,
    ) -> None:
        self._handler = handler
        self._output = output
        self._stdin_rank = stdin_rank
        self._live: dict[ProcessKey, RankProcess] = {}
        self._draining: dict[ProcessKey, RankProcess] = {}
        self._renamed: dict[ProcessKey, ProcessKey] = {}
        """Keys of former spares: as the template knows them, and as they are known now."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._are_ours = adopts is None
        self._template: Template = (
            TemplateClient(on_reply=self._on_reply, on_lost=self._on_template_lost, early=early)
            if adopts is None
            else adopts(self._on_reply, self._on_template_lost)
        )
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

    def kept_fds(self, job: int, rank: int, kept_fd: int | None) -> Sequence[int] | None:
        """Return what a new process of a rank is given of `kept_fd`, memory that outlives its processes.

        A predecessor that is still ending may write to it: the process uses it only once that has ended, and
        is given its pidfd to wait for.
        """
        ending = [p for p in self._live.values() if (p.job, p.rank) == (job, rank)]
        return None if kept_fd is None else kept_after(kept_fd, ending)

    def stdin_fd(self, rank: int) -> int | None:
        """Return the standard input of a rank; None if it has none."""
        return 0 if rank == self._stdin_rank else None

    def rename(self, key: ProcessKey, new: ProcessKey) -> RankProcess:
        """Know a spare as the rank that it is now."""
        process = self._live.pop(key)
        process.become(*new[1:])
        self._live[new], self._renamed[key] = process, new
        return process

    def fork(self, request: ForkRequest, *, kept_fd: int | None = None, spare_fd: int | None = None) -> None:
        """Make a process; answered by the handler's `forked` or `fork_failed`. Raises `UserError`.

        kept_fd: see `kept_fds`; spare_fd: see `TemplateClient`.
        """
        kept_fds = self.kept_fds(request.job, request.rank, kept_fd)
        process = RankProcess(request.rank, request.incarnation, self._output, job=request.job)
        process.takes_signals = self._are_ours
        process.on_debugger = lambda one, is_on: self._handler.debugging(one, is_on=is_on)
        self._live[process.key] = process
        self._empty.clear()
        try:
            self._template.fork(
                request,
                stdout_fd=process.stdout_fd,
                stderr_fd=process.stderr_fd,
                stdin_fd=self.stdin_fd(request.rank),
                kept_fds=kept_fds,
                spare_fd=spare_fd,
            )
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
        """The native watcher saw a process end. Returns whether that is news."""
        process = self._live.get(key) or self._draining.get(key)
        if process is None or notice.clean:
            return False
        process.notice = notice
        return key in self._live

    async def empty(self) -> None:
        """Wait until no process is left."""
        await self._empty.wait()

    async def settle(self) -> None:
        """Wait until every line of ended processes is delivered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Kill remaining processes, wait for them, and release everything."""
        left = list(self._live.values())
        for process in left:
            process.send_signal(signal.SIGKILL)
        await self._template.close()
        forked = [process.ended.wait() for process in left if process.pid and process.takes_signals]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S_MAX):
                await asyncio.gather(*forked)
        for process in left:
            await process.abandon()
        for task in list(self._tasks):
            task.cancel()
            await asyncio.wait([task])

    async def close_once_empty(self) -> None:
        """Close those of a lost template once the ends of its ranks are reported."""
        await self.empty()
        await self.settle()
        await self.close()

    def _on_reply(self, reply: Forked | ForkFailed | ForkExited, pidfd: int | None) -> None:
        key = reply.job, reply.rank, reply.incarnation
        process = self._live[self._renamed.get(key, key)]
        match reply:
            case Forked():
                assert pidfd is not None
                process.forked(reply.pid, pidfd, self._on_gone)
                self._handler.forked(process)
            case ForkFailed():
                self._fork_failed(process, reply.reason)
            case ForkExited():
                self._renamed.pop(key, None)
                process.cause = reply.cause
                self._on_exited(process, reply.code)
            case _:
                assert_never(reply)

    def _on_template_lost(self, error: TemplateLost) -> None:
        """Every rank died with the template, which would have reported their exit codes."""
        self._template_lost = True
        self._handler.template_lost(error)
        for process in list(self._live.values()):
            if process.pid == 0:
                self._fork_failed(process, str(error))
            elif process.ended.is_set():
                self._on_gone(process)

    def _on_gone(self, process: RankProcess) -> None:
        """The kernel reported the end; the exit code comes from the template, unless that is gone too."""
        if self._template_lost and process.key in self._live:
            self._on_exited(process, -signal.SIGKILL)

    def _on_exited(self, process: RankProcess, code: int) -> None:
        self._draining[process.key] = process
        self._forget(process)
        process.exited()
        self._task(self._drain(process, self._handler.exited(process, code)))

    async def _drain(self, process: RankProcess, done: Callable[[], None]) -> None:
        await process.drained()
        self._draining.pop(process.key, None)
        done()

    def _fork_failed(self, process: RankProcess, reason: str) -> None:
        if process.key not in self._live:
            return
        self._forget(process)
        self._task(process.drained())
        self._handler.fork_failed(process, reason)

    def _forget(self, process: RankProcess) -> None:
        del self._live[process.key]
        if not self._live:
            self._empty.set()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
