"""Reports of `zbmd-node run` on a job: failures, repaired views, and progress where the job reports it.

A job that gives `Worker.report` the fields `kind` = "step", `version` (the step that is committed) and any of
`loss`, `grad_norm`, `tokens_per_s`, `tflops`, `mfu`, `steps_total` gets the progress line and bar, and each
loss the one line that says what it cost. With `kind` = "missing" and `text`, a rank reports which rank an
operation of its own waits for in vain; the end of a run that failed names the first one.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from zbmd.actors.cluster.jobs.host import result_of, with_records
from zbmd.actors.cluster.jobs.rank_processes import resident_bytes
from zbmd.actors.cluster.jobs.reports import (
    EventQueue,
    HostEvent,
    RankDown,
    RankInfo,
    RankReport,
    RankStarted,
    RunResult,
    SpareLost,
    SpareReady,
    ViewChanged,
)
from zbmd.actors.cluster.state.job_table import MEMORY_ADVICE, Job
from zbmd.actors.hangs.verdict import HangNotice
from zbmd.actors.process.exit import USAGE_EXIT_CODE, describe_exit
from zbmd.actors.process.spare import SPARE_RANK
from zbmd.actors.replay.process_capture import ProcessCapture
from zbmd.actors.view import Outcome
from zbmd.tools.cli.console import Console, Progress, Recovery
from zbmd.tools.node.dashboard import note_death
from zbmd.tools.node.recorder import LaunchRecorder

# Reports of a run over several nodes: of this node, of its ranks, and how the job ended.

TOLD_S_MAX: Final = 1.0
"""A terminal that does not move is not waited for."""


class RunTeller:
    """Tells events in their order, without holding up whoever has them. Use within `telling`."""

    def __init__(
        self, console: Console, ranks: Callable[[], dict[int, RankInfo]], record: LaunchRecorder | None = None
    ) -> None:
        self._console, self._record = console, record
        self._story = RunNarrator(console, ranks, record)
        self._events: EventQueue[HostEvent | str] = EventQueue(self._tell)

    def say(self, text: str) -> None:
        """A line of our own."""
        self._events.put(text)

    def happened(self, event: HostEvent) -> None:
        """Something happened to a rank of this node."""
        self._events.put(event)

    @asynccontextmanager
    async def telling(self) -> AsyncGenerator[None]:
        """Tell what comes meanwhile."""
        async with self._events.observed():
            try:
                yield
            finally:
                with suppress(TimeoutError):
                    await self.told()

    async def told(self) -> None:
        """Wait until every event is reported. Raises `TimeoutError`."""
        async with asyncio.timeout(TOLD_S_MAX):
            await self._events.settle()

    async def over(self, job: Job, capture: ProcessCapture) -> None:
        """Report how the job ended, if it has; the final report. capture: of this process."""
        if job.outcome is None:
            return
        result = with_records(result_of(job, self._events), capture)
        if self._record is not None:
            self._record.over(result)
        match job.outcome:
            case Outcome.FAILED:
                await self._story.failed(result)
            case Outcome.STOPPED:
                await self._console.note(f"stopped: {job.reason}")
            case _:
                return

    async def _tell(self, event: HostEvent | str) -> None:
        if isinstance(event, str):
            if self._record is not None:
                self._record.note(event)
            await self._console.note(event)
        else:
            await self._story.observe(event)


RUN_ENDS = "the run ends"
"""`RankDown.next_step` of a failure that the paragraph on the run's end will tell of."""
LAST_WORDS_KNOWN_MAX = 64
MISSING_CHARACTERS_MAX = 300
FINISHED_NAMED_MAX = 8

_CONSEQUENCE = re.compile(
    r"(?:[\w.]+\.DistBackendError: |zbmd\.[\w.]+\.)(PeerLost|MembersLost|OperationAborted): "
)


class RunNarrator:
    """Observer of a host: prints its events, and its end in one paragraph.

    `ranks` gives the ranks as they are now; `console` holds their exit reasons; `record` takes all of it.
    """

    def __init__(
        self, console: Console, ranks: Callable[[], dict[int, RankInfo]], record: LaunchRecorder | None = None
    ) -> None:
        self._console, self._record = console, record
        self._ranks = ranks
        self._first: tuple[RankDown, tuple[str, ...]] | None = None  # failure that is no other's consequence
        self._words_known: set[tuple[str, ...]] = set()  # ranks often fail for one and the same reason
        self._said_too: list[tuple[int, tuple[str, ...]]] = []  # users' mistakes told while the run ended
        self._lost: list[RankDown] = []  # no view without them yet
        self._repaired: list[RankDown] = []  # no step since; both are bounded by the restarts allowed
        self._step: int | None = None
        self._finished: set[int] = set()  # ranks that ended normally while the run went on
        self._missing = ""  # the first operation that waited for a rank in vain

    async def observe(self, event: HostEvent) -> None:
        """Take one event."""
        note_death(event)
        if self._record is not None and not isinstance(event, RankDown):
            self._record.take(event)
        match event:
            case RankDown():
                await self._down(event)
            case ViewChanged():
                await self._view_changed(event)
            case RankReport():
                if event.payload.get("kind") == "step" and isinstance(event.payload.get("version"), int):
                    await self._committed(event.payload)
                elif event.payload.get("kind") == "missing":
                    self._missing = (
                        self._missing or str(event.payload.get("text", ""))[:MISSING_CHARACTERS_MAX]
                    )
            case HangNotice():
                await self._hung(event)
            case RankStarted(was_spare=True):
                words = f"rank {event.rank} is now the spare, pid {event.pid}"
                await self._console.note(f"{words} (incarnation {event.incarnation})")
            case SpareReady():
                await self._console.note(f"a spare rank waits (pid {event.pid})")
            case SpareLost():
                await self._spare_lost(event)
            case RankStarted():
                pass

    async def failed(self, result: RunResult) -> None:
        """Report how the run failed; the final report."""
        users_own = self._first is not None and _is_users_own(*self._first)
        for rank, words in self._said_too:
            if not users_own:  # all ranks were asked for the same: one paragraph on it is enough
                await self._console.rank_lines(rank, words)
        await self._console.note(self._describe_end(result))

    def _describe_end(self, result: RunResult) -> str:
        """Describe how a run failed: its first failure, and what to do."""
        if self._first is None:
            return f"the run failed: {_sentence(result.reason)}"
        first, words = self._first
        if _is_users_own(first, words):
            return f"rank {first.rank} cannot go on, and so the run ends: {_sentence(words[-1])}"
        text, cause = f"the run failed: {_sentence(result.reason)}", _cause(first, words)
        if not first.no_memory or cause not in result.reason:
            text += f" The first failure was rank {first.rank}'s: {_sentence(cause)}"
        if (advice := _advice(first, words)) and advice not in text:
            text += f" {advice}"
        text += self._describe_missing(first, text)
        more = len(result.failures) - 1
        if more:
            text += f" {more} more came with it or after it."
        if result.last_records is not None:
            text += f" See what went before: zbmd replay --show {result.last_records}."
        return text

    def _describe_missing(self, first: RankDown, told: str) -> str:
        """Return which ranks had ended before the first failure, and what waited for them."""
        if self._missing:
            return "" if self._missing in told else f" Before that: {_sentence(self._missing)}"
        gone = sorted(self._finished)
        if not gone or first.code < 0:
            return ""
        names = ", ".join(str(rank) for rank in gone[:FINISHED_NAMED_MAX])
        more = f" and {len(gone) - FINISHED_NAMED_MAX} more" if len(gone) > FINISHED_NAMED_MAX else ""
        ranks, them = ("rank", "it") if len(gone) == 1 else ("ranks", "them")
        return f" By then {ranks} {names}{more} had finished: operations that need {them} fail."

    async def _down(self, down: RankDown) -> None:
        if down.normal and down.next_step != RUN_ENDS:
            self._finished.add(down.rank)
        words = self._console.take_last_words(down.rank, down.incarnation)
        if self._record is not None:
            self._record.take(down, words)
        if down.expected and len(words) == 1:  # a paragraph, whatever ended it before it could exit
            self._said_too.append((down.rank, words))
            return
        told_at_the_end = False
        if not down.expected and (self._first is None or _is_consequence(self._first[1])):
            if self._first is None or not _is_consequence(words):
                self._first = (down, words)
            told_at_the_end = _is_users_own(down, words)
        if words not in self._words_known:
            if not told_at_the_end:
                await self._console.rank_lines(down.rank, words)
            if len(self._words_known) < LAST_WORDS_KNOWN_MAX:
                self._words_known.add(words)
        if down.expected:
            return
        if down.next_step != RUN_ENDS:
            await self._console.note(describe_failure(down, words))
        self._lost.append(down)

    async def _spare_lost(self, lost: SpareLost) -> None:
        words = self._console.take_last_words(SPARE_RANK, lost.number)
        await self._console.rank_lines(SPARE_RANK, words)
        said = words or lost.tail
        why = f"{lost.reason}: {said[-1]}" if said else lost.reason
        follows = (
            "no more spares are started, and lost ranks are forked (--max-restarts)"
            if lost.is_last
            else "another one is started"
        )
        await self._console.note(f"a spare rank (pid {lost.pid}) was lost: {why}; {follows}")

    async def _hung(self, notice: HangNotice) -> None:
        if notice.over:
            await self._console.note(notice.text)
            return
        stack = "".join(f"\n    {line}" for line in notice.stack)
        await self._console.note(f"no progress: {notice.text}; {notice.next_step}{stack}")

    async def _view_changed(self, event: ViewChanged) -> None:
        lost, self._lost, self._missing = self._lost, [], ""
        size = len(event.view.members)
        for down in lost:
            delay_ms = (event.at_ns - (down.noticed_ns or down.confirmed_ns)) / 1e6
            await self._console.note(
                f"rank {down.rank} {_how(down)}; {size} ranks together again (epoch {event.view.epoch}) "
                f"{delay_ms:.0f} ms after the notice"
            )
        if self._step is not None:
            self._repaired += lost

    async def _committed(self, report: dict[str, Any]) -> None:
        step = int(report["version"])
        repaired, self._repaired = self._repaired, []
        for down in repaired:
            before = step - 1 if self._step is None else self._step
            recovery = Recovery(
                rank=down.rank,
                how=_how(down),
                step=before + 1,
                recovery_ns=time.monotonic_ns() - (down.noticed_ns or down.confirmed_ns),
                step_after=step,
                steps_lost=max(0, before + 1 - step),
            )
            await self._console.recovery(recovery)
        self._step = step
        progress = Progress(
            step=step,
            loss=_number(report, "loss"),
            grad_norm=_number(report, "grad_norm"),
            memory_bytes=sum(resident_bytes(info.pid) for info in self._ranks().values()),
            tokens_per_s=_number(report, "tokens_per_s"),
            tflops=_number(report, "tflops"),
            mfu=_number(report, "mfu"),
        )
        total = report.get("steps_total")
        await self._console.progress(progress, steps_total=total if isinstance(total, int) else None)


def describe_failure(down: RankDown, words: tuple[str, ...]) -> str:
    """Who, what, and what next. `words`: what the rank said as it ended, most of it for all to see above."""
    who = f"rank {down.rank} (pid {down.pid}, incarnation {down.incarnation})"
    return f"{who} failed: {_cause(down, words)}; {down.next_step}"


def _cause(down: RankDown, words: tuple[str, ...]) -> str:
    """Return how it ended, and its exit reason."""
    said = words or (down.tail if down.code > 0 else ())
    return f"{down.reason}: {said[-1]}" if said else down.reason


def _is_users_own(down: RankDown, words: tuple[str, ...]) -> bool:
    """Whether its exit reason is a paragraph for its user, not a traceback."""
    return down.code == USAGE_EXIT_CODE and bool(words)


def _is_consequence(words: tuple[str, ...]) -> bool:
    """Whether the rank failed because another had: it may be reaped before the one that it is about."""
    return bool(words) and _CONSEQUENCE.match(words[-1]) is not None


def _advice(down: RankDown, words: tuple[str, ...]) -> str:
    if down.no_memory:
        return _sentence(MEMORY_ADVICE)
    if down.reason != describe_exit(down.code):
        return ""
    if down.code == -signal.SIGKILL:
        return "If nobody killed it, the kernel's out-of-memory killer may have: see dmesg."
    if down.code < 0:
        return "If nobody sent it that signal, native code crashed: PYTHONFAULTHANDLER=1 shows where."
    if words:
        return "Its traceback is above: mend the script, and start it again."
    return "It raised nothing but ended itself (sys.exit, os._exit): see what it printed."


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _how(down: RankDown) -> str:
    return f"was {down.reason}" if down.code < 0 else f"ended with {down.reason}"


def _number(report: dict[str, Any], name: str) -> float | None:
    """A field of a report that is a finite number; a job may send anything."""
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None
