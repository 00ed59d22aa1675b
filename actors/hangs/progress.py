"""Whether what a process has under way makes progress (sans-I/O), by looks at it from time to time.

A look names everything that is under way, each with a mark that changes with every bit of progress. What
keeps its mark for as long as its limit is stuck, and is reported once; when it moves on, so is that.
Time counts from look to look, and no look counts for more than `LATE_LOOKS` of them: a machine that was
suspended, or a process that was stopped and goes on, finds nothing stuck that had no time to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from zbmd.transport.errors import LocalProtocolError

SECOND_NS = 1_000_000_000
PROGRESS_DEADLINE_NS_DEFAULT = 60 * SECOND_NS
"""Longer than any step of an ordinary job, and short enough for somebody who looks at the screen."""
PROGRESS_DEADLINE_NS_MIN = 100_000_000
LOOKS = 16
"""In a deadline: a hang is found at most so much of it late."""
LOOK_NS_MAX = SECOND_NS
LATE_LOOKS = 4
TRACKED_MAX = 4096
"""Things that one process watches at once; what comes on top waits until one of them has moved on."""


def look_ns(deadline_ns: int) -> int:
    """From look to look for a deadline, both ns."""
    return min(LOOK_NS_MAX, deadline_ns // LOOKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One thing that is under way. `mark`: equal to that of the last look if there was no progress.

    limit_ns: how long it may go without, 0 for the deadline of the process.
    """

    key: str
    mark: object
    limit_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """All that is under way now. `allowed_ns`: no limit is below it for the time being."""

    samples: tuple[Sample, ...]
    allowed_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """No progress for its limit."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedOn:
    """A stuck thing has made progress, or is over."""

    key: str


ProgressEvent = Looked
ProgressAction = Stuck | MovedOn


@dataclass(slots=True)
class _Tracked:
    mark: object
    still_ns: int = 0
    stuck: bool = False


class ProgressMachine:
    """Watches with a default limit of `deadline_ns`; looks are meant to come each `look_ns`."""

    def __init__(self, *, deadline_ns: int, look_ns: int) -> None:
        if not 0 < look_ns <= deadline_ns:
            raise LocalProtocolError(f"a look each {look_ns} ns does not fit a deadline of {deadline_ns} ns")
        self.deadline_ns = deadline_ns
        self.look_ns = look_ns
        self._tracked: dict[str, _Tracked] = {}
        self._looked_ns: int | None = None

    def still_ns(self, key: str) -> int:
        """Return how long the thing has kept its mark; 0 if it is not watched."""
        found = self._tracked.get(key)
        return 0 if found is None else found.still_ns

    def is_stuck(self, key: str) -> bool:
        """Return whether it is beyond its limit."""
        found = self._tracked.get(key)
        return found is not None and found.stuck

    def handle(self, event: ProgressEvent, *, now_ns: int) -> list[ProgressAction]:
        """Take a look; what is stuck since this look, and what is so no more."""
        match event:
            case Looked():
                return self._look(event, self._passed_ns(now_ns))
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that no looks may lead to."""
        assert len(self._tracked) <= TRACKED_MAX, f"{len(self._tracked)} things are watched"
        for key, tracked in self._tracked.items():
            assert tracked.still_ns >= 0, f"{key} has been still for {tracked.still_ns} ns"
            assert not tracked.stuck or tracked.still_ns > 0, f"{key} is stuck as soon as it was seen"

    def _passed_ns(self, now_ns: int) -> int:
        before_ns, self._looked_ns = self._looked_ns, now_ns
        if before_ns is None:
            return 0
        if now_ns < before_ns:
            raise LocalProtocolError(f"a look at {now_ns} ns, behind one at {before_ns} ns")
        return min(now_ns - before_ns, LATE_LOOKS * self.look_ns)

    def _look(self, event: Looked, passed_ns: int) -> list[ProgressAction]:
        actions: list[ProgressAction] = []
        before, self._tracked = self._tracked, {}
        for sample in event.samples:
            known = before.pop(sample.key, None)
            if known is None or known.mark != sample.mark:
                if known is not None and known.stuck:
                    actions.append(MovedOn(key=sample.key))
                if known is not None or len(self._tracked) + len(before) < TRACKED_MAX:
                    self._tracked[sample.key] = _Tracked(sample.mark)
                continue
            known.still_ns += passed_ns
            self._tracked[sample.key] = known
            limit_ns = max(sample.limit_ns or self.deadline_ns, event.allowed_ns)
            if not known.stuck and known.still_ns >= limit_ns:
                known.stuck = True
                actions.append(Stuck(key=sample.key))
        actions += [MovedOn(key=key) for key, known in before.items() if known.stuck]
        return actions
