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
from zbmd.actors.process.output import OutputText, PlainOutput

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
        self.output = PlainOutput()

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
            "[rank0]: Load\n[rank1]: hello\n[rank0]: ing done\n",
        ),
        ([(0, "whole", "+"), (-1, "ours"), (0, "whole")], "[rank0]: whole\nours\n"),
        ([(0, " 1%", "r"), (1, "hello"), (0, " 2%", "r"), (0, "100%")], "[rank1]: hello\n[rank0]: 100%\n"),
        ([(0, "Load", "+"), (0, "100%", "r"), (0, "100% done")], "[rank0]: Load\n[rank0]: 100% done\n"),
        ([(0, "", "+"), (0, "", "r"), (0, "")], "[rank0]: \n"),
        (
            [(0, "a", "+"), (1, "b", "+"), (0, "ac"), (1, "bd")],
            "[rank0]: a\n[rank1]: b\n[rank0]: c\n[rank1]: d\n",
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
