"""`zbmd-node` in a fork of `cluster_template`, which has imported what it imports."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from support.cluster import cluster_template

READ_BYTES = 1 << 16


class ForkedCommand:
    """One that runs in a session of its own, with the part of `subprocess.Popen` that is used here.

    Its standard output and error are one stream: a pipe, or a terminal, which is its standard input too.
    """

    def __init__(
        self,
        template: socket.socket,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        *,
        terminal: int | None = None,
    ) -> None:
        self._ended, ended = os.pipe()
        ours, theirs = os.pipe() if terminal is None else (None, os.dup(terminal))
        streams = [theirs, theirs, ended, *([] if terminal is None else [theirs])]
        request = {"argv": argv, "environment": environment, "cwd": str(cwd)}
        socket.send_fds(template, [json.dumps(request).encode()], streams)
        self.pid = _answer(template)["pid"]
        for fd in (theirs, ended):
            os.close(fd)
        self.stdout = None if ours is None else os.fdopen(ours, "rb", buffering=0)
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()
        os.close(self._ended)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, or minus the signal. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ended, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("zbmd-node", timeout or 0.0)
            code: int = json.loads(os.read(self._ended, READ_BYTES))["code"]
            self.returncode = code
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def run_forked(
    template: socket.socket, argv: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout_s: float
) -> tuple[int, str, str]:
    """The exit code (or minus the signal), and all that it and what it started wrote to either stream."""
    end_s = time.monotonic() + timeout_s
    streams = [os.pipe(), os.pipe()]
    request = {"argv": argv, "environment": environment, "cwd": str(cwd)}
    socket.send_fds(template, [json.dumps(request).encode()], [theirs for _, theirs in streams])
    pid = _answer(template)["pid"]
    for _, theirs in streams:
        os.close(theirs)
    told = _read_all([ours for ours, _ in streams], end_s)
    if told is None:
        os.kill(pid, signal.SIGKILL)
    code = _answer(template)["code"]
    if told is None:
        pytest.fail(f"still there after {timeout_s:g} s: zbmd-node {' '.join(argv)}")
    out, errors = (text.decode() for text in told)
    return code, out, errors


def _answer(template: socket.socket) -> dict[str, int]:
    found: dict[str, int] = json.loads(template.recv(cluster_template.REQUEST_BYTES_MAX))
    return found


def _read_all(descriptors: Sequence[int], end_s: float) -> list[bytes] | None:
    """Read each until its end, and close them; None if that takes too long."""
    told = {fd: bytearray() for fd in descriptors}
    with selectors.DefaultSelector() as selector:
        for fd in descriptors:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, READ_BYTES)
                told[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        ended = not selector.get_map()
    for fd in descriptors:
        os.close(fd)
    return [bytes(text) for text in told.values()] if ended else None
