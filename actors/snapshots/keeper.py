"""The launcher's side of a snapshot process: find it, start it, hand memory over, start another one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import structlog

from zbmd.actors.process.exit import describe_exit
from zbmd.actors.snapshots.client import HolderLine, Snapshots, address_of, attach, find_holders, tag_of
from zbmd.actors.snapshots.messages import (
    PACKET_BYTES_MAX,
    Finish,
    Hold,
    HolderSpec,
    JobIdentity,
    Refused,
    Request,
    encode,
    encode_spec,
)
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import UserError, ZbmdError

HOLDERS_STARTED_MAX: Final = 4
"""Of one job; what ends that many of them would end the next one."""
END_S_MAX: Final = 2.0
HOLDER_PROGRAM: Final = "zbmd.actors.snapshots.holder"
"""The module of a snapshot process that only holds."""
LINE_FD: Final = 3
"""The descriptor of its end of the line, in a holder."""
GIVEN_SIGNALS: Final = (signal.SIGTERM, signal.SIGPIPE)

log: Final = structlog.stdlib.get_logger("zbmd.snapshots")


class SnapshotKeeper:
    """The snapshot process of one job on this host, as its launcher sees it. Use on one event loop.

    run: the job's directory and command line; identity: reads what else must be equal, on a thread, and
    raises `UserError` if it cannot; idle_ns: how long memory outlives this launcher; say: takes lines for the
    user; program: the module that the process runs, see `holder`.
    """

    def __init__(
        self,
        run: str,
        identity: Callable[[], JobIdentity],
        idle_ns: int,
        say: Callable[[str], None],
        *,
        program: str = HOLDER_PROGRAM,
    ) -> None:
        self._tag, self._identity, self._idle_ns, self._say = tag_of(run), identity, idle_ns, say
        self._program = program
        self.job = secrets.randbits(63) | 1
        """The job's number: that of the run before, if its memory was found."""
        self.resumes = False
        """Whether this job goes on from what a run before has left here."""
        self.pid = 0
        """The holder's process; 0 while there is none."""
        self._found: dict[int, int] = {}
        self._memory: Mapping[int, int] = {}
        """Of each rank, while the job is open: the descriptors are the job's."""
        self._line: socket.socket | None = None
        self._outbox: deque[tuple[Request, int | None]] = deque()
        self._started = 0
        self._is_ours = False
        self._has_kept = False
        self._is_over = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._sent = asyncio.Event()
        """Set whenever nothing is left to send."""
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- before the job

    async def find(self) -> None:
        """Take over what a run before has left. Says why, if something is there that may not be used."""
        found = find_holders(tag=self._tag)
        if not found:
            return
        try:
            identity = await asyncio.to_thread(self._identity)
        except UserError as error:
            self._say(f"snapshots of a run before are not used: {error}")
            return
        for address in found:
            with contextlib.suppress(ZbmdError):
                answer = await asyncio.to_thread(attach, address.name, identity)
                if not isinstance(answer, Refused):
                    self._take(*answer)
                    return
                if answer.fields:
                    self._say(
                        f"the snapshots of job {address.job:x} are not used: {answer.reason}. They wait for "
                        f"the same run; zbmd snapshots --job {address.job:x} --drop frees the memory"
                    )

    def _take(self, line: HolderLine, snapshots: Snapshots) -> None:
        self.job, self.resumes = snapshots.standing.job, bool(snapshots.memory)
        self._found, self.pid = snapshots.memory, line.pid
        self._watch(line.line)
        ranks = ", ".join(map(str, sorted(self._found)))
        self._say(f"process {line.pid} holds the memory of rank {ranks} of this job: it goes on from there")

    @property
    def ranks_found(self) -> list[int]:
        """The ranks whose memory a run before has left, ascending."""
        return sorted(self._found)

    def take(self, rank: int) -> int | None:
        """Return the memory of a rank that a run before has left; it is the caller's from now on."""
        return self._found.pop(rank, None)

    # ---- during the job

    def keep(self, memory: Mapping[int, int]) -> None:
        """Have the memory of all ranks outlive this process, from now on. Idempotent.

        memory: descriptors by rank, open until `close`; those that are added are handed over by `add`.
        """
        if self._memory is not memory and not self._is_over:
            self._memory, self._has_kept = memory, True
            if self._line is None:
                self._task(self._start())
            else:
                self._hand_over()

    def add(self, rank: int) -> None:
        """Hand over the memory of one more rank."""
        if self._line is not None and rank in self._memory:
            self._send(Hold(rank=rank), self._memory[rank])

    async def _start(self) -> None:
        try:
            identity = await asyncio.to_thread(self._identity)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (UserError, OSError) as error:
            self._say(f"no process holds the state of this job, and it ends with its launcher: {error}")
            return
        spec = HolderSpec(
            address=address_of(self._tag, self.job),
            job=self.job,
            idle_ns=self._idle_ns,
            identity=identity,
            number=self._started + 1,
        )
        with theirs:
            try:
                self.pid = _spawn(self._program, encode_spec(spec), theirs.fileno())
            except OSError as error:
                ours.close()
                self._say(f"no process can be started to hold the state of this job: {error.strerror}")
                return
        self._started, self._is_ours = self._started + 1, True
        self._watch(ours)
        self._hand_over()

    def _watch(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self._ended.clear()
        asyncio.get_running_loop().add_reader(line.fileno(), self._readable)

    def _hand_over(self) -> None:
        for rank, memory in list(self._memory.items()):
            self._send(Hold(rank=rank), memory)

    def _send(self, request: Request, memory: int | None = None) -> None:
        own = None if memory is None else os.dup(memory)  # the job may be closed before it is sent
        self._outbox.append((request, own))
        self._flush()

    def _flush(self) -> None:
        line, loop = self._line, asyncio.get_running_loop()
        if line is None:
            return
        loop.remove_writer(line.fileno())
        self._sent.clear()
        while self._outbox:
            request, memory = self._outbox[0]
            try:
                fds = [] if memory is None else [memory]
                socket.send_fds(line, [encode(request)], fds, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                loop.add_writer(line.fileno(), self._flush)
                return
            except OSError:
                return  # its end is read
            self._outbox.popleft()
            if memory is not None:
                os.close(memory)
        self._sent.set()

    def _readable(self) -> None:
        assert self._line is not None
        try:
            while self._line.recv(PACKET_BYTES_MAX):
                pass  # it confirms
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("the line to the snapshot process", reason=str(error))
        self._drop_line()
        self._task(self._lost())

    def _drop_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(line.fileno())
            loop.remove_writer(line.fileno())
            line.close()
        while self._outbox:
            _, memory = self._outbox.popleft()
            if memory is not None:
                os.close(memory)

    async def _lost(self) -> None:
        """Report the end of the holder, and start another one unless the job is over."""
        pid, self.pid, how = self.pid, 0, "it has ended"
        if self._is_ours:
            with contextlib.suppress(ChildProcessError):
                _, status = await asyncio.to_thread(os.waitpid, pid, 0)
                how = describe_exit(os.waitstatus_to_exitcode(status))
        self._ended.set()
        if self._is_over:
            return
        if self._started >= HOLDERS_STARTED_MAX:
            self._say(
                f"the snapshot process {pid} is lost, {how}, the last of {self._started}: if this launcher "
                "is lost too, the job goes on from its last checkpoint"
            )
            return
        self._say(f"the snapshot process {pid} is lost, {how}: another one takes its place")
        await self._start()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- after the job

    async def close(self, *, keeps: bool) -> None:
        """End the holder, or, if the run failed (`keeps`), leave it the memory. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._tasks and not keeps:
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=END_S_MAX)
        while self._found:
            os.close(self._found.popitem()[1])
        if self._line is not None:
            if keeps and (self._has_kept or self.resumes):
                await self._leave()
            else:
                self._send(Finish())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S_MAX):
                        await self._ended.wait()
        self._drop_line()

    async def _leave(self) -> None:
        """Let go of a holder that has all memory."""
        if self._outbox:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S_MAX):
                    await self._sent.wait()
        self._say(
            f"process {self.pid} holds the state of this job for {format_duration(self._idle_ns)}: the same "
            f"command goes on from there, zbmd snapshots --job {self.job:x} --drop frees the memory"
        )


def _spawn(program: str, spec: str, line: int) -> int:
    """Start a holder in a session of its own; return its process id. Raises OSError."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", program, spec, str(LINE_FD)],
        os.environ,
        file_actions=[*null, (os.POSIX_SPAWN_DUP2, line, LINE_FD)],
        setsid=True,
        setsigmask=(),
        setsigdef=GIVEN_SIGNALS,
    )
