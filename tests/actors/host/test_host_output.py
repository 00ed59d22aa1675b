"""Ranks' output: lines whole and in order, bounded, with back-pressure, and nothing lost at the end."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.polling import until

from zbmd.actors.process.lines import LINE_BYTES_MAX, LineAssembler
from zbmd.actors.process.output import (
    TAIL_LINES_MAX,
    WRITER_LINES_MAX,
    LineWriter,
    OutputLine,
    OutputPump,
    OutputText,
    PlainOutput,
    emit_plainly,
)


class Sink:
    """Keeps lines; lets one through at a time while it is closed."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.first = asyncio.Event()

    async def write_line(self, line: OutputLine) -> None:
        self.texts.append(line.text)
        self.first.set()
        await self.gate.wait()


@given(st.lists(st.binary(max_size=40)), st.integers(1, 7))
def test_lines_do_not_depend_on_how_bytes_arrive(chunks: list[bytes], size: int) -> None:
    stream = b"".join(chunks)
    whole, pieces = LineAssembler(), LineAssembler()
    expected = [*whole.feed(stream), *whole.end()]
    found = [line for i in range(0, len(stream), size) for line in pieces.feed(stream[i : i + size])]
    found += pieces.end()
    assert found == expected
    assert b"\n".join(expected) == stream.removesuffix(b"\n")


def test_a_line_without_end_is_cut_and_the_next_is_not() -> None:
    assembler = LineAssembler()
    lines = [*assembler.feed(b"x" * (2 * LINE_BYTES_MAX + 5) + b"\nnext\n"), *assembler.end()]
    assert [len(line) for line in lines] == [LINE_BYTES_MAX, LINE_BYTES_MAX, 5, 4]
    assert lines[-1] == b"next"


async def test_what_was_written_before_the_end_is_delivered_though_the_pipe_stays_open() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    held = os.dup(write)  # as a helper process of the rank would
    sink = Sink()
    pump = OutputPump(read, rank=0, incarnation=1, stream="stderr", sink=sink)
    os.write(write, b"".join(b"line %d\n" % i for i in range(100)) + b"the end")
    os.close(write)
    await pump.finish()
    os.close(held)
    assert sink.texts == [b"line %d" % i for i in range(100)] + [b"the end"]
    assert len(pump.tail) == TAIL_LINES_MAX
    assert pump.tail[-1] == "the end"


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a buffer (PYTHONUNBUFFERED) each piece is a system call, and another's may come before it."""

    class Unbuffered(io.StringIO):
        pieces: ClassVar[list[str]] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Unbuffered())
    emit_plainly("stdout", "a whole line")
    assert Unbuffered.pieces == ["a whole line\n"]


async def test_a_sink_that_does_not_move_stops_the_writer_at_the_pipe() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    sink = Sink()
    sink.gate.clear()
    pump = OutputPump(read, rank=0, incarnation=1, stream="stdout", sink=sink)
    sent = 0
    while True:
        try:
            sent += os.write(write, b"0123456789\n" * 100)
        except BlockingIOError:
            if sink.first.is_set():
                break
            await sink.first.wait()
    os.close(write)
    assert len(sink.texts) == 1
    sink.gate.set()
    await pump.finish()
    assert sum(len(text) + 1 for text in sink.texts) >= sent


async def test_the_writer_is_bounded_and_keeps_order() -> None:
    emitted: list[str] = []
    stalled = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def emit(item: OutputText) -> None:
        loop.call_soon_threadsafe(started.set)
        stalled.wait()
        emitted.append(item.text)

    writer = LineWriter(emit)
    await writer.write("stdout", "0")
    await started.wait()  # the thread holds the first line: the queue is empty
    for i in range(WRITER_LINES_MAX):
        await writer.write("stdout", str(i + 1))
    late = asyncio.create_task(writer.write("stdout", "late"))
    done, _ = await asyncio.wait([late], timeout=0)
    assert not done, "the queue is full"
    stalled.set()
    await late
    await writer.close()
    assert emitted == [*(str(i) for i in range(WRITER_LINES_MAX + 1)), "late"]


async def test_a_line_that_waits_for_the_end_of_anothers_is_written_in_time() -> None:
    out = io.StringIO()  # reads of `capfd` lose what a thread writes meanwhile
    plain = PlainOutput(to={"stdout": out, "stderr": out})
    writer = LineWriter(plain.emit, release=plain.release)
    begun = OutputLine(rank=0, incarnation=1, stream="stdout", text=b"Load")
    writer.show_unfinished(begun, rewritten=False)
    await writer.write("stdout", "ours")
    wanted = "[rank0]: Load\nours\n"
    await until(lambda: len(out.getvalue()) >= len(wanted))
    assert out.getvalue() == wanted
    await writer.write_line(begun)
    await writer.close()
    assert out.getvalue() == wanted, "it was written"
