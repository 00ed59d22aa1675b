"""The processes of one contender: started together, asked in turn, and gone when the benchmark is.

They end when their connection does (`peers/control.py`), so also when the benchmark is killed; what does not
end then is killed with its whole session.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Final, Self

import msgspec

from zbmd.tools.bench.peers.control import REPLY_BYTES_MAX, Reply, socket_name
from zbmd.transport.errors import ZbmdError

CONTROL: Final = "{control}"
"""Stands for the control address in a command."""
START_S: Final = 300.0
"""To import what is timed: minutes, on the emulated processor of the RDMA machine on a busy host."""
REPLY_S: Final = 300.0
ACCEPT_STEP_S: Final = 0.1
END_S: Final = 10.0
LAST_WORDS_S: Final = 2.0
TAIL_BYTES: Final = 2000


class ContenderFailed(ZbmdError):
    """A benchmarked program did not start, failed, or said nothing sensible."""


class Workers:
    """Processes that answer commands. Use it as a context manager.

    `commands` are started as they are, with `CONTROL` replaced; together they connect as ranks 0 to
    `ranks` - 1. `pass_fds` are given to each of them, and closed here then. folder: where the control address
    lies as a file, for processes in other network namespaces. Raises `ContenderFailed` with the
    end of their output if they do not connect.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        ranks: int,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        folder: str = "",
    ) -> None:
        self._name = name
        self._commands = commands
        self._ranks = ranks
        self._environment = dict(environment or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[tuple[socket.socket, IO[bytes]]] = []
        self._pass_fds = pass_fds
        self._folder = folder
        self._output: IO[bytes] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, what: str, nbytes: int, iterations: int) -> list[list[float]]:
        """Have every rank measure; return their nanoseconds by rank. Raises `ContenderFailed`."""
        line = f"{what} {nbytes} {iterations}\n".encode()
        try:
            for sock, _ in self._connections:
                sock.sendall(line)
            answers = [lines.readline(REPLY_BYTES_MAX) for _, lines in self._connections]
        except OSError as error:
            raise self._failed(f"did not answer {what} of {nbytes} bytes ({error})") from error
        if not all(answers):
            raise self._failed(f"ended while it measured {what} of {nbytes} bytes")
        try:
            return [msgspec.json.decode(answer, type=Reply).ns for answer in answers]
        except msgspec.DecodeError as error:
            raise self._failed(f"answered {answers[0][:80]!r}: {error}") from error

    def close(self) -> None:
        """Hang up, wait for all processes, and kill what has not ended after `END_S`. Idempotent."""
        for sock, lines in self._connections:
            lines.close()
            sock.close()
        self._connections.clear()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                _kill_session(process.pid)
                process.wait()
        self._processes.clear()
        self._close_passed()
        self._output = None
        self._stack.close()

    def _start(self) -> None:
        control = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(8)}"
        if self._folder:
            control = os.path.join(self._folder, control)
        self._output = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(socket_name(control))
            listener.listen(self._ranks)
            for command in self._commands:
                self._processes.append(self._spawn([part.replace(CONTROL, control) for part in command]))
            self._close_passed()
            found: dict[int, tuple[socket.socket, IO[bytes]]] = {}
            while len(found) < self._ranks:
                rank, connection = self._accept(listener)
                found[rank] = connection
        self._connections = [found[rank] for rank in range(self._ranks)]

    def _close_passed(self) -> None:
        for descriptor in self._pass_fds:
            os.close(descriptor)
        self._pass_fds = ()

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **self._environment},
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        except OSError as error:
            raise ContenderFailed(f"cannot start {shlex.join(command)}: {error.strerror}") from error

    def _accept(self, listener: socket.socket) -> tuple[int, tuple[socket.socket, IO[bytes]]]:
        listener.settimeout(ACCEPT_STEP_S)
        for _ in range(round(START_S / ACCEPT_STEP_S)):
            with contextlib.suppress(TimeoutError):
                return self._welcome(listener.accept()[0])
            ended = [process.poll() for process in self._processes]
            if any(code is not None for code in ended):
                raise self._failed("ended before it was ready")
        raise self._failed(f"was not ready after {START_S:.0f} s")

    def _welcome(self, sock: socket.socket) -> tuple[int, tuple[socket.socket, IO[bytes]]]:
        lines = sock.makefile("rb")
        self._connections.append((sock, lines))
        sock.settimeout(REPLY_S)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        said = lines.readline(16)
        if uid != os.getuid() or not said.strip().isdigit() or int(said) >= self._ranks:
            raise self._failed(f"said {said!r} as its rank (user {uid})")
        return int(said), (sock, lines)

    def _failed(self, what: str) -> ContenderFailed:
        for process in self._processes:  # what fails hangs up before it has said why
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
        tail = ""
        if self._output is not None:
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = self._output.read().decode(errors="replace").strip()
        return ContenderFailed(f"{self._name} {what}. The end of its output:\n{tail or '(none)'}")


def _kill_session(pid: int) -> None:
    """Kill the process group that a process leads; mpirun's ranks end with mpirun and their connection."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
