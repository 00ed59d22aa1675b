"""Processes of a supervisor that are forked from a template of their own, and so are up in milliseconds.

The template is that of ranks (`zbmd.actors.process.template`): it has imported what they need and started
nothing. A `Fork` is used as a process of `asyncio.subprocess`. It ends with its template, that with its
reaper, and that with this process, however each of them ends; a template that is gone is started again when
the next fork is wanted. Where the modules cannot be imported in one thread there are no forks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from zbmd.actors.process.template import CHILDREN_MAX, Forked, ForkExited, ForkFailed, ForkRequest
from zbmd.actors.process.template_client import TemplateClient, TemplateLost
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.host.threads import ONE_THREAD

FORKS_MAX: Final = CHILDREN_MAX
"""Forks of one template that live, or are about to."""

log: Final = structlog.stdlib.get_logger("zbmd.forks")


class ForkRefused(ZbmdError):
    """There is no new process; the reason says why."""


class ForkInput:
    """Standard input of a fork, for the few words that a pipe takes at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        """Write all of it. Raises OSError if the process has gone, or reads nothing."""
        written = os.write(self._fd, data) if data else 0
        if written != len(data):
            raise BlockingIOError(f"{len(data)} bytes for standard input, which took {written}")

    def close(self) -> None:
        """The process reads an end. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Fork:
    """A process, with what is used of a `asyncio.subprocess.Process`. Standard error goes to `stdout` too."""

    def __init__(self, stdin: ForkInput, stdout: asyncio.StreamReader, output: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self._output = output
        self._loop = loop
        self._pidfd = -1
        self._unwanted = False
        self.begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()

    async def wait(self) -> int:
        """Its exit code, or minus the signal, once it has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """To the process. What it has started in its own session is killed when it has ended."""
        if self._pidfd >= 0 and self.returncode is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return  # its end is about to be reported

    def close(self) -> None:
        """Give its descriptors back. Idempotent."""
        self.stdin.close()
        self._output.close()

    def disown(self) -> None:
        """Nobody waits for it any more: kill it, at once or as soon as it is there."""
        self._unwanted = True
        self.close()
        self.send_signal(signal.SIGKILL)

    # Reports of the template about it.

    def forked(self, pid: int, pidfd: int) -> None:
        """It runs; `pidfd` is its own."""
        self.pid, self._pidfd = pid, pidfd
        if not self.begun.done():
            self.begun.set_result(None)
        if self._unwanted:
            self.send_signal(signal.SIGKILL)

    def refused(self, error: ZbmdError) -> None:
        """It was never there."""
        self.close()
        if not self.begun.done():
            self.begun.set_exception(error)

    def ended(self, code: int) -> None:
        """It has ended, and is reaped."""
        if self.returncode is None:
            self.returncode = code
            os.close(self._pidfd)
            self._pidfd = -1
            if not self._ended.done():
                self._ended.set_result(code)

    def orphaned(self) -> None:
        """Its template has ended, so the kernel kills it: wait until it has."""
        pidfd = self._pidfd

        def gone() -> None:
            self._loop.remove_reader(pidfd)
            self.ended(-signal.SIGKILL)

        self._loop.add_reader(pidfd, gone)


class Forks:
    """The template of some supervised processes, and what is forked from it. Used on one loop.

    modules: what the template imports, beside what is its own. on_task: is given tasks that end by
    themselves. To be used on the thread that lives longest: template and forks go with it.
    """

    def __init__(self, modules: Sequence[str], *, on_task: Callable[[asyncio.Task[None]], None]) -> None:
        self._modules = tuple(dict.fromkeys(modules))
        self._on_task = on_task
        self._client: TemplateClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._environment: dict[str, str] = {}
        self._forks: dict[int, Fork] = {}
        self._next = 0
        self._closed = False
        self.why_not = ""
        """Why there are no forks; empty as long as there may be."""

    @property
    def template_pid(self) -> int:
        """Return the template's process id; 0 if there is none now."""
        return 0 if self._client is None else self._client.pid

    async def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Fork | None:
        """`python -m module …` as a fork of the template; None if there are no forks: see `why_not`.

        environment: variables beside those of this process. Raises `ForkRefused`, `TemplateLost` if the
        template ends meanwhile, and `UserError` if the arguments are too large.
        """
        client = await self._template()
        if client is None:
            return None
        if len(self._forks) >= FORKS_MAX:
            raise ForkRefused(f"{FORKS_MAX} processes are forked already")
        wanted = {
            **ONE_THREAD,
            **os.environ,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **(environment or {}),
        }
        self._next += 1
        number = self._next
        request = ForkRequest(
            rank=number,
            incarnation=0,
            target=module,
            is_module=True,
            arguments=tuple(arguments),
            environment={name: v for name, v in wanted.items() if self._environment.get(name) != v},
        )
        fork = await self._ask(client, number, request)
        try:
            await fork.begun
        except asyncio.CancelledError:
            fork.disown()
            raise
        return fork

    async def close(self) -> None:
        """Fork no more. The template ends with the last fork, or now if there is none. Idempotent."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if not self._forks:
            await self._end()

    async def _ask(self, client: TemplateClient, number: int, request: ForkRequest) -> Fork:
        loop = asyncio.get_running_loop()
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        stdin, output = ForkInput(in_write), os.fdopen(out_read, "rb", buffering=0)
        os.set_blocking(in_write, False)
        reader = asyncio.StreamReader()
        try:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
            fork = Fork(stdin, reader, transport)
            try:
                client.fork(request, stdout_fd=out_write, stderr_fd=out_write, stdin_fd=in_read)
            except BaseException:
                fork.close()
                raise
        except BaseException:
            stdin.close()
            raise
        finally:
            os.close(in_read)
            os.close(out_write)
        self._forks[number] = fork
        return fork

    # The template.

    async def _template(self) -> TemplateClient | None:
        if self._closed:
            raise LocalProtocolError("these workers are closed")
        if self._client is None and not self.why_not:
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(
                    self._start(), name="start of a template"
                )
            # A cancelled waiter does not make the others start from the beginning.
            await asyncio.shield(self._starting)
        return self._client

    async def _start(self) -> None:
        client = TemplateClient(on_reply=self._on_reply, on_lost=self._on_lost)
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, "PYTHONPATH": path, **ONE_THREAD}
        try:
            ready = await client.start(modules=self._modules, environment=self._environment)
            if ready.threads > 1:
                self.why_not = f"what they import starts threads ({ready.threads} run then)"
        except TemplateLost as error:
            self.why_not = f"what they import cannot be imported: {error}"
        finally:
            self._starting = None
        if self.why_not:
            log.warning("workers are not forked but started", reason=self.why_not)
            await client.close()
        else:
            self._client = client

    async def _end(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _on_reply(self, reply: Forked | ForkFailed | ForkExited, pidfd: int | None) -> None:
        match reply:
            case Forked():
                assert pidfd is not None
                fork = self._forks.get(reply.rank)
                if fork is None:
                    os.close(pidfd)
                else:
                    fork.forked(reply.pid, pidfd)
            case ForkFailed():
                self._gone(reply.rank, lambda fork: fork.refused(ForkRefused(reply.reason)))
            case ForkExited():
                self._gone(reply.rank, lambda fork: fork.ended(reply.code))

    def _gone(self, number: int, tell: Callable[[Fork], None]) -> None:
        fork = self._forks.pop(number, None)
        if fork is not None:
            tell(fork)
        if self._closed and not self._forks:
            self._on_task(asyncio.get_running_loop().create_task(self._end(), name="end of a template"))

    def _on_lost(self, error: TemplateLost) -> None:
        client, self._client = self._client, None
        forks, self._forks = self._forks, {}
        for fork in forks.values():
            if fork.pid:
                fork.orphaned()
            else:
                fork.refused(error)
        if client is not None:
            self._on_task(asyncio.get_running_loop().create_task(client.close(), name="end of a template"))
