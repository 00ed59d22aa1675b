"""The reaper: the template's parent, which ends everything that a run would leave behind.

Processes that a rank starts (a data loader, a shell) do not end with it: the kernel gives them another
parent. The reaper has made itself that parent (child subreaper), and once the host or the template is gone,
it kills all its descendants, in whatever session or process group. It imports nothing and serves nobody, so
that only a kill ends it. If it is killed itself, template and ranks end too; processes that ranks started
then remain, unless the template reaches them through the ranks' process groups.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NoReturn

from zbmd.transport.host.process import adopt_orphans, end_with_parent, set_process_name

END_S_MAX: Final = 10.0
"""How long it waits for killed processes; freeing the memory of a large one takes a while."""
RESCAN_S: Final = 0.02
"""Pause between scans, which find children that were born while their parent was being killed."""

_HOST_GONE = signal.SIGTERM  # also sent to ask it to end
_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def leave_reaper_behind(socket_fd: int, host_pid: int) -> None:
    """Fork: the child continues as the template, and the calling process becomes its reaper.

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
