"""Watch a run of the demo: steps, the planned kill, its detection and its recovery."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zbmd.actors.cluster.jobs.reports import HostEvent, RankInfo, RankReport
from zbmd.tools.cli.console import Console, Progress, Recovery
from zbmd.tools.runs.result import Death

RECENT_STEPS = 20
"""The step time by which a kill is placed is the median of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    """Kill `rank` once `step` is committed, `fraction` of a step's time later."""

    rank: int
    step: int
    fraction: float


@dataclass(slots=True)
class Kill:
    """A kill that was dealt. Times are CLOCK_MONOTONIC, ns."""

    rank: int
    incarnation: int
    step: int
    epoch: int
    at_ns: int
    survivors: int
    notices_ns: list[int] = field(default_factory=list[int])
    recovered_ns: int | None = None
    step_after: int | None = None

    def detection_ms(self) -> float | None:
        """From the kill until the last survivor had noticed; None if one has not said so."""
        if len(self.notices_ns) < self.survivors:
            return None
        return (max(self.notices_ns) - self.at_ns) / 1e6

    def recovery_ms(self) -> float | None:
        """From the kill to the next step committed by the repaired group."""
        return None if self.recovered_ns is None else (self.recovered_ns - self.at_ns) / 1e6

    def death(self) -> Death:
        """Return the entry of `result.json`."""
        return Death(
            rank=self.rank,
            incarnation=self.incarnation,
            step=self.step,
            epoch=self.epoch,
            detection_ms=self.detection_ms(),
            recovery_ms=self.recovery_ms(),
        )


class Watch:
    """An observer of a host: shows progress, deals the planned kills, and keeps what the demo reports.

    `tokens_per_step` and `flops_per_step` are the job's. Set `ranks`, which gives the host's ranks as they
    are now, before the host runs.
    """

    ranks: Callable[[], dict[int, RankInfo]]

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        plans: tuple[KillPlan, ...] = (),
    ) -> None:
        self.kills: list[Kill] = []
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.result: dict[str, Any] | None = None
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._plans = list(plans)
        self._commits: list[tuple[int, int]] = []
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)

    async def __call__(self, event: HostEvent) -> None:
        """Take one event of the host."""
        if not isinstance(event, RankReport):
            return
        match event.payload.get("kind"):
            case "step":
                await self._step(event.payload)
            case "lost":
                self._lost(event.payload)
            case "result":
                self.result = event.payload
            case _:
                pass  # a report for other watchers

    def tokens_per_second(self) -> float:
        """Tokens over the whole run, recoveries included."""
        (first, began_ns), (last, ended_ns) = self._commits[0], self._commits[-1]
        return (last - first) * self._tokens_per_step / ((ended_ns - began_ns) / 1e9)

    async def _step(self, report: dict[str, Any]) -> None:
        version, at_ns = int(report["version"]), int(report["at_ns"])
        self.loss_last = float(report["loss"])
        if self.loss_first is None:
            self.loss_first = self.loss_last
        if self._commits:
            self._recent_s.append((at_ns - self._commits[-1][1]) / 1e9)
        self._commits.append((version, at_ns))
        for kill in self.kills:
            if kill.recovered_ns is None and int(report["epoch"]) > kill.epoch:
                kill.recovered_ns, kill.step_after = at_ns, version
                await self._console.recovery(_told(kill))
        await self._show(version, report)
        if self._plans and version >= self._plans[0].step and self._recent_s:
            plan = self._plans.pop(0)
            delay_s = plan.fraction * statistics.median(self._recent_s)
            epoch = int(report["epoch"])
            asyncio.get_running_loop().call_later(delay_s, self._kill, plan, epoch)

    async def _show(self, version: int, report: dict[str, Any]) -> None:
        if report.get("held_out_loss") is not None:
            await self._console.note(f"held-out loss {report['held_out_loss']:.3f} nats/byte")
        per_step_s = statistics.median(self._recent_s) if self._recent_s else None
        progress = Progress(
            step=version,
            loss=self.loss_last,
            grad_norm=float(report["grad_norm"]),
            memory_bytes=sum(_resident_bytes(info.pid) for info in self.ranks().values()),
            tokens_per_s=self._tokens_per_step / per_step_s if per_step_s else None,
            tflops=self._flops_per_step / per_step_s / 1e12 if per_step_s else None,
        )
        await self._console.progress(progress, steps_total=self._steps)

    def _kill(self, plan: KillPlan, epoch: int) -> None:
        victim = self.ranks()[plan.rank]
        survivors = sum(1 for info in self.ranks().values() if info.pid) - 1
        at_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        version = self._commits[-1][0]
        self.kills.append(Kill(plan.rank, victim.incarnation, version + 1, epoch, at_ns, survivors))

    def _lost(self, report: dict[str, Any]) -> None:
        for kill in self.kills:
            if (report["peer"], report["incarnation"]) == (kill.rank, kill.incarnation):
                kill.notices_ns.append(int(report["at_ns"]))


def _told(kill: Kill) -> Recovery:
    detection_ms, recovery_ms = kill.detection_ms(), kill.recovery_ms()
    return Recovery(
        rank=kill.rank,
        how="was killed (SIGKILL)",
        step=kill.step,
        detection_ns=None if detection_ms is None else round(detection_ms * 1e6),
        recovery_ns=None if recovery_ms is None else round(recovery_ms * 1e6),
        step_after=kill.step_after,
    )


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0
