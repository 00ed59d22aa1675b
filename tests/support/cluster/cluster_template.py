"""A process that has imported `zbmd-node` and forks one for each request, so that a test can start many.

Requests come over the unix socket whose descriptor is its argument, one a packet: JSON of `argv`,
`environment` and `cwd`, with the descriptors of standard output and error. It says `{}` once it is ready,
answers `{"pid": …}`, and `{"pid": …, "code": …}` at the end of one. With a third descriptor, a process has
a session of its own, and its exit code goes there; a fourth one is its standard input, which else is empty.

A process shows the environment in /proc that its interpreter began with, a fork that of this one. So this one
begins with a MARKER, and what it forks writes its own over that.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from typing import Any

from zbmd.tools.cli import process
from zbmd.transport.host.threads import default_to_one_thread

REQUEST_BYTES_MAX = 1 << 16
MARKER = "ZBMD_TEST_LAUNCH"
NO_MARKER = uuid.UUID(int=0).hex
"""As long as any other."""
COMMAND = "zbmd.tools.node.cli"
ALSO_LOADED = (
    *("zbmd.tools.node.cluster", "zbmd.tools.node.run_many", "zbmd.tools.cli.launch"),
    *("zbmd.collectives.group.group", "zbmd.training.sharded.run"),
)
"""Imports of its commands and of the tests' jobs: each fork would do them for itself."""


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork by request until there are no more (None); in a fork, return what it is to run."""
    requests.send(b"{}")
    children: dict[int, tuple[int, int | None]] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), *children], [], [])
        for fd in [fd for fd in children if fd in ready]:
            pid, ended = children.pop(fd)
            os.close(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answer = json.dumps({"pid": pid, "code": code}).encode()
            if ended is None:
                requests.send(answer)
            else:
                os.write(ended, answer)
                os.close(ended)
        if requests.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                request: dict[str, Any] = json.loads(data)
                become(request, requests, fds)
                return request
            for fd in (*fds[:2], *fds[3:]):
                os.close(fd)
            children[os.pidfd_open(pid)] = pid, fds[2] if fds[2:] else None
            requests.send(json.dumps({"pid": pid}).encode())


def become(request: dict[str, Any], requests: socket.socket, fds: list[int]) -> None:
    for place, fd in zip((1, 2), fds[:2], strict=True):
        os.dup2(fd, place)
    if fds[2:]:
        os.setsid()
    if fds[3:]:
        os.dup2(fds[3], 0)
    if MARKER in request["environment"]:
        mark(request["environment"][MARKER])
    requests.detach()
    os.closerange(3, 1024)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["zbmd-node", *request["argv"]]
    sys.orig_argv = [sys.executable, "-m", COMMAND, *request["argv"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def mark(marker: str) -> None:
    """Write it where /proc has the environment of this process, and that of its forks."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    assert len(marker) == len(NO_MARKER) == len(os.environ[MARKER])
    ctypes.memmove(libc.getenv(MARKER.encode()), marker.encode(), len(marker))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    default_to_one_thread()
    command: Callable[[], int] = importlib.import_module(COMMAND).main
    for module in ALSO_LOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return 0 if serve(socket.socket(fileno=int(sys.argv[1]))) is None else process.run(command)


if __name__ == "__main__":
    raise SystemExit(main())
