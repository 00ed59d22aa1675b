"""Output of ranks: read from their pipes, cut into lines, written whole, and the newest lines kept.

Every buffer is bounded, with back-pressure all the way: a stalled terminal fills the writer, the writer
stops the pumps, the pipes fill, and ranks block in `print` as they would on the terminal itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from zbmd.actors.process.exit import without_mark

LINE_BYTES_MAX = 64 * 1024  # a longer line is cut
READ_BYTES = 64 * 1024
TAIL_LINES_MAX = 30  # kept of each rank's standard error, for the report of its failure
WRITER_LINES_MAX = 1024
FLUSH_S_MAX = 0.5

StreamName = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line of a rank, without its newline.

    is_exit_reason: whether the rank marked it as its reason to end (`exit`); job: 0 if there is only one.
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


class LineAssembler:
    """Cuts a stream of bytes into lines of at most `LINE_BYTES_MAX` bytes (sans-I/O)."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes."""
        self._partial += data
        while True:
            end = self._partial.find(b"\n", 0, LINE_BYTES_MAX + 1)
            if end >= 0:
                yield bytes(self._partial[:end])
                del self._partial[: end + 1]
            elif len(self._partial) > LINE_BYTES_MAX:
                yield bytes(self._partial[:LINE_BYTES_MAX])
                del self._partial[:LINE_BYTES_MAX]
            else:
                return

    def end(self) -> Iterator[bytes]:
        """Yield the rest that has no newline."""
        if self._partial:
            yield bytes(self._partial)
            self._partial.clear()


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
        self.tail: deque[str] = deque(maxlen=TAIL_LINES_MAX)
        self._task = self._loop.create_task(self._run(), name=f"output of rank{rank}")

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
                    await self._readable()
                    continue
                if not data:
                    break
                for text in assembler.feed(data):
                    await self._deliver(text)
            for text in assembler.end():
                await self._deliver(text)
        finally:
            os.close(self._fd)

    async def _readable(self) -> None:
        self._loop.add_reader(self._fd, self._wake.set)
        try:
            await self._wake.wait()
            self._wake.clear()
        finally:
            self._loop.remove_reader(self._fd)

    async def _deliver(self, text: bytes) -> None:
        is_exit_reason = False
        if self._stream == "stderr":
            text, is_exit_reason = without_mark(text)
            self.tail.append(text.decode(errors="replace"))
        line = OutputLine(
            rank=self._rank,
            incarnation=self._incarnation,
            stream=self._stream,
            text=text,
            is_exit_reason=is_exit_reason,
            job=self._job,
        )
        await self._sink.write_line(line)


class LineWriter:
    """An `OutputSink` that prints `[rankN]: …` from a thread of its own.

    `emit` writes one line to a stream; it may block, and only the thread waits for it. A terminal cannot be
    written to without blocking unless it is made non-blocking for every process that shares it.
    """

    def __init__(self, emit: Callable[[StreamName, str], None] | None = None) -> None:
        self._emit = emit or emit_plainly
        self._loop = asyncio.get_running_loop()
        self._lines: deque[tuple[StreamName, str]] = deque()
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._room = asyncio.Event()
        self._thread = threading.Thread(target=self._write, name="zbmd-output", daemon=True)
        self._thread.start()

    async def write_line(self, line: OutputLine) -> None:
        """Queue the line with its rank's prefix; waits while `WRITER_LINES_MAX` lines are queued."""
        await self.write(line.stream, f"[rank{line.rank}]: {line.text.decode(errors='replace')}")

    async def write(self, stream: StreamName, text: str) -> None:
        """Queue a line without a prefix."""
        while True:
            with self._changed:
                if len(self._lines) < WRITER_LINES_MAX:
                    self._lines.append((stream, text))
                    self._changed.notify_all()
                    return
                self._room.clear()
            await self._room.wait()

    async def close(self) -> None:
        """Write queued lines and end the thread; gives up after `FLUSH_S_MAX` on a stalled terminal."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join, FLUSH_S_MAX)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                stream, text = self._lines.popleft()
                half_empty = len(self._lines) == WRITER_LINES_MAX // 2
            if half_empty and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._room.set)
            self._emit(stream, text)


def emit_plainly(stream: StreamName, text: str) -> None:
    """Write one line to standard output or error, in one piece; dropped if the reader is gone.

    `print` writes the newline separately, so another thread's line could come in between.
    """
    file = sys.stdout if stream == "stdout" else sys.stderr
    try:
        file.write(f"{text}\n")
        file.flush()
    except BrokenPipeError:
        return


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
