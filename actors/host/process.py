"""One rank process as its host sees it: descriptors, output, and how its end is put into words."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from zbmd.actors.host.events import RankDown
from zbmd.actors.host.output import OutputPump, OutputSink
from zbmd.transport.shm.death_notice import DeathNotice


def describe_exit(code: int) -> str:
    """An exit code, or minus a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed ({name})"


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


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
        self.asked_to_end = False
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        out_read, self.stdout_fd = os.pipe2(os.O_CLOEXEC)
        err_read, self.stderr_fd = os.pipe2(os.O_CLOEXEC)
        self._pumps = [
            OutputPump(out_read, rank=rank, incarnation=incarnation, stream="stdout", sink=sink, job=job),
            OutputPump(err_read, rank=rank, incarnation=incarnation, stream="stderr", sink=sink, job=job),
        ]

    @property
    def key(self) -> tuple[int, int, int]:
        """Job, rank and incarnation."""
        return self.job, self.rank, self.incarnation

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of its standard error."""
        return tuple(self._pumps[1].tail)

    def down(self, code: int, *, expected: bool, next_step: str) -> RankDown:
        """What is told of its end, once its last lines are known."""
        return RankDown(
            rank=self.rank,
            incarnation=self.incarnation,
            pid=self.pid,
            code=code,
            reason=describe_exit(code),
            normal=code == 0,
            expected=expected,
            noticed_ns=self.notice.at_ns if self.notice is not None else None,
            confirmed_ns=self.confirmed_ns,
            tail=self.tail,
            next_step=next_step,
        )

    def release_child_ends(self) -> None:
        """Close our copies of the child's ends of the pipes."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd >= 0:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = -1

    def forked(self, pid: int, pidfd: int, on_end: Callable[[RankProcess], None]) -> None:
        """The process exists; `on_end` is called once the kernel says that it is gone."""
        self.pid = pid
        self._pidfd = pidfd

        def gone() -> None:
            self._confirm()
            on_end(self)

        self._loop.add_reader(pidfd, gone)

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process, never to a later one of the same pid; False if it is gone."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def exited(self) -> None:
        """The process is reaped: nothing can be sent to it any more."""
        self._confirm()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def drained(self) -> None:
        """Wait until everything it wrote has been delivered."""
        self.release_child_ends()
        await asyncio.gather(*(pump.finish() for pump in self._pumps))

    async def abandon(self) -> None:
        """Let go of everything, delivered or not."""
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
