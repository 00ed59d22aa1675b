"""Reports of a host to its owner: events, the current processes of its ranks, and the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from zbmd.actors.cluster.jobs.node_machine import LocalJob, ProcessState
from zbmd.actors.cluster.state.job_table import RankEntry, SlotState
from zbmd.actors.hangs.verdict import HangNotice
from zbmd.actors.view import Outcome, RankState, View


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A process was forked. Times: CLOCK_MONOTONIC, ns. `asked_ns`: when the fork was decided.

    was_spare: it was there already, as a spare, and is this rank from now on.
    """

    rank: int
    incarnation: int
    pid: int
    asked_ns: int
    at_ns: int
    was_spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDown:
    """A process is gone. Times: CLOCK_MONOTONIC, ns.

    noticed_ns: the native watcher's notice, None if the process had no link to the host or left cleanly;
    confirmed_ns: the kernel reported its end; code: its exit code, or minus the signal that ended it;
    normal: exit code 0; no_memory: the kernel ended it for want of memory, as `reason` says; expected: it
    ended because it was asked to; tail: the last lines of its standard
    error; next_step: a sentence on what happens next; cause: of the exception that ended it, see
    `zbmd.actors.process.exit.cause_of`.
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
    no_memory: bool = False
    cause: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareReady:
    """A spare waits for a rank."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareLost:
    """A spare has ended by itself. number: of the spare; is_last: no more are started."""

    number: int
    pid: int
    reason: str
    tail: tuple[str, ...]
    is_last: bool


HostEvent = SpareReady | SpareLost | RankStarted | RankDown | ViewChanged | RankReport | HangNotice
Observer = Callable[[HostEvent], Awaitable[None]]

log: Final = structlog.stdlib.get_logger("zbmd.actors.host")

EVENTS_WAITING_MAX: Final = 8192
"""Events that the observer has not taken; beyond it reports of ranks are dropped and counted."""

EventT = TypeVar("EventT")


def log_hang(event: object) -> None:
    """Log a hang, where no observer takes it."""
    if isinstance(event, HangNotice):
        log.warning(event.text, at=event.stack, next_step=event.next_step)


class EventQueue(Generic[EventT]):
    """Passes events to an async observer in their order, and holds up nobody meanwhile.

    observer: gets them within `observed`; without one, hangs are logged. failures: every unexpected end;
    failed: done with the error of an observer that raises, which still gets later events.
    """

    def __init__(self, observer: Callable[[EventT], Awaitable[None]] | None) -> None:
        self.failures: list[RankDown] = []
        self.reports_dropped = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observer = observer
        self._events: asyncio.Queue[EventT] = asyncio.Queue()

    def put(self, event: EventT) -> None:
        """Take an event."""
        if isinstance(event, RankDown) and not event.expected:
            self.failures.append(event)
        if self._observer is None:
            log_hang(event)
        elif isinstance(event, RankReport) and self._events.qsize() >= EVENTS_WAITING_MAX:
            self.reports_dropped += 1
        else:
            self._events.put_nowait(event)

    async def settle(self) -> None:
        """Wait until the observer has taken every event."""
        await self._events.join()

    @asynccontextmanager
    async def observed(self) -> AsyncGenerator[None]:
        """Pass events on until the block ends."""
        task = asyncio.get_running_loop().create_task(self._observe(), name="host observer")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.failed.cancel()

    async def _observe(self) -> None:
        while self._observer is not None:
            event = await self._events.get()
            try:
                await self._observer(event)
            except Exception as error:
                if self.failed.done():
                    log.error("error of an observer after a failure", exc_info=error)
                else:
                    self.failed.set_exception(error)
            finally:
                self._events.task_done()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank's current process; pid 0 while there is none."""

    rank: int
    incarnation: int
    pid: int
    state: RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareInfo:
    """A spare of a job on this node; pid 0 before it exists. state: see `SpareState`."""

    pid: int
    state: str


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


_SHOWN: Final = {
    ProcessState.FORKING: RankState.WAITING,
    ProcessState.STARTED: RankState.STARTING,
    ProcessState.JOINED: RankState.JOINED,
}
_ENDED: Final = {SlotState.FINISHED: RankState.FINISHED, SlotState.LOST: RankState.LOST}


def shown_state(entry: RankEntry, local: LocalJob | None) -> RankState:
    """Return the state of a rank that this node runs or ran, for people."""
    if entry.state in _ENDED:
        return _ENDED[entry.state]
    process = None if local is None else local.processes.get((entry.rank, entry.incarnation))
    return RankState.WAITING if process is None else _SHOWN[process.state]
