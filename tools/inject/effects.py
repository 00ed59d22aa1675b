"""Effects that slow a rank, and their undoing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zbmd.training.job.stragglers.delays import DataDelay, delaying_data
from zbmd.transport.errors import UserError

PERIOD_S: Final = 0.05
"""Of a duty cycle, in which the rank is stopped once."""
QUOTA_PERIOD_US: Final = 50_000
CGROUPS: Final = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG: Final = 1


class Target:
    """A rank's process: its pid, and a descriptor that never means another process."""

    def __init__(self, directory: Path, rank: int, pid: int) -> None:
        self.directory, self.rank, self.pid = directory, rank, pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise UserError(f"rank {rank} (pid {pid}) has ended: {error.strerror}") from error

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.pidfd)

    def signal(self, number: signal.Signals) -> bool:
        """Send it a signal; return False if it has ended. Raises `UserError` without the permission."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError as error:
            raise UserError(
                f"rank {self.rank} (pid {self.pid}) is another user's: run this as that user"
            ) from error
        return True


class Effect(ABC):
    """Something that slows a rank. `undo` is safe at any moment, and in another process of this user."""

    @abstractmethod
    def begin(self) -> None:
        """Begin. Raises `UserError` for what this machine or user cannot do."""

    @abstractmethod
    def undo(self) -> None:
        """Leave everything as it was. Idempotent."""

    def tick(self) -> bool:
        """Do what is to be done again and again, for up to `PERIOD_S`; return False if the rank has ended."""
        return True


class DutyCycle(Effect):
    """Stops the rank in each period, so that it takes `factor` times as long."""

    def __init__(self, target: Target, factor: float) -> None:
        self._target, self._stop_s = target, PERIOD_S * (1 - 1 / factor)

    def begin(self) -> None:
        """See `Effect`."""
        self._target.signal(signal.SIGCONT)

    def tick(self) -> bool:
        """See `Effect`."""
        if not self._target.signal(signal.SIGSTOP):
            return False
        try:
            time.sleep(self._stop_s)
        finally:
            lives = self._target.signal(signal.SIGCONT)
        time.sleep(PERIOD_S - self._stop_s)
        return lives

    def undo(self) -> None:
        """See `Effect`."""
        self._target.signal(signal.SIGCONT)


class Load(Effect):
    """Busy processes on the rank's processors, `count` of them, at priority `nice`."""

    def __init__(self, target: Target, count: int, nice: int) -> None:
        self._target, self._count, self._nice = target, count, nice
        self._busy: list[int] = []

    def begin(self) -> None:
        """See `Effect`."""
        allowed, parent = os.sched_getaffinity(self._target.pid), os.getpid()
        for _ in range(self._count):
            pid = os.fork()
            if not pid:
                _spin(allowed, self._nice, parent)
            self._busy.append(pid)

    def undo(self) -> None:
        """See `Effect`: only their parent ends them; the kernel does when that is killed."""
        while self._busy:
            pid = self._busy.pop()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _spin(allowed: set[int], nice: int, parent: int) -> None:
    """Use a processor until the parent ends; never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.sched_setaffinity(0, allowed)
        os.nice(nice)
        while os.getppid() == parent:
            sum(range(10_000))
    finally:
        os._exit(0)


class DataDelayed(Effect):
    """The batch of each step comes later."""

    def __init__(self, target: Target, delay_ms: float) -> None:
        self._open = contextlib.ExitStack()
        self._asked = target.directory, target.rank, DataDelay(delay_ms=delay_ms)

    def begin(self) -> None:
        """See `Effect`."""
        self._open.enter_context(delaying_data(*self._asked))

    def undo(self) -> None:
        """See `Effect`: the kernel does it when the process that began it ends."""
        self._open.close()


class Quota(Effect):
    """A cgroup that lets the rank use so many processors."""

    def __init__(self, target: Target, cpus: float) -> None:
        self._target, self._quota_us = target, round(cpus * QUOTA_PERIOD_US)
        self._home, self._is_v2 = _cgroup_of(target.pid)
        self._made = self._home / f"zbmd-inject-{target.pid}"

    def begin(self) -> None:
        """See `Effect`."""
        limit = ("cpu.max", f"{self._quota_us} {QUOTA_PERIOD_US}")
        limits = [limit] if self._is_v2 else _limits_v1(self._quota_us)
        try:
            if self._is_v2:
                (self._home / "cgroup.subtree_control").write_text("+cpu")
            self._made.mkdir()
            for name, text in limits:
                (self._made / name).write_text(text)
            (self._made / "cgroup.procs").write_text(str(self._target.pid))
        except OSError as error:
            self.undo()
            raise UserError(
                f"--cpus: cannot make a cgroup below {self._home} ({error.strerror}): it needs one with the "
                "cpu controller that this user may write"
            ) from error

    def undo(self) -> None:
        """See `Effect`."""
        with contextlib.suppress(OSError):
            for pid in (self._made / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended
                    (self._home / "cgroup.procs").write_text(pid)
            self._made.rmdir()


def _limits_v1(quota_us: int) -> list[tuple[str, str]]:
    return [("cpu.cfs_period_us", str(QUOTA_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))]


def _cgroup_of(pid: int) -> tuple[Path, bool]:
    """Return the folder of the cgroup that limits the processors of `pid`, and whether it is of version 2."""
    unified = CGROUPS
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return CGROUPS / "cpu" / path.lstrip("/"), False
        if not controllers:
            unified = CGROUPS / path.lstrip("/")
    return unified, True


class LinkDelay(Effect):
    """`tc netem` on an interface of this host: all that leaves by it is later."""

    def __init__(self, interface: str, delay_ms: float) -> None:
        self._interface, self._delay_ms = interface, delay_ms
        self._begun = False

    def begin(self) -> None:
        """See `Effect`."""
        done = self._tc("add", "netem", "delay", f"{self._delay_ms}ms")
        if done.returncode:
            raise UserError(
                f"--link-delay: tc refused {self._interface} ({done.stderr.strip()}): it needs CAP_NET_ADMIN "
                "and an interface without a queueing discipline of its own"
            )

    def undo(self) -> None:
        """See `Effect`."""
        self._tc("del", "netem")

    def _tc(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["tc", "qdisc", verb, "dev", self._interface, "root", *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UserError(
                f"--link-delay: cannot run tc ({error.strerror}): apt install iproute2"
            ) from error


def undo_all(effects: Sequence[Effect]) -> None:
    """Undo them, the last one first, whatever fails."""
    for effect in reversed(effects):
        with contextlib.suppress(UserError, OSError):
            effect.undo()
