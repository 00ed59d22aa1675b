"""A real etcd of one member, on free ports, for as long as a test needs it."""

from __future__ import annotations

import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zbmd.transport.tcp.sockets import free_port

STARTS_MAX = 3
PATIENCE_S = 180.0
STEP_S = 0.05


def free_ports(count: int) -> list[int]:
    """Return that many ports that are free now; see `free_port`."""
    found = set[int]()
    while len(found) < count:
        found.add(free_port())
    return [*found]


class EtcdServer:
    """`start` and `kill` it as often as you like: its data and its ports stay. port: where clients ask."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self._peer_port = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of a store in it, without the name."""
        return f"etcd://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        for attempt in range(STARTS_MAX):
            if self._start():
                return
            self.kill()
            if attempt < STARTS_MAX - 1 and not (self.directory / "data").exists():
                self.port, self._peer_port = free_ports(2)
        pytest.fail((self.directory / "log").read_text()[-2000:])

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> bool:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("etcd", "--name", "test", "--data-dir", str(self.directory / "data")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"test={peer}", "--heartbeat-interval", "20"),
                    *("--election-timeout", "200", "--logger", "zap"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        pause = threading.Event()
        for _ in range(round(PATIENCE_S / STEP_S)):
            if self._process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(f"{client}/health", timeout=1.0) as answer:
                    if b'"true"' in answer.read():
                        return True
            except (OSError, urllib.error.URLError):
                pause.wait(STEP_S)
        return False


@contextmanager
def etcd_server(directory: Path) -> Generator[EtcdServer]:
    """A server that runs. Skips the test where there is none."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    server = EtcdServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
