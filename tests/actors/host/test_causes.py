"""The cause of a failure stays when the failure repeats, and tells it from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zbmd.actors.process.exit import CAUSE_BYTES_MAX, CAUSE_MARK, CausePage, cause_of
from zbmd.transport.errors import PeerLost

LINES = Path(__file__).read_text().splitlines()


def at(text: str) -> str:
    """The place of the only line here that ends so."""
    (number,) = (n for n, line in enumerate(LINES, 1) if line.endswith(text))
    return f"{__file__}:{number}"


def caught(call: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as raised:
        call()
    return cause_of(raised.value)


def shaped(text: str) -> None:
    raise ValueError(text)  # shaped


def test_numbers_addresses_and_paths_of_a_message_do_not_matter() -> None:
    told = {
        caught(lambda text=text: shaped(text))  # type: ignore[misc]
        for text in (
            "rank 1 of 8 has 0x7f00 in /tmp/run-a/x, 12.5 ms",
            "rank 23 of 16 has 0xdead in /tmp/run-b/y, 3 ms",
        )
    }
    (cause,) = told
    assert cause.partition(CAUSE_MARK)[0] == f"ValueError at {at('# shaped')}"
    assert caught(lambda: shaped("another text")) not in told


def test_the_place_is_the_users_and_the_library_behind_it_counts_too() -> None:
    def calls(raising: Callable[[], object]) -> str:
        return caught(lambda: raising())  # the user's

    one = calls(lambda: Path("/nowhere").read_text())
    other = calls(lambda: Path("/nowhere").stat())
    assert one != other and one.startswith("FileNotFoundError at "), (one, other)
    assert __file__ in one


def test_what_follows_from_the_end_of_another_rank_has_no_cause() -> None:
    def wrapped() -> None:
        try:
            raise PeerLost("rank1", "its life thread ended")
        except PeerLost as error:
            raise RuntimeError("my group is gone") from error

    assert caught(wrapped) == ""

    def told_by_text() -> None:
        raise RuntimeError("PeerLost: peer rank1 lost: its life thread ended")

    assert caught(told_by_text) == ""


def test_groups_and_exits_have_one() -> None:
    def group() -> None:
        raise ExceptionGroup("tasks", [KeyError("x"), ValueError("y")])

    assert caught(group).startswith("KeyError")

    def leaves() -> None:
        raise SystemExit(3)

    assert caught(leaves).startswith("SystemExit at ")


@pytest.mark.parametrize("text", ["", "ValueError at ä.py:1|00", "x" * 10_000])
def test_a_page_keeps_what_fits(text: str) -> None:
    page = CausePage()
    page.write(text)
    assert page.read() == text[:CAUSE_BYTES_MAX]
    page.close()
