"""Templates of ranks that are forked from one process, which has imported what all of them import.

A template that is a new interpreter spends seconds of a processor on imports of PyTorch, before each run.
As a program: it forks a template for each request on the socket whose descriptor is its argument, and keeps
it as a zombie until its host has its exit code. Further arguments: modules.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.process.early_template import EarlyTemplate, ForkedProcess, leave_reaper_behind
from zbmd.actors.process.template import serve_host
from zbmd.transport.host.threads import ONE_THREAD

TIMEOUT_S: Final = 300.0
REQUEST_BYTES_MAX: Final = 1 << 16
CODE_BYTES: Final = 4


class WarmProcess(ForkedProcess):
    """A fork of another process, which sends its exit code."""

    def __init__(self, pid: int, code: socket.socket) -> None:
        super().__init__(pid)
        self._code = code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None and (options != os.WNOHANG or select.select([self._code], [], [], 0)[0]):
            self.returncode = int.from_bytes(self._code.recv(CODE_BYTES), signed=True)
            self._code.close()
        return self.returncode


class WarmTemplates:
    """This process's end of one that forks templates."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD},
            )
        assert self._requests.recv(1), "it could not import its modules"

    def fork(self, modules: Sequence[str]) -> EarlyTemplate:
        """Return a template with the environment of this process."""
        request = {"modules": list(modules), "environment": {**os.environ, **ONE_THREAD}, "cwd": os.getcwd()}
        host, template = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with template, theirs:
            fds = [template.fileno(), theirs.fileno(), 2]
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            pid = int(self._requests.recv(REQUEST_BYTES_MAX))
        return EarlyTemplate(WarmProcess(pid, ours), host)

    def close(self) -> None:
        """End it."""
        self._requests.close()
        self._process.wait(TIMEOUT_S)


_open: list[WarmTemplates] = []


@contextmanager
def warm_templates(modules: Sequence[str], needs: str) -> Generator[None]:
    """Have `template_of` fork templates with these modules meanwhile, if the package `needs` is installed."""
    if _open or importlib.util.find_spec(needs) is None:
        yield
        return
    _open.append(WarmTemplates(modules))
    try:
        yield
    finally:
        _open.pop().close()


def template_of(config: HostConfig) -> EarlyTemplate | None:
    """Return a template for this job, None if it has to be a new interpreter."""
    return _open[-1].fork(config.preload) if _open else None


# ---- the other process


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork by request until there are no more (None); in a fork, return its request and descriptors."""
    requests.send(b"+")
    poll, running, ended = select.poll(), dict[int, tuple[int, int]](), dict[int, int]()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, code = running.pop(fd)
                poll.unregister(fd)
                end = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
                os.close(fd)
                assert end is not None
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                os.write(code, status.to_bytes(CODE_BYTES, signed=True))
                ended[code] = pid
                poll.register(code, select.POLLIN)
            elif fd in ended:  # its host has closed the other end
                os.waitpid(ended.pop(fd), 0)
                poll.unregister(fd)
                os.close(fd)
            else:
                data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
                if not data:
                    return None
                pid = os.fork()
                if pid == 0:
                    return json.loads(data), fds
                template, code, errors = fds
                os.close(template)
                os.close(errors)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, code
                poll.register(pidfd, select.POLLIN)
                requests.send(str(pid).encode())


def main() -> None:
    """Serve; in a fork, be its reaper, the template, and later a rank, as a new interpreter would."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    parent, requests = os.getpid(), socket.socket(fileno=int(sys.argv[1]))
    found = serve(requests)
    if found is None:
        return
    request, (template, _, errors) = found
    os.setsid()
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    requests.detach()
    os.closerange(3, template)
    os.closerange(template + 1, 1024)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    leave_reaper_behind(template, parent)
    serve_host(template, request["modules"])


if __name__ == "__main__":
    main()
