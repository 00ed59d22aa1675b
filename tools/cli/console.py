"""Console output of a run: lines of the ranks with a prefix, notes of zbmd, and the progress of the job.

Everything passes one bounded queue and one writing thread (`LineWriter`), so lines never mix and a stalled
terminal never stalls supervision. On a terminal a live bar stays below the lines; elsewhere progress is
printed as lines of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import rich.console
import rich.live
import rich.progress
from rich.text import Text

from zbmd.actors.process.output import (
    LineWriter,
    OutputLine,
    OutputText,
    PlainOutput,
    StreamName,
    prefix_of,
    text_of,
)

# The progress line of a training run, and the line that reports a recovery.

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step's figures; what is None is left out. `mfu`: a fraction of the machine's peak."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: int | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None


def format_progress(p: Progress) -> str:
    """`step 20 loss 3.21 grad_norm 0.91 mem 0.4GiB tok/s 7,443 tflops 0.03 mfu 1.9%`."""
    memory_gib = None if p.memory_bytes is None else p.memory_bytes / GIB
    figures = (
        ("loss {:.2f}", p.loss),
        ("grad_norm {:.2f}", p.grad_norm),
        ("mem {:.1f}GiB", memory_gib),
        ("tok/s {:,.0f}", p.tokens_per_s),
        ("tflops {:.2f}", p.tflops),
        ("mfu {:.1%}", p.mfu),
    )
    parts = [text.format(value) for text, value in figures if value is not None]
    return " ".join([f"step {p.step}", *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The cost of one lost rank; None for what is not known (yet)."""

    rank: int
    how: str
    step: int | None = None
    detection_ns: int | None = None
    recovery_ns: int | None = None
    step_after: int | None = None
    steps_lost: int = 0


def format_recovery(r: Recovery) -> str:
    """One line: who was lost and how, when it was noticed, and what it cost.

    `rank 2 was killed (SIGKILL) at step 103; noticed in 0.31 ms; back at step 103 after 142 ms; nothing lost`
    """
    parts = [f"rank {r.rank} {r.how}" + ("" if r.step is None else f" at step {r.step}")]
    if r.detection_ns is not None:
        parts.append(f"noticed in {r.detection_ns / 1e6:.2f} ms")
    if r.recovery_ns is not None:
        where = "back" if r.step_after is None else f"back at step {r.step_after}"
        parts.append(f"{where} after {r.recovery_ns / 1e6:.0f} ms")
        lost = "nothing lost" if r.steps_lost == 0 else f"{r.steps_lost} steps lost"
        parts.append(lost)
    return "; ".join(parts)


REFRESHES_PER_S = 12
UNFINISHED_SHOWN_MAX = 8
"""Lines without an end that are shown at once, at the bottom of a terminal; of 64 ranks' bars not all."""
TABLE_CHARACTERS = 240
"""The width of a table that goes to a file or a pipe: rich takes 80 there, and cuts names and addresses."""
LAST_WORDS_HELD_S = 3.0
"""A rank that has said why it ends and does not end is not kept from being heard for longer than this."""
LAST_WORDS_LINES_MAX = 1000


@dataclass(slots=True)
class _LastWords:
    lines: list[str] = field(default_factory=list[str])
    release: asyncio.TimerHandle | None = None


def screen_for_tables() -> rich.console.Console:
    """Standard output, for tables: as wide as the terminal, or as any table needs where there is none."""
    return rich.console.Console(width=None if sys.stdout.isatty() else TABLE_CHARACTERS)


class TerminalOutput:
    """Writes to a terminal: whole lines, and below them those that have no end yet, and the job's bar.

    Used by the writing thread, apart from `progress`, `stop` and what the screen's own thread draws.
    """

    def __init__(self) -> None:
        self._plain = PlainOutput()
        self._unfinished: dict[tuple[int, int, StreamName], str] = {}
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task: rich.progress.TaskID | None = None
        self._lock = threading.Lock()
        self._is_lent = False
        self._live = rich.live.Live(
            console=rich.console.Console(stderr=True),
            get_renderable=self._bottom,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def emit(self, item: OutputText) -> None:
        """Write a line without tearing what is below; what is redirected to a file goes there plainly."""
        if item.stream == "stdout" and not sys.stdout.isatty():
            self._plain.emit(item)
            return
        with self._lock:
            if item.source is not None:
                self._unfinished.pop(item.source, None)
            if not item.ended and item.source is not None and item.text:
                self._unfinished[item.source] = item.prefix + item.text
            self._start_or_stop()
        if item.ended:
            self._live.console.print(_on_terminal(item.prefix + item.text), soft_wrap=True)

    def release(self, *, is_end: bool = False) -> float | None:
        """See `PlainOutput`."""
        return self._plain.release(is_end=is_end)

    def progress(self, text: str, *, completed: int, total: int | None) -> None:
        """Move the job's bar."""
        with self._lock:
            if self._task is None:
                self._task = self._bar.add_task(text, total=total)
            self._bar.update(self._task, description=text, completed=completed, total=total)
            self._start_or_stop()

    @contextmanager
    def lent(self) -> Generator[None]:
        """Draw nothing meanwhile: a rank has the terminal."""
        with self._lock:
            self._is_lent = True
            self._live.stop()
        try:
            yield
        finally:
            with self._lock:
                self._is_lent = False
                self._start_or_stop()

    def stop(self) -> None:
        """Leave the terminal as it was found, below what was printed."""
        self._live.stop()

    def _start_or_stop(self) -> None:
        """A terminal with nothing at its bottom is left alone."""
        if self._is_lent:
            return
        if self._unfinished or self._task is not None:
            self._live.start()
        else:
            self._live.stop()

    def _bottom(self) -> rich.console.Group:
        lines = list(self._unfinished.values())
        shown: list[rich.console.RenderableType] = [_one_row(line) for line in lines[:UNFINISHED_SHOWN_MAX]]
        if lines[UNFINISHED_SHOWN_MAX:]:
            shown.append(Text(f"… and {len(lines) - UNFINISHED_SHOWN_MAX} more"))
        if self._task is not None:
            shown.append(self._bar.get_renderable())
        return rich.console.Group(*shown)


def _on_terminal(line: str) -> Text:
    """Return a line with its colours, and without what moves the cursor."""
    return Text.from_ansi(line) if "\x1b" in line else Text(line)


def _one_row(line: str) -> Text:
    text = _on_terminal(line)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


class Console:
    """A `LiveSink` with notes and progress. Use it as an async context manager, on the loop's thread.

    `live` None means: a bar if standard error is a terminal. `ranks_to_stderr` keeps standard output for the
    caller. With `hold_last_words` a rank's exit reason waits for `take_last_words`, for at most
    `LAST_WORDS_HELD_S`; without it they are lines like others.
    """

    def __init__(
        self, *, live: bool | None = None, ranks_to_stderr: bool = False, hold_last_words: bool = False
    ) -> None:
        self._live = sys.stderr.isatty() if live is None else live
        self._ranks_to_stderr = ranks_to_stderr
        self._hold_last_words = hold_last_words
        self._held: dict[tuple[int, int], _LastWords] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._terminal: TerminalOutput | None = None
        self._writer: LineWriter | None = None

    async def __aenter__(self) -> Self:
        self._terminal = TerminalOutput() if self._live else None
        terminal = self._terminal
        self._writer = (
            LineWriter()
            if terminal is None
            else LineWriter(terminal.emit, release=terminal.release, lending=terminal.lent)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._writer is not None
        for rank, incarnation in list(self._held):
            await self.rank_lines(rank, self.take_last_words(rank, incarnation))
        if self._releasing:
            await asyncio.wait(self._releasing)
        await self._writer.close()
        if self._terminal is not None:
            self._terminal.stop()

    async def write_line(self, line: OutputLine) -> None:
        """Print a rank's line, or hold it as a part of its exit reason."""
        assert self._writer is not None
        text = line.text.decode(errors="replace")
        if line.is_exit_reason and self._hold_last_words and self._hold(line.rank, line.incarnation, text):
            return
        await self._writer.put(text_of(line, stream=self._stream_of(line)))

    def show_unfinished(self, line: OutputLine, *, rewritten: bool) -> None:
        """See `LiveSink`."""
        assert self._writer is not None
        stream = self._stream_of(line)
        self._writer.show(text_of(line, stream=stream, ended=False, rewritten=rewritten))

    def lend_terminal(self, *, is_back: bool) -> None:
        """See `LiveSink`."""
        assert self._writer is not None
        self._writer.lend_terminal(is_back=is_back)

    def _stream_of(self, line: OutputLine) -> StreamName:
        return "stderr" if self._ranks_to_stderr else line.stream

    def take_last_words(self, rank: int, incarnation: int) -> tuple[str, ...]:
        """The lines that are held of a rank; whoever takes them shows them."""
        held = self._held.pop((rank, incarnation), _LastWords())
        if held.release is not None:
            held.release.cancel()
        return tuple(held.lines)

    async def rank_lines(self, rank: int, lines: Iterable[str]) -> None:
        """Print lines that a rank wrote to its standard error."""
        assert self._writer is not None
        for text in lines:
            await self._writer.write("stderr", f"{prefix_of(rank)}{text}")

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
        if self._terminal is None:
            assert self._writer is not None
            await self._writer.write("stderr", text)
        else:
            self._terminal.progress(text, completed=progress.step, total=steps_total)

    def _hold(self, rank: int, incarnation: int, text: str) -> bool:
        """Hold one more line of a rank's exit reason; False if that is too many."""
        held = self._held.setdefault((rank, incarnation), _LastWords())
        if len(held.lines) >= LAST_WORDS_LINES_MAX:
            return False
        held.lines.append(text)
        if held.release is None:
            loop = asyncio.get_running_loop()
            held.release = loop.call_later(LAST_WORDS_HELD_S, self._release, rank, incarnation)
        return True

    def _release(self, rank: int, incarnation: int) -> None:
        """The rank still lives, or who tells its end is late: print what it said."""
        lines = self.take_last_words(rank, incarnation)
        task = asyncio.get_running_loop().create_task(self.rank_lines(rank, lines))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
