"""What a run shows: ranks' lines behind their prefix, our own notes, and the progress of the job.

Everything passes one bounded queue and one writing thread (`LineWriter`), so lines never mix and a stalled
terminal never stalls supervision. On a terminal a live bar stays below the lines; elsewhere progress is
printed as lines of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

import rich.console
import rich.progress
from rich.text import Text

from zbmd.actors.host_output import LineWriter, OutputLine, StreamName, emit_plainly
from zbmd.tools.progress import Progress, Recovery, format_progress, format_recovery

BAR_REFRESHES_PER_S = 8


class Console:
    """An `OutputSink` with notes and progress. Use it as an async context manager, on the loop's thread.

    `live` None means: a bar if standard error is a terminal. `silent` keeps standard output for the caller.
    """

    def __init__(self, *, live: bool | None = None, ranks_to_stderr: bool = False) -> None:
        self._live = sys.stderr.isatty() if live is None else live
        self._ranks_to_stderr = ranks_to_stderr
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._writer: LineWriter | None = None

    async def __aenter__(self) -> Self:
        emit: Callable[[StreamName, str], None] = emit_plainly
        if self._live:
            screen = rich.console.Console(stderr=True)
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=30),
                rich.progress.TaskProgressColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeRemainingColumn(),
                console=screen,
                refresh_per_second=BAR_REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            emit = self._emit_above_bar
        self._writer = LineWriter(emit)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._writer is not None
        await self._writer.close()
        if self._bar is not None and self._task is not None:
            self._bar.stop()

    async def write_line(self, line: OutputLine) -> None:
        """Print a rank's line."""
        assert self._writer is not None
        stream: StreamName = "stderr" if self._ranks_to_stderr else line.stream
        await self._writer.write(stream, f"[rank{line.rank}]: {line.text.decode(errors='replace')}")

    async def note(self, text: str) -> None:
        """Print something of our own, on standard error."""
        assert self._writer is not None
        for line in text.splitlines():
            await self._writer.write("stderr", f"[zbmd]: {line}")

    async def recovery(self, recovery: Recovery) -> None:
        """Print what a loss cost, in one line."""
        await self.note(format_recovery(recovery))

    async def progress(self, progress: Progress, *, steps_total: int | None = None) -> None:
        """Show a step: in the bar on a terminal, as a line elsewhere."""
        text = format_progress(progress)
        if self._bar is None:
            assert self._writer is not None
            await self._writer.write("stderr", text)
            return
        if self._task is None:
            self._task = self._bar.add_task(text, total=steps_total)
            self._bar.start()
        self._bar.update(self._task, description=text, completed=progress.step, total=steps_total)

    def _emit_above_bar(self, stream: StreamName, text: str) -> None:
        """Print a line without tearing the bar; what is redirected to a file goes there plainly."""
        assert self._bar is not None
        if stream == "stdout" and not sys.stdout.isatty():
            emit_plainly(stream, text)
        else:
            self._bar.console.print(Text(text), soft_wrap=True)
