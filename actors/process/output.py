"""Output of ranks: read from their pipes, cut into lines, written whole, and the newest lines kept.

Every buffer is bounded, with back-pressure all the way: a stalled terminal fills the writer, the writer
stops the pumps, the pipes fill, and ranks block in `print` as they would on the terminal itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TextIO, runtime_checkable

from zbmd.actors.process.debugger import terminal_of_run
from zbmd.actors.process.exit import TERMINAL_BACK_MARK, TERMINAL_MARK
from zbmd.actors.process.lines import LineAssembler, rendered, showable, without_marks

READ_BYTES = 64 * 1024
TAIL_LINES_MAX = 30  # kept of each rank's standard error, for the report of its failure
WRITER_LINES_MAX = 1024
FLUSH_S_MAX = 0.5
UNFINISHED_S = 0.15
"""A line without an end is shown after it, and again when it has changed; a busy rank may end it before."""
HELD_S = 0.5
"""A line that was written without its end keeps lines of other sources back for so long."""
HELD_LINES_MAX = 256

StreamName = Literal["stdout", "stderr"]
Streams = Mapping[StreamName, TextIO]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line of a rank, without its newline.

    rank: negative for a spare; is_exit_reason: whether the rank marked it as its reason to end (`exit`); job:
    0 if there is only one.
    """

    rank: int
    incarnation: int
    stream: StreamName
    text: bytes
    is_exit_reason: bool = False
    job: int = 0


class OutputSink(Protocol):
    """Takes ranks' lines, in order."""

    async def write_line(self, line: OutputLine) -> None:
        """Take one line; a late return is the back-pressure."""
        ...


@runtime_checkable
class LiveSink(OutputSink, Protocol):
    """Takes lines that have no end yet, too."""

    def show_unfinished(self, line: OutputLine, *, rewritten: bool) -> None:
        """Take a line as it is so far; never waits. rewritten: by carriage returns, as a progress bar is."""
        ...

    def lend_terminal(self, *, is_back: bool) -> None:
        """Let a rank that stops in a debugger have the terminal, or note that it is back; never waits."""
        ...


class OutputPump:
    """Reads one pipe until its end, or until `finish` reports that its writer is dead."""

    def __init__(
        self, fd: int, *, rank: int, incarnation: int, stream: StreamName, sink: OutputSink, job: int = 0
    ) -> None:
        os.set_blocking(fd, False)
        self._job = job
        self._fd = fd
        self._rank = rank
        self._incarnation = incarnation
        self._stream: StreamName = stream
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._finishing = False
        self._live = sink if isinstance(sink, LiveSink) else None
        self.on_debugger: Callable[[bool], None] | None = None
        """Called when the rank asks for the terminal, and when it gives it back."""
        self._is_lent = False
        self._changed = False
        self._shown_at_s = 0.0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES_MAX)
        self._task = self._loop.create_task(self._run(), name=f"output of rank{rank}")

    def become(self, rank: int, incarnation: int) -> None:
        """Lines are that rank's from now on."""
        self._rank, self._incarnation = rank, incarnation

    async def finish(self) -> None:
        """Deliver everything written before this call, then close, even if others hold the pipe open."""
        self._finishing = True
        self._wake.set()
        await self._task

    async def cancel(self) -> None:
        """Stop at once; undelivered output is lost."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        assembler = LineAssembler()
        try:
            while True:
                # Checked before the read, so that everything written before `finish` is read.
                last = self._finishing
                try:
                    data = os.read(self._fd, READ_BYTES)
                except BlockingIOError:
                    if last:
                        break
                    await self._readable(assembler)
                    continue
                if not data:
                    break
                for text in assembler.feed(data):
                    await self._deliver(text)
                self._changed = True
            for text in assembler.end():
                await self._deliver(text)
        finally:
            if self._is_lent:  # it ended in its debugger
                self._lend(is_back=True)
            os.close(self._fd)

    async def _readable(self, assembler: LineAssembler) -> None:
        """Wait for more; show the line that has no end, if it was not just shown."""
        timer = None
        if self._live is not None and self._changed:
            timer = self._loop.call_later(UNFINISHED_S, self._show, assembler)
        self._loop.add_reader(self._fd, self._wake.set)
        try:
            await self._wake.wait()
            self._wake.clear()
        finally:
            self._loop.remove_reader(self._fd)
            if timer is not None:
                timer.cancel()
                if self._loop.time() >= self._shown_at_s + UNFINISHED_S and self._changed:
                    self._show(assembler)  # it is rewritten faster than that

    def _show(self, assembler: LineAssembler) -> None:
        assert self._live is not None
        self._changed, self._shown_at_s = False, self._loop.time()
        state = assembler.unfinished()
        text = showable(state) if self._stream == "stderr" else state
        self._live.show_unfinished(self._line(rendered(text), False), rewritten=b"\r" in state)

    async def _deliver(self, text: bytes) -> None:
        if self._stream == "stdout":
            await self._sink.write_line(self._line(rendered(text), False))
            return
        for mark, is_back in ((TERMINAL_MARK, False), (TERMINAL_BACK_MARK, True)):
            if mark in text:
                self._lend(is_back=is_back)
                text = text.replace(mark, b"")
                if not text:
                    return
        for part, is_exit_reason in without_marks(text):
            shown = rendered(part)
            self.tail.append(shown.decode(errors="replace"))
            await self._sink.write_line(self._line(shown, is_exit_reason))

    def _lend(self, *, is_back: bool) -> None:
        """Lend the rank the terminal, or note that it has it no more."""
        self._is_lent = not is_back
        if self.on_debugger is not None:
            self.on_debugger(not is_back)
        if self._live is not None:
            self._live.lend_terminal(is_back=is_back)

    def _line(self, text: bytes, is_exit_reason: bool) -> OutputLine:
        return OutputLine(
            rank=self._rank,
            incarnation=self._incarnation,
            stream=self._stream,
            text=text,
            is_exit_reason=is_exit_reason,
            job=self._job,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputText:
    """Text for a stream of ours. source: who wrote it, None for whole lines of our own.

    prefix: of each line of a source; ended: whether its line has an end; rewritten: see `LiveSink`; lends: it
    is no text, but lends the terminal, for the time of that number.
    """

    stream: StreamName
    text: str
    prefix: str = ""
    source: tuple[int, int, StreamName] | None = None
    ended: bool = True
    rewritten: bool = False
    lends: int = 0


def prefix_of(rank: int) -> str:
    """Return what each line of a rank, or of a spare, begins with."""
    return "[spare]: " if rank < 0 else f"[rank{rank}]: "


def text_of(line: OutputLine, *, stream: StreamName | None = None, **state: bool) -> OutputText:
    """Return a rank's line as it is to be written. stream: of ours, if it is another one."""
    return OutputText(
        stream=stream or line.stream,
        text=line.text.decode(errors="replace"),
        prefix=prefix_of(line.rank),
        source=(line.rank, line.incarnation, line.stream),
        **state,
    )


class PlainOutput:
    """Writes what may go to a file: lines whole, and the beginning of one that has no end for a while.

    A line that is rewritten is written once it has an end, as it then is. While one is begun, those of other
    sources wait for its end; after `HELD_S` they pass it, and it is written again, whole, when it ends.
    to: None: the streams of this process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, to: Streams | None = None) -> None:
        self._clock, self._to = clock, to
        self._open: OutputText | None = None
        self._held: list[OutputText] = []
        self._held_until_s = 0.0
        self._passed: dict[tuple[int, int, StreamName] | None, str] = {}
        """The beginnings of lines that others have passed."""

    def emit(self, item: OutputText) -> None:
        """Write it, or hold it until the line that is begun has an end."""
        if item.rewritten and not item.ended:
            return
        if self._open is None or self._open.source == item.source:
            self._write(item)
            if self._open is None:
                self._write_held()
            return
        self._held = [held for held in self._held if held.ended or held.source != item.source]
        self._held.append(item)
        if len(self._held) >= HELD_LINES_MAX or self._clock() >= self._held_until_s:
            self._pass()

    def release(self, *, is_end: bool = False) -> float | None:
        """Write what is held by a line that was begun `HELD_S` ago, or, at the end, all.

        Returns in how many seconds to call it again; None if nothing waits.
        """
        while self._held:
            left_s = self._held_until_s - self._clock()
            if left_s > 0 and not is_end:
                return left_s
            self._pass()
        return None

    def _pass(self) -> None:
        """Write what is held after the line that is begun, as a line that goes on later."""
        if self._open is not None:
            self._passed[self._open.source] = self._open.text
            emit_plainly(self._open.stream, "", to=self._to)
            self._open = None
        self._write_held()

    def _write_held(self) -> None:
        held, self._held = self._held, []
        for item in sorted(held, key=lambda item: not item.ended):  # a line that is begun stops the others
            self.emit(item)

    def _write(self, item: OutputText) -> None:
        begun = "" if self._open is None else self._open.text
        if not item.ended and (item.source in self._passed or item.text == begun):
            return
        if item.ended and self._passed.pop(item.source, None) == item.text:
            return  # all of it was written
        follows = self._open is not None and item.text.startswith(begun)
        if self._open is not None and not follows:
            emit_plainly(self._open.stream, "", to=self._to)
        text = item.text[len(begun) :] if follows else item.prefix + item.text
        emit_plainly(item.stream, text, end="\n" if item.ended else "", to=self._to)
        if self._open is None and not item.ended:
            self._held_until_s = self._clock() + HELD_S
        self._open = None if item.ended else item


class Release(Protocol):
    """See `PlainOutput.release`."""

    def __call__(self, *, is_end: bool = False) -> float | None: ...


class LineWriter:
    """A `LiveSink` that prints `[rankN]: …` from a thread of its own.

    `emit` writes one item; it may block, and only the thread waits for it. A terminal cannot be
    written to without blocking unless it is made non-blocking for every process that shares it. release: see
    `PlainOutput`, to which `emit` belongs; lending: a context in which a rank has the terminal.
    """

    def __init__(
        self,
        emit: Callable[[OutputText], None] | None = None,
        *,
        release: Release | None = None,
        lending: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        plain = PlainOutput()
        self._emit, self._release = emit or plain.emit, release or plain.release
        self._lending = lending
        self._loop = asyncio.get_running_loop()
        self._items: deque[OutputText] = deque()
        self._closed = False
        self._terminal_asked = self._terminal_back = 0
        self._changed = threading.Condition()
        self._room = asyncio.Event()
        self._thread = threading.Thread(target=self._write, name="zbmd-output", daemon=True)
        self._thread.start()

    async def write_line(self, line: OutputLine) -> None:
        """Queue the line with its rank's prefix; waits while `WRITER_LINES_MAX` lines are queued."""
        await self.put(text_of(line))

    def show_unfinished(self, line: OutputLine, *, rewritten: bool) -> None:
        """See `LiveSink`."""
        self.show(text_of(line, ended=False, rewritten=rewritten))

    def lend_terminal(self, *, is_back: bool) -> None:
        """See `LiveSink`."""
        with self._changed:
            if is_back:
                self._terminal_back += 1
                return
            self._terminal_asked += 1
            self._items.append(OutputText(stream="stderr", text="", lends=self._terminal_asked))
            self._changed.notify_all()

    async def write(self, stream: StreamName, text: str) -> None:
        """Queue a line of our own, without a prefix."""
        await self.put(OutputText(stream=stream, text=text))

    async def put(self, item: OutputText) -> None:
        """Queue an item; waits for room."""
        while True:
            with self._changed:
                if len(self._items) < WRITER_LINES_MAX:
                    self._items.append(item)
                    self._changed.notify_all()
                    return
                self._room.clear()
            await self._room.wait()

    def show(self, item: OutputText) -> None:
        """Queue an item that is dropped if there is no room: a later one has its text, too."""
        with self._changed:
            if self._items and not self._items[-1].ended and self._items[-1].source == item.source:
                self._items[-1] = item
            elif len(self._items) < WRITER_LINES_MAX:
                self._items.append(item)
            self._changed.notify_all()

    async def close(self) -> None:
        """Write queued lines and end the thread; gives up after `FLUSH_S_MAX` on a stalled terminal."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join, FLUSH_S_MAX)

    def _write(self) -> None:
        while True:
            with self._changed:
                is_end = self._closed and not self._items
            wait_s = self._release(is_end=is_end)
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed, wait_s)
                if not self._items:
                    if is_end:
                        return
                    continue
                item = self._items.popleft()
                half_empty = len(self._items) == WRITER_LINES_MAX // 2
            if half_empty and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._room.set)
            if not item.lends:
                self._emit(item)
            elif (terminal := terminal_of_run()) is not None:
                with self._lending():
                    terminal.lend(lambda number=item.lends: self._terminal_back >= number)  # type: ignore[misc]


def emit_plainly(stream: StreamName, text: str, *, end: str = "\n", to: Streams | None = None) -> None:
    """Write one line to standard output or error, in one piece; dropped if it cannot be written.

    `print` writes the newline separately, so another thread's line could come in between. to: None: the
    streams of this process.
    """
    file = (sys.stdout if stream == "stdout" else sys.stderr) if to is None else to[stream]
    try:
        try:
            file.write(f"{text}{end}")
        except UnicodeEncodeError:  # by PYTHONIOENCODING, or a locale that is no UTF-8
            file.write(f"{text}{end}".encode(file.encoding, "backslashreplace").decode(file.encoding))
        file.flush()
    except BlockingIOError:  # another process that has this terminal has made it so
        os.set_blocking(file.fileno(), True)
        file.flush()
    except OSError:
        return  # its reader is gone, or its disk is full: that ends no run


# --- the newest lines of each job, kept for clients that follow it ----------------------------------------


LINES_MAX: Final = 10_000
"""Of a job, on this node."""
BYTES_MAX: Final = 4 << 20
JOBS_MAX: Final = 64
"""Jobs whose lines are kept; the one that was quiet the longest goes for one more."""
ANSWER_BYTES_MAX: Final = 256 << 10


@dataclass(slots=True)
class _Kept:
    lines: deque[OutputLine] = field(default_factory=deque[OutputLine])
    first: int = 0
    nbytes: int = 0


class JobOutput:
    """The `OutputSink` of all jobs of this node. Usable from any thread.

    A client asks each node for lines by their number, so it sees which lines were dropped meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[int, _Kept] = OrderedDict()

    async def write_line(self, line: OutputLine) -> None:
        """See `OutputSink`; never waits."""
        self.add(line.job, line)

    def add(self, job: int, line: OutputLine) -> None:
        """Store a line."""
        with self._lock:
            kept = self._jobs.setdefault(job, _Kept())
            self._jobs.move_to_end(job)
            kept.lines.append(line)
            kept.nbytes += len(line.text)
            while len(kept.lines) > LINES_MAX or kept.nbytes > BYTES_MAX:
                kept.nbytes -= len(kept.lines.popleft().text)
                kept.first += 1
            while len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)

    def since(self, job: int, number: int) -> tuple[int, list[OutputLine]]:
        """Return the number of the first line, and lines from `number` on that fit into one reply."""
        with self._lock:
            kept = self._jobs.get(job)
            if kept is None:
                return 0, []
            first = max(number, kept.first)
            found: list[OutputLine] = []
            nbytes = 0
            for place in range(first - kept.first, len(kept.lines)):
                line = kept.lines[place]
                nbytes += len(line.text) + 32
                if nbytes > ANSWER_BYTES_MAX and found:
                    break
                found.append(line)
            return first, found
