"""A process that has imported `zbmd-node` and forks one for each request, so that a test can start many.

Requests come over the unix socket on descriptor 3, one a packet: JSON of `argv`, `environment` and `cwd`,
with the descriptors of standard output and error. It answers `{"pid": …}`, and `{"pid": …, "code": …}` at
its end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from zbmd.tools import node_cli

REQUEST_BYTES_MAX = 1 << 16


def serve(requests: socket.socket) -> None:
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, *children], [], [])
        for fd in [fd for fd in children if fd in ready]:
            pid = children.pop(fd)
            os.close(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            requests.send(json.dumps({"pid": pid, "code": code}).encode())
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 2)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                run(json.loads(data), fds)
            for fd in fds:
                os.close(fd)
            children[os.pidfd_open(pid)] = pid
            requests.send(json.dumps({"pid": pid}).encode())


def run(request: dict[str, Any], fds: list[int]) -> NoReturn:
    code = 70
    try:
        for place, fd in zip((1, 2), fds, strict=True):
            os.dup2(fd, place)
        os.closerange(3, 1024)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["zbmd-node", *request["argv"]]
        sys.orig_argv = [sys.executable, "-m", "zbmd.tools.node_cli", *request["argv"]]
        code = node_cli.main(request["argv"])
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 (a fork ends here, whatever happens)
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=3))
