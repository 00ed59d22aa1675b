"""Lines of ranks: rewritten ones, ones without an end, and ones with an exit reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.process.exit import MARK
from zbmd.actors.process.lines import (
    LINE_BYTES_MAX,
    LineAssembler,
    collapse,
    rendered,
    showable,
    without_marks,
)
from zbmd.actors.process.output import HELD_LINES_MAX, HELD_S, OutputText, PlainOutput

BAR = "\r{0:3}%|{1:10}| {0}/100"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("a plain line", "a plain line"),
        ("from Windows\r", "from Windows"),
        ("  kept  \r", "  kept  "),
        (BAR.format(5, "") + BAR.format(100, "█" * 10), "100%|██████████| 100/100"),
        ("\r100 of 100\r9 of", "9 ofof 100"),
        ("\r 50%|     |\r           \rwritten above it", "written above it"),
        ("\r 50%|     |\r\x1b[Kshort", "short"),
        ("\r 50%|     |\r\x1b[2Kshort", "short"),
        ("Loading the long name\rdone\x1b[K", "done"),
        ("\r\x1b[31m 1%\x1b[0m\r\x1b[32m 2%\x1b[0m", "\x1b[32m 2%\x1b[0m"),
        ("\r", ""),
        ("", ""),
    ],
)
def test_a_rewritten_line_is_shown_as_a_terminal_shows_it(line: str, shown: str) -> None:
    assert rendered(line.encode()).decode() == shown


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x1b")), min_size=1),
    st.integers(0, 5),
)
def test_what_was_seen_may_be_dropped_at_any_time(segments: list[str], at: int) -> None:
    head, tail = "\r".join(segments[:at]).encode(), "\r".join(segments[at:]).encode()
    if at and segments[at:]:
        head += b"\r"
    assert rendered(collapse(head) + tail) == rendered(head + tail)


@given(st.binary())
def test_any_bytes_are_rendered(line: bytes) -> None:
    assert b"\r" not in rendered(line)


def test_a_bar_that_moves_for_hours_stays_one_line() -> None:
    assembler, found = LineAssembler(), list[bytes]()
    for i in range(20_000):
        found += assembler.feed(BAR.format(i % 100, "█" * (i % 10)).encode())
    assert len(assembler.unfinished()) < LINE_BYTES_MAX
    found += assembler.feed(BAR.format(100, "█" * 10).encode() + b"\nnext\n")
    assert [rendered(line).decode() for line in found] == ["100%|██████████| 100/100", "next"]


def test_an_exit_reason_begins_a_line_whatever_is_on_it() -> None:
    line = b"\r 50%|###  |" + MARK + b"Traceback (most recent call last):"
    assert list(without_marks(line)) == [
        (b"\r 50%|###  |", False),
        (b"Traceback (most recent call last):", True),
    ]
    assert list(without_marks(MARK + b"one")) == [(b"one", True)]
    assert list(without_marks(b"")) == [(b"", False)]


@given(
    st.binary(max_size=8), st.integers(0, len(MARK)), st.sampled_from(["", "é", "€", "😀"]), st.integers(0, 4)
)
def test_no_part_of_a_mark_or_of_a_character_is_shown(
    text: bytes, mark_bytes: int, character: str, cut: int
) -> None:
    text = text.replace(MARK[:1], b"")
    assert showable(text + MARK[:mark_bytes]).startswith(showable(text))
    assert MARK[:1] not in showable(text + MARK[:mark_bytes] + b"a reason" * (mark_bytes == len(MARK)))
    encoded = character.encode()
    part = encoded[: max(0, len(encoded) - cut)]
    assert showable(b"text " + part).decode() in ("text ", "text " + character)


class Ranks:
    """Write lines of ranks: `+` without an end, `r` rewritten."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.output = PlainOutput(lambda: self.now_s)

    def put(self, rank: int, text: str, how: str = "") -> None:
        source = (rank, 1, "stdout") if rank >= 0 else None
        prefix = f"[rank{rank}]: " if rank >= 0 else ""
        self.output.emit(
            OutputText(
                stream="stdout",
                text=text,
                prefix=prefix,
                source=source,  # type: ignore[arg-type]
                ended=not how,
                rewritten=how == "r",
            )
        )


@pytest.mark.parametrize(
    ("items", "written"),
    [
        ([(0, "Load", "+"), (0, "Loading", "+"), (0, "Loading done")], "[rank0]: Loading done\n"),
        (
            [(0, "Load", "+"), (1, "hello"), (0, "Loading", "+"), (0, "Loading done")],
            "[rank0]: Loading done\n[rank1]: hello\n",
        ),
        (
            [(0, "a", "+"), (1, "b"), (1, "c", "+"), (-1, "ours"), (0, "ab"), (1, "cd", "+"), (1, "cde")],
            "[rank0]: ab\n[rank1]: b\nours\n[rank1]: cde\n",
        ),
        ([(0, "whole", "+"), (-1, "ours"), (0, "whole")], "[rank0]: whole\nours\n"),
        ([(0, "a b", "+"), (-1, "ours"), (0, "other")], "[rank0]: a b\n[rank0]: other\nours\n"),
        ([(0, " 1%", "r"), (1, "hello"), (0, " 2%", "r"), (0, "100%")], "[rank1]: hello\n[rank0]: 100%\n"),
        ([(0, "Load", "+"), (0, "100%", "r"), (0, "100% done")], "[rank0]: Load\n[rank0]: 100% done\n"),
        ([(0, "", "+"), (0, "", "r"), (0, "")], "[rank0]: \n"),
        (
            [(0, "a", "+"), (1, "b", "+"), (0, "ac"), (1, "bd")],
            "[rank0]: ac\n[rank1]: bd\n",
        ),
    ],
)
def test_a_file_gets_each_line_once(
    items: list[tuple[int, str, str]], written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks()
    for item in items:
        ranks.put(*item)
    assert capsys.readouterr().out == written


def test_lines_do_not_wait_for_ever_for_the_end_of_anothers(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks()
    ranks.put(0, "Load", "+")
    ranks.put(1, "hello")
    ranks.put(2, "Wait", "+")
    assert ranks.output.release() == HELD_S
    ranks.now_s = HELD_S / 2
    ranks.put(0, "Loading", "+")
    assert ranks.output.release() == HELD_S / 2
    assert capsys.readouterr().out == "[rank0]: Loading"
    ranks.now_s = HELD_S
    assert ranks.output.release() is None
    assert capsys.readouterr().out == "\n[rank1]: hello\n[rank2]: Wait"
    ranks.put(2, "Wait")
    ranks.put(0, "Loading more", "+")
    assert capsys.readouterr().out == "\n", "it was passed: no other part of it is written"
    ranks.put(0, "Loading more, done")
    assert capsys.readouterr().out == "[rank0]: Loading more, done\n"


def test_many_lines_do_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks()
    ranks.put(0, "Load", "+")
    for _ in range(HELD_LINES_MAX):
        ranks.put(1, "x")
    ranks.put(0, "Load")
    assert capsys.readouterr().out == "[rank0]: Load\n" + "[rank1]: x\n" * HELD_LINES_MAX


def test_nothing_is_held_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.put(rank, "begun", "+")
    ranks.put(3, "whole")
    assert ranks.output.release(is_end=True) is None
    assert capsys.readouterr().out == ("[rank0]: begun\n[rank3]: whole\n[rank1]: begun\n[rank2]: begun")
