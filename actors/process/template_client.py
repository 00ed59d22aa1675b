"""The host's side of the template process: start it, ask for forks, receive replies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zbmd.actors.process import template
from zbmd.actors.process.early_template import EarlyTemplate, ForkedProcess
from zbmd.actors.process.template import Forked, ForkExited, ForkFailed, ForkRequest, Ready, Reply
from zbmd.transport.errors import RemoteProtocolError, UserError, ZbmdError
from zbmd.transport.host.threads import ONE_THREAD
from zbmd.transport.memory.huge_pages import huge_page_variables
from zbmd.transport.shm.attach import close_all

READY_S_MAX = 300.0
"""Time for the imports: minutes on a file system that thousands of nodes read at once."""
CLOSE_S_MAX = 0.5
REPLIES_PER_WAKE_MAX = 64
REPLY_BYTES_MAX = 4096

_MAIN = (
    "import sys; from zbmd.actors.process.early_template import leave_reaper_behind; "
    "leave_reaper_behind(int(sys.argv[1]), int(sys.argv[2])); "
    "from zbmd.actors.process.template import serve_host; serve_host(int(sys.argv[1]), sys.argv[3:])"
)


class TemplateLost(ZbmdError):
    """The template process ended, and every rank with it. killed: by SIGKILL."""

    def __init__(self, text: str, *, killed: bool = False) -> None:
        super().__init__(text)
        self.killed = killed


class TemplateClient:
    """One template process, and its reaper.

    `on_reply` gets each reply, a `Forked` one with the child's pidfd, which it then owns. early: a template
    that was forked already, which it then owns; without it a new interpreter is started.
    """

    def __init__(
        self,
        *,
        on_reply: Callable[[Forked | ForkFailed | ForkExited, int | None], None],
        on_lost: Callable[[TemplateLost], None],
        early: EarlyTemplate | None = None,
    ) -> None:
        self._early = early
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = (
            None  # the reaper, the template's parent
        )
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int:
        """The template's process id; 0 before it is ready."""
        ready = self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None
        return self._ready.result().pid if ready else 0

    async def start(self, *, modules: Sequence[str], environment: Mapping[str, str]) -> Ready:
        """Start the process and wait until it has imported `modules`.

        Must be called on the thread that lives longest: the template goes with it. One that was forked
        already has its own modules and environment. Raises `TemplateLost` when the imports fail or take
        longer than `READY_S_MAX`.
        """
        if self._early is None:
            self._process, ours = self._spawn(modules, environment)
        else:
            self._process, ours = self._early.process, self._early.socket
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        try:
            async with asyncio.timeout(READY_S_MAX):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise TemplateLost(
                f"the template process was still importing {', '.join(modules) or 'the modules of ranks'} "
                f"after {READY_S_MAX:g} s. Check what a module waits for, or why its file system is slow"
            ) from None

    @staticmethod
    def _spawn(
        modules: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: the working directory must not shadow what we import.
            command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(os.getpid()), *modules]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                # A pool that is started before a fork makes it unsafe.
                env={**huge_page_variables(), **environment, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the host alone, which decides
            )
        return process, ours

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
        """Ask for a child; the caller keeps its descriptors. Answered by `Forked` or `ForkFailed`.

        spare_fd: the spare's end of its socket, with a request that `waits`.
        Raises `UserError` when the request is too large and `TemplateLost` when nobody can take it.
        """
        if self._socket is None:
            raise TemplateLost("the template process has ended")
        packet = template.encode(msgspec.structs.replace(request, keeps=len(kept_fds or ())))
        if len(packet) > template.REQUEST_BYTES_MAX:
            raise UserError(
                f"the script's arguments take {len(packet)} bytes, more than {template.REQUEST_BYTES_MAX}. "
                "Put them into a file and give its name."
            )
        try:
            fds = (stdout_fd, stderr_fd, stdin_fd, *(kept_fds or ()), spare_fd)
            socket.send_fds(self._socket, [packet], [fd for fd in fds if fd is not None])
        except OSError as error:
            raise TemplateLost(f"the template process takes no requests: {error}") from error

    async def close(self) -> None:
        """End the template and all its remaining children."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if not self._ready.done():
            self._ready.cancel()
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is not None:
            return
        pidfd = os.pidfd_open(process.pid)
        ended = asyncio.Event()
        self._loop.add_reader(pidfd, ended.set)
        try:
            # A template that still imports does not look at its socket; its reaper then ends it.
            for end in (process.terminate, process.kill):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S_MAX):
                        await ended.wait()
                if ended.is_set():
                    break
                end()
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()

    def _readable(self) -> None:
        for _ in range(REPLIES_PER_WAKE_MAX):
            if self._socket is None:
                return
            try:
                packet, fds, _, _ = socket.recv_fds(self._socket, REPLY_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._lost()
                return
            try:
                reply = template.decode_reply(packet)
                if len(fds) != isinstance(reply, Forked) or self._ready.done() is isinstance(reply, Ready):
                    raise RemoteProtocolError(f"{type(reply).__name__} out of turn, {len(fds)} descriptors")
            except RemoteProtocolError as error:
                close_all(fds)
                self._lost(f"broke its protocol ({error})")
                return
            self._dispatch(reply, fds)

    def _dispatch(self, reply: Reply, fds: list[int]) -> None:
        match reply:
            case Ready():
                self._ready.set_result(reply)
            case Forked():
                self._on_reply(reply, fds[0])
            case ForkFailed() | ForkExited():
                self._on_reply(reply, None)

    def _lost(self, why: str = "") -> None:
        assert self._socket is not None and self._process is not None
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S_MAX)
        code = self._process.returncode
        how = (
            "is ending"
            if code is None
            else f"ended with exit code {code}"
            if code >= 0
            else f"was killed by signal {-code}"
        )
        error = TemplateLost(f"the template process {why or how}", killed=code == -signal.SIGKILL)
        if self._ready.done():
            self._on_lost(error)
        else:
            self._ready.set_exception(error)
