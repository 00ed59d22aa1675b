"""Reports of a group's members on the end of their part in it: why, and in which call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

REASON_CHARS_MAX: Final = 1000
"""Characters of a reason, or of a call, in a message."""
CALLS_MAX: Final = 8
"""Calls in a message."""


class MemberEnds:
    """One group's. Noted on the loop; read by the threads whose operations have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reasons: dict[int, str] = {}
        self._calls: dict[int, tuple[str, ...]] = {}

    def note(self, rank: int, reason: str, calls: tuple[str, ...] = ()) -> None:
        """Note a member's report; the first one of a member counts."""
        with self._changed:
            self._reasons.setdefault(rank, reason)
            if calls:
                self._calls.setdefault(rank, calls)
            self._changed.notify_all()

    @property
    def first(self) -> tuple[int, str] | None:
        """Return the member that reported first, and its reason."""
        return next(iter(self._reasons.items()), None)

    def reason_of(self, rank: int) -> str | None:
        """Return why a member ended its part; None if it did not say."""
        return self._reasons.get(rank)

    def calls_of(self, rank: int) -> tuple[str, ...]:
        """Return the last calls of a member that has failed, the latest first; none if it did not say."""
        return self._calls.get(rank, ())

    def wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Wait for more reports, at most `limit_s`, until this holds."""
        with self._changed:
            self._changed.wait_for(until, limit_s)
