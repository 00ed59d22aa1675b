"""`zbmd-node` in a process of its own, as a user starts it, and a look at what it leaves behind."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cluster import cluster_template
from support.processes.forked_command import ForkedCommand, run_forked
from zbmd.transport.host.files import remove_leftovers

TIMEOUT_S = 180.0
POLL_S = 0.02
MARKER = cluster_template.MARKER


THREADS = re.compile(r"zbmd-node: \d+ ranks? with \d+ threads?( each)?: .+")
"""The first line of each run that begins."""


def after_threads(errors: list[str]) -> list[str]:
    """Return what a run has written beside the threads of its ranks, which it states before all else."""
    stated, *others = [line for line in errors if line.startswith("zbmd-node: ") and THREADS.match(line)]
    assert not others, errors
    return [line for line in errors if line is not stated]


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended: its exit code (or minus a signal) and what it printed."""

    code: int
    out: list[str]
    errors: list[str]

    def __str__(self) -> str:
        return "\n".join([f"exit code {self.code}", *self.out, *self.errors])


class Running:
    """A command that runs. Its standard output and error are one stream, read by `until` and `end`."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedCommand, marker: str) -> None:
        self.pid = process.pid
        self.process = process
        self.marker = marker
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.deadline_s = time.monotonic() + TIMEOUT_S

    def until(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Read until the pattern matches `count` times in whole lines; return the first ones.

        Python writes the end of a line to standard error by itself: a line without it is still being written.
        """
        wanted = re.compile(pattern, re.MULTILINE)
        while len(found := list(wanted.finditer(self.text[: self.text.rfind("\n") + 1]))) < count:
            if not self._read():
                pytest.fail(f"never printed {count} x {pattern!r}:\n{self.text}")
        return found[:count]

    def until_shown(self, text: str) -> None:
        """Read until the text is there, if its line has no end either."""
        while text not in self.text:
            if not self._read():
                pytest.fail(f"never printed {text!r}:\n{self.text}")

    def until_holds(self, holds: Callable[[], bool], what: str) -> None:
        """Read until something holds that no line reports. what: that, for the words of a failure."""
        while not holds():
            if self._is_readable(POLL_S):
                if not self._read() and not holds():
                    pytest.fail(f"{what}: that never came:\n{self.text}")
            elif time.monotonic() > self.deadline_s:
                pytest.fail(f"{what}: that has not come after {TIMEOUT_S:g} s:\n{self.text}")

    def end(self) -> int:
        """Read to the end, which comes when the last process that holds the stream has ended."""
        while self._read():
            pass
        return self.process.wait(TIMEOUT_S)

    def _is_readable(self, within_s: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], max(0.0, within_s))[0])

    def _read(self) -> bool:
        assert self.process.stdout is not None
        if not self._is_readable(self.deadline_s - time.monotonic()):
            pytest.fail(f"still there after {TIMEOUT_S:g} s:\n{self.text}")
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.text += self._decoder.decode(data)
        return bool(data)

    def processes(self) -> dict[str, list[int]]:
        """The pids of all that descends from the command, by the name that `ps` shows."""
        found: dict[str, list[int]] = {}
        for pid in marked(self.marker):
            with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
        return found


def marked(marker: str) -> list[int]:
    """The processes that have the marker in their environment, as all that a command starts has."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def assert_no_socket(address: str) -> None:
    """A process that is killed is no process any more before the kernel has closed what it had open."""
    pause, deadline_s = threading.Event(), time.monotonic() + TIMEOUT_S
    while left := [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@{address}" in line]:
        assert time.monotonic() < deadline_s, left
        pause.wait(POLL_S)


def kill_marked(marker: str, spares: str = "") -> None:
    """Kill all that has the marker at once, but for processes of the name `spares`."""
    for pid in marked(marker):
        with suppress(ProcessLookupError, FileNotFoundError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != spares:
                os.kill(pid, signal.SIGKILL)


class Launcher:
    """Starts `zbmd-node` in `directory`, and holds it to leaving nothing behind."""

    def __init__(self, directory: Path, template: socket.socket) -> None:
        self.directory = directory
        self._template = template
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ZBMD_") or k == "ZBMD_TEST_SESSION"}
        self._environment = {
            **kept,
            "ZBMD_COOKIE_FILE": str(directory / "cookie"),
            "ZBMD_ARENA": "1MiB",
            "ZBMD_SNAPSHOTS": "off",  # a run that fails would leave a process that waits for the next one
            "TMPDIR": str(self.scratch),
        }

    def command(self, arguments: Sequence[str], marker: str) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of a process that bears the marker."""
        command = [sys.executable, "-m", "zbmd.tools.node.cli", *arguments]
        return command, {**self._environment, MARKER: marker}

    def run(
        self,
        *arguments: str,
        before: Sequence[str] = (),
        **variables: str,
    ) -> Ended:
        """Run the command to its end, in a fork of the template. `before`: a command that is to run it.

        That a fork leaves no process is seen at the end of each test (`tests/conftest.py`): all have the
        environment that the template was started with.
        """
        marker = uuid.uuid4().hex
        command, environment = self.command(arguments, marker)
        environment |= variables
        if not before:
            code, out, errors = run_forked(self._template, arguments, environment, self.directory, TIMEOUT_S)
            ended = Ended(code, out.splitlines(), errors.splitlines())
            self._assert_no_files(str(ended))
            return ended
        done = subprocess.run(
            [*before, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.directory,
            timeout=TIMEOUT_S,
            check=False,
        )
        ended = Ended(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())
        self.assert_nothing_left(marker, str(ended))
        return ended

    def forked(
        self,
        arguments: Sequence[str],
        marker: str,
        variables: Mapping[str, str],
        terminal: int | None = None,
    ) -> ForkedCommand:
        """Return the command that bears the marker, as a fork of the template."""
        environment = {**self.command(arguments, marker)[1], **variables}
        return ForkedCommand(self._template, arguments, environment, self.directory, terminal=terminal)

    @contextmanager
    def session(
        self, *arguments: str, spares: str = "", fresh: bool = False, **variables: str
    ) -> Generator[Running]:
        """Start the command in a session of its own, as a terminal would; kill what is left of it at the end.

        spares: the name of a process that may live on; fresh: the command is a new interpreter, whose imports
        take longer than a small job, and no fork of the template.
        """
        marker = uuid.uuid4().hex
        command, environment = self.command(arguments, marker)
        with (
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment, **variables},
                cwd=self.directory,
                start_new_session=True,
            )
            if fresh
            else self.forked(arguments, marker, variables)
        ) as process:
            running = Running(process, marker)
            try:
                yield running
            finally:
                kill_marked(marker, spares)

    @contextmanager
    def start(self, *arguments: str, fresh: bool = False, **variables: str) -> Generator[Running]:
        """Start the command as `session` does; it has to end by itself, and to leave nothing behind."""
        with self.session(*arguments, fresh=fresh, **variables) as running:
            yield running
            running.end()
            self.assert_nothing_left(running.marker, running.text)

    def assert_nothing_left(self, marker: str, story: str) -> None:
        """No process (one that is being freed by the kernel may take its time), no temporary file."""
        for pid in marked(marker):
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                gone = select.select([pidfd], [], [], TIMEOUT_S)[0]
                assert gone, f"process {pid} is still there:\n{story}"
            finally:
                os.close(pidfd)
        assert not marked(marker), story
        self._assert_no_files(story)

    def _assert_no_files(self, story: str) -> None:
        for path in self.directory.rglob(".*"):  # where all were killed, the next write tidies up
            remove_leftovers(path.parent / path.name[1:].rpartition(".")[0])
        left = [*self.scratch.iterdir(), *self.directory.rglob(".*")]
        assert not left, f"{left}\n{story}"
