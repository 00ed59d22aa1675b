"""A template that is forked from its launcher before the launcher has started a thread, loop or link.

It has already imported what the launcher has, so a job starts sooner by an interpreter's start and imports.
It must not continue in the launcher's frames: `TemplateBegins` is raised there, and the program's entry
point catches it and calls `run`.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NoReturn

from zbmd.actors.process.template import serve_host
from zbmd.transport.host.process import adopt_orphans, end_with_parent, set_process_name
from zbmd.transport.host.threads import ONE_THREAD
from zbmd.transport.memory.huge_pages import huge_page_variables

# --- the reaper -------------------------------------------------------------------------------------------


END_S_MAX: Final = 10.0
"""The longest wait for killed processes; freeing the memory of a large one takes a while."""
RESCAN_S: Final = 0.02
"""Pause between scans, which find children that were born while their parent was being killed."""

_HOST_GONE = signal.SIGTERM  # also sent to ask it to end
_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def leave_reaper_behind(socket_fd: int, host_pid: int) -> None:
    """Fork: the child continues as the template, and the calling process becomes its reaper.

    The reaper ends everything that a run would leave behind. Processes that a rank starts (a data loader, a
    shell) do not end with it: the kernel gives them another parent. The reaper has made itself that parent
    (child subreaper), and once the host or the template is gone, it kills all its descendants, in whatever
    session or process group. If the reaper is killed itself, template and ranks end too; processes that ranks
    started then remain, unless the template reaches them through the ranks' process groups.

    Called first thing, so that the reaper stays small. socket_fd: the template's end of its host's socket.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    adopt_orphans()
    end_with_parent(host_pid, _HOST_GONE)
    reaper_pid = os.getpid()
    template_pid = os.fork()
    if template_pid == 0:
        end_with_parent(reaper_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return
    set_process_name("zbmd-reaper")
    os.close(socket_fd)  # the host learns of the template's end by the end of this socket
    status = _wait_for(template_pid)
    _end_descendants()
    _exit_like(status)


def _wait_for(template_pid: int) -> int | None:
    """Wait for the template's end and return its wait status; None if the host ended first."""
    while signal.sigwait(_WAITED_FOR) is signal.SIGCHLD:
        for pid, status in _reap():
            if pid == template_pid:
                return status
    return None


def _reap() -> Iterator[tuple[int, int]]:
    """Pid and wait status of each child, born or adopted, that has ended.

    Raises `ChildProcessError` once there are no children at all.
    """
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        yield pid, status


def _end_descendants() -> None:
    """Kill all descendants of this process, and wait until they are gone, at most `END_S_MAX`."""
    deadline_s = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # gone meanwhile, or made another user by its own doing
        try:
            for _ in _reap():
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait(_WAITED_FOR, RESCAN_S)


def descendants(root_pid: int) -> list[int]:
    """Return the pids of all processes below `root_pid`, parents first, including those that are ending."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # `pid (name) state parent …`, and a process may put parentheses into its name.
                    children[int(file.read().rpartition(b")")[2].split()[1])].append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [root_pid]
    for pid in found:
        found += children[pid]
    return found[1:]


def _exit_like(status: int | None) -> NoReturn:
    """Exit as the template did, so that the host learns it from this process's end."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(1 if status is None else os.waitstatus_to_exitcode(status))


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
    variables = {**huge_page_variables(), **environment, **ONE_THREAD}  # it may be our own environment
    os.environ.clear()
    os.environ.update(variables)
    if not sys.flags.safe_path:
        del sys.path[0]  # the launcher's own directory must not shadow what a job imports
