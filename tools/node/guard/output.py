"""The output of the ranks of a host, each through the guard that its launcher has started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from zbmd.actors.process.output import LineWriter, LiveSink, OutputLine, StreamName

STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")


class GuardedOutput:
    """A `LiveSink` that gives each line to the writer of its rank's guard. others: takes the rest.

    writers: by local rank; count: of ranks on this host. A debugger has the terminal of the first guard.
    """

    def __init__(self, others: LiveSink, writers: Mapping[int, LineWriter], count: int) -> None:
        self._others, self._writers, self._count = others, writers, count

    def _of(self, line: OutputLine) -> LiveSink:
        return self._writers.get(line.rank % self._count, self._others)

    async def write_line(self, line: OutputLine) -> None:
        """See `OutputSink`."""
        await self._of(line).write_line(line)

    def show_unfinished(self, line: OutputLine, *, rewritten: bool) -> None:
        """See `LiveSink`."""
        self._of(line).show_unfinished(line, rewritten=rewritten)

    def lend_terminal(self, *, is_back: bool) -> None:
        """See `LiveSink`."""
        self._others.lend_terminal(is_back=is_back)

    async def close(self) -> None:
        """Write what is queued for guards. A stalled one is given up, as `LineWriter.close` says."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
