"""Hosts in network namespaces for tests, and processes on them that are read line by line."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from zbmd.tools.lab.hosts.netns import Lab, LabHost, why_not

TIMEOUT_S = 180.0
PORT = 29400
"""Of a host that nobody else is on."""
COOKIE = secrets.token_hex(32)
PEER = str(Path(__file__).with_name("netns_peer.py"))


def require_lab() -> None:
    """Skip the test where no laboratory can be had; CI installs what is missing."""
    if reason := why_not():
        pytest.skip(reason)


class Process:
    """A process on a host: lines go in, and lines come out."""

    def __init__(self, host: LabHost, command: list[str], timeout_s: float) -> None:
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.process = host.popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._deadline_s = time.monotonic() + timeout_s

    def until(self, pattern: str) -> re.Match[str]:
        """Read until a line matches; what was read before is forgotten."""
        wanted = re.compile(pattern, re.MULTILINE)
        while (found := wanted.search(self.text, 0, self.text.rfind("\n") + 1)) is None:
            if not self._read(self._deadline_s - time.monotonic()):
                pytest.fail(f"never said {pattern!r}, but:\n{self.text}")
        self.text = self.text[found.end() :]
        return found

    def _read(self, within_s: float) -> bool:
        """Take what it has said; False: it says no more, or nothing within that time."""
        fd = self._output.fileno()
        ready = select.select([fd], [], [], max(0.0, within_s))[0]
        data = os.read(fd, 1 << 16) if ready else b""
        self.text += self._decoder.decode(data)
        return bool(data)

    def tell(self, line: str) -> None:
        self._input.write(f"{line}\n".encode())
        self._input.flush()

    def end(self) -> int:
        """Close its input, and wait for its end, reading what it says: a full pipe would hold it up."""
        self._input.close()
        return self.ended()

    def ended(self) -> int:
        """Wait for its end, reading what it says until all that write there have ended; the exit code."""
        end_s = time.monotonic() + TIMEOUT_S
        while self._read(end_s - time.monotonic()):
            pass
        return self.process.wait(max(0.0, end_s - time.monotonic()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()


@contextlib.contextmanager
def process(host: LabHost, *command: str, timeout_s: float = TIMEOUT_S) -> Generator[Process]:
    """Run a command on a host until the block ends, at the longest. timeout_s: for all that is read."""
    running = Process(host, list(command), timeout_s)
    try:
        yield running
    finally:
        running.close()


def run_node(
    lab: Lab,
    host: LabHost,
    *words: str,
    nnodes: str,
    ranks: int = 1,
    number: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> contextlib.AbstractContextManager[Process]:
    """Return `zbmd-node run` on a host of a run whose first node is on host 0. words: more options, the job.

    number: of the node, that of its host by default. timeout_s: as of `process`.
    """
    cookie = host.home / "cookie"
    cookie.touch(mode=0o600)
    cookie.write_text(COOKIE)
    node = str(host.number if number is None else number)
    options = ("--nnodes", nnodes, "--nproc-per-node", str(ranks), "--node-rank", node)
    door = ("--rdzv-endpoint", f"{lab.hosts[0].address}:{PORT}")
    command = str(Path(sys.executable).with_name("zbmd-node"))
    return process(host, command, "run", *options, *door, *words, timeout_s=timeout_s)


@contextlib.contextmanager
def peers(lab: Lab, *, budget: str) -> Generator[tuple[Process, Process]]:
    """A listener on host 0 and a dialer on host 1, linked; see `netns_peer`."""
    here, there = lab.hosts[:2]
    with process(here, sys.executable, PEER, "listen", f"{here.address}:0", budget) as listener:
        address = listener.until(r"^listening (\S+)$")[1]
        with process(there, sys.executable, PEER, "dial", address, budget) as dialer:
            dialer.until("^linked$")
            yield listener, dialer
