"""A command with a terminal in front of it, as its user sees it."""

from __future__ import annotations

import os
import pty
import select
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support.processes.launcher import kill_marked

if TYPE_CHECKING:
    from support.processes.forked_command import ForkedCommand
    from support.processes.launcher import Launcher

LIMIT_S = 180.0


class Terminal:
    """The user's end of a terminal."""

    def __init__(self, fd: int, process: ForkedCommand) -> None:
        self._fd = fd
        self._process = process
        self._data = b""

    @property
    def text(self) -> str:
        """All that was written to it."""
        return self._data.decode(errors="replace")

    def until(self, seen: str, count: int = 1) -> None:
        """Read until a text is there; fails with all that was written."""
        while self.text.count(seen) < count:
            if not self._read():
                pytest.fail(f"never written {count} x {seen!r}:\n{self.text}")

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self._process.wait(LIMIT_S)

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], LIMIT_S)[0]:
            pytest.fail(f"still there after {LIMIT_S:g} s:\n{self.text}")
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # EIO: all that had the terminal are gone
            return False
        self._data += data
        return bool(data)


@contextmanager
def on_terminal(launcher: Launcher, *arguments: str, **variables: str) -> Generator[Terminal]:
    """Start `zbmd-node` on a terminal of its own; it has to end by itself."""
    marker = uuid.uuid4().hex
    ours, theirs = pty.openpty()
    sizes = {"TERM": "xterm", "COLUMNS": "100", **variables}
    with launcher.forked(arguments, marker, sizes, theirs) as process:
        os.close(theirs)
        try:
            terminal = Terminal(ours, process)
            yield terminal
            terminal.end()
            launcher.assert_nothing_left(marker, terminal.text)
        finally:
            kill_marked(marker)
            os.close(ours)
