"""A template that is forked from its launcher before the launcher has started a thread, loop or link.

It has already imported what the launcher has, so a job starts sooner by an interpreter's start and imports.
It must not continue in the launcher's frames: `TemplateBegins` is raised there, and the program's entry
point catches it and calls `run`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from zbmd.actors.process.blas_threads import ONE_THREAD_DEFAULTS
from zbmd.actors.process.reaper import leave_reaper_behind
from zbmd.actors.process.template import serve_host


class TemplateBegins(BaseException):
    """Raised in the fork to unwind the launcher's frames. Not an `Exception`, so that nothing catches it."""

    def __init__(self, host: socket.socket, host_pid: int, modules: Sequence[str]) -> None:
        super().__init__("the template begins")
        self._host = host
        self._host_pid = host_pid
        self._modules = modules

    def run(self) -> NoReturn:
        """Become the reaper, the template, and later a rank, as a new interpreter would."""
        leave_reaper_behind(self._host.fileno(), self._host_pid)
        serve_host(self._host.detach(), self._modules)


class ForkedProcess:
    """A child made by `os.fork`, with the part of `subprocess.Popen` that is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its exit code; None if it has not ended within `timeout` seconds."""
        if timeout is not None and self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    return None
            finally:
                os.close(pidfd)
        return self._reap(0)

    def terminate(self) -> None:
        """Send SIGTERM, if it runs."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class EarlyTemplate:
    """A forked template: its reaper's process, and the host's end of its socket."""

    def __init__(self, process: ForkedProcess, sock: socket.socket) -> None:
        self.process = process
        self.socket = sock


def fork_template(modules: Sequence[str], environment: Mapping[str, str]) -> EarlyTemplate | None:
    """Fork the template of this process's jobs. On the main thread, before there is a loop or a link.

    modules: what it imports beside what is imported; environment: its variables. Returns None if this process
    has threads already (a pool of BLAS, say), for a fork would not be safe: a new interpreter is. Raises
    `TemplateBegins` in the fork, and OSError.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    host_pid = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
    except BaseException:
        ours.close()
        theirs.close()
        raise
    if pid:
        theirs.close()
        return EarlyTemplate(ForkedProcess(pid), ours)
    ours.close()
    _be_new(environment)
    raise TemplateBegins(theirs, host_pid, modules)


def _be_new(environment: Mapping[str, str]) -> None:
    """Drop the launcher's terminal, session and script directory, as a new interpreter would."""
    os.setsid()  # Ctrl-C reaches the host alone, which decides
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    variables = {**ONE_THREAD_DEFAULTS, **environment}
    os.environ.clear()
    os.environ.update(variables)
    if not sys.flags.safe_path:
        del sys.path[0]  # the launcher's own directory must not shadow what a job imports
