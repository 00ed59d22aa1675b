"""What a node of a run over several says: of itself, of its ranks, and how the job ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

from zbmd.actors.cluster.state.job_table import Job
from zbmd.actors.host.events import HostEvent, RankDown, RankInfo, RankReport, RankStarted, RunResult
from zbmd.actors.view import Outcome, RankState
from zbmd.tools.cli.console import Console
from zbmd.tools.node.narration import Story

WAITING_MAX: Final = 8192
"""Events that are not told yet; past it, reports of ranks are dropped and counted."""
TOLD_S_MAX: Final = 1.0
"""A terminal that does not move is not waited for."""


class RunTeller:
    """Tells events in their order, without holding up whoever has them. Use within `telling`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ranks: dict[int, RankInfo] = {}
        self._story = Story(console, lambda: self._ranks)
        self._waiting: asyncio.Queue[HostEvent | str] = asyncio.Queue()
        self._failures: list[RankDown] = []
        self._dropped = 0

    def say(self, text: str) -> None:
        """A line of our own."""
        self._waiting.put_nowait(text)

    def happened(self, event: HostEvent) -> None:
        """Something happened to a rank of this node."""
        match event:
            case RankReport() if self._waiting.qsize() >= WAITING_MAX:
                self._dropped += 1
                return
            case RankStarted(rank=rank, incarnation=incarnation, pid=pid):
                self._ranks[rank] = RankInfo(
                    rank=rank, incarnation=incarnation, pid=pid, state=RankState.STARTING
                )
            case RankDown():
                self._ranks.pop(event.rank, None)
                if not event.expected:
                    self._failures.append(event)
            case _:
                pass
        self._waiting.put_nowait(event)

    @asynccontextmanager
    async def telling(self) -> AsyncGenerator[None]:
        """Tell what comes meanwhile."""
        task = asyncio.get_running_loop().create_task(self._tell(), name="run teller")
        try:
            yield
        finally:
            with suppress(TimeoutError):
                await self.told()
            task.cancel()
            await asyncio.wait([task])

    async def told(self) -> None:
        """Wait until all that came is told. Raises `TimeoutError`."""
        async with asyncio.timeout(TOLD_S_MAX):
            await self._waiting.join()

    async def over(self, job: Job) -> None:
        """How the job ended, if it has; the last thing to be told."""
        match job.outcome:
            case Outcome.FAILED:
                await self._story.failed(self._result(job))
            case Outcome.STOPPED:
                await self._console.note(f"stopped: {job.reason}")
            case _:
                return

    def _result(self, job: Job) -> RunResult:
        return RunResult(
            outcome=Outcome.FAILED,
            reason=job.reason,
            exit_code=job.exit_code,
            restarts=job.restarts_total,
            failures=tuple(self._failures),
            reports_dropped=self._dropped,
        )

    async def _tell(self) -> None:
        while True:  # until it is cancelled
            event = await self._waiting.get()
            try:
                if isinstance(event, str):
                    await self._console.note(event)
                else:
                    await self._story.observe(event)
            finally:
                self._waiting.task_done()
