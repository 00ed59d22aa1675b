"""What `zbmd-node run` tells of a job: failures, repaired views, and progress where the job reports it.

A job that gives `Node.report` the fields `kind` = "step", `version` (the step that is committed) and any of
`loss`, `grad_norm`, `tokens_per_s`, `tflops`, `mfu`, `steps_total` gets the progress line and bar, and each
loss the one line that says what it cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from zbmd.actors.host import resident_bytes
from zbmd.actors.host_events import HostEvent, RankDown, RankInfo, RankReport, RankStarted, ViewChanged
from zbmd.tools.console import Console
from zbmd.tools.progress import Progress, Recovery

TAIL_LINES_SHOWN = 12


class Story:
    """An observer of a host that puts its events into words. `ranks` gives the ranks as they are now."""

    def __init__(self, console: Console, ranks: Callable[[], dict[int, RankInfo]]) -> None:
        self._console = console
        self._ranks = ranks
        self._failures = 0
        self._lost: list[RankDown] = []  # no view without them yet
        self._repaired: list[RankDown] = []  # no step since; both are bounded by the restarts allowed
        self._step: int | None = None

    async def observe(self, event: HostEvent) -> None:
        """Take one event."""
        match event:
            case RankDown():
                if not event.expected:
                    await self._console.note(describe_failure(event, with_tail=self._failures == 0))
                    self._failures += 1
                    self._lost.append(event)
            case ViewChanged():
                await self._view_changed(event)
            case RankReport():
                if event.payload.get("kind") == "step" and isinstance(event.payload.get("version"), int):
                    await self._committed(event.payload)
            case RankStarted():
                pass

    async def _view_changed(self, event: ViewChanged) -> None:
        lost, self._lost = self._lost, []
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


def describe_failure(down: RankDown, *, with_tail: bool) -> str:
    """Who, what, and what next; the tail of its standard error only where it is news."""
    text = f"rank {down.rank} (pid {down.pid}, incarnation {down.incarnation}) failed: {down.reason}"
    tail = down.tail if down.code > 0 else ()
    if tail and not with_tail:
        text += f": {tail[-1]}"
    lines = [f"  | {line}" for line in tail[-TAIL_LINES_SHOWN:]] if with_tail else []
    return "\n".join([f"{text}; {down.next_step}", *lines])


def _how(down: RankDown) -> str:
    return f"was {down.reason}" if down.code < 0 else f"ended with {down.reason}"


def _number(report: dict[str, Any], name: str) -> float | None:
    """A field of a report that is a finite number; a job may send anything."""
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None
