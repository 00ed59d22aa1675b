"""Reports of a host to its owner: events, the current processes of its ranks, and the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbmd.actors.hangs.verdict import HangNotice
from zbmd.actors.view import Outcome, RankState, View


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A process was forked. Times: CLOCK_MONOTONIC, ns. `asked_ns`: when the fork was decided."""

    rank: int
    incarnation: int
    pid: int
    asked_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDown:
    """A process is gone. Times: CLOCK_MONOTONIC, ns.

    noticed_ns: the native watcher's notice, None if the process had no link to the host or left cleanly;
    confirmed_ns: the kernel reported its end; code: its exit code, or minus the signal that ended it;
    normal: exit code 0; expected: it ended because it was asked to; tail: the last lines of its standard
    error; next_step: what follows from it, in words.
    """

    rank: int
    incarnation: int
    pid: int
    code: int
    reason: str
    normal: bool
    expected: bool
    noticed_ns: int | None
    confirmed_ns: int
    tail: tuple[str, ...]
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChanged:
    """A view was entered: all its members are linked. A view that a death overtakes is never entered."""

    view: View
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Data that a rank passed to `Worker.report`: plain data, as MessagePack carries it."""

    rank: int
    incarnation: int
    payload: dict[str, Any]


HostEvent = RankStarted | RankDown | ViewChanged | RankReport | HangNotice
Observer = Callable[[HostEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank's current process; pid 0 while there is none."""

    rank: int
    incarnation: int
    pid: int
    state: RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. `failures`: every unexpected end, in order; exit_code: 0 only after success.

    last_records: where what the host and the ranks that failed saw last was written down, if it was.
    """

    outcome: Outcome
    reason: str
    exit_code: int
    restarts: int
    failures: tuple[RankDown, ...]
    reports_dropped: int
    last_records: Path | None = None
