"""The lines that the ranks of a test's host print."""

from __future__ import annotations

from zbmd.actors.process.output import OutputLine


class Lines:
    """Keeps what ranks print, each line behind its rank."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def write_line(self, line: OutputLine) -> None:
        """Keep one line."""
        self.lines.append(f"{line.rank}: {line.text.decode()}")
