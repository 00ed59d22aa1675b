"""Run ranks under a host to the end of their job, and keep what they report and print."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.process.output import OutputLine
from zbmd.transport.errors import UserError

LINES_KEPT: Final = 30


@dataclass(slots=True)
class RanksOutput:
    """Output and observer of a host.

    see: is given each event; reports: what ranks reported, and the lines of rank 0 that are JSON objects;
    lines: the last of the others.
    """

    see: Callable[[HostEvent], None] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=LINES_KEPT))

    async def write_line(self, line: OutputLine) -> None:
        """Keep a rank's line."""
        text = line.text.decode(errors="replace")
        if line.rank == 0 and text.startswith('{"'):
            with contextlib.suppress(ValueError):
                self.reports.append(json.loads(text))
                return
        self.lines.append(f"[rank{line.rank}]: {text}")

    async def __call__(self, event: HostEvent) -> None:
        """Keep a report."""
        if self.see is not None:
            self.see(event)
        if isinstance(event, RankReport):
            self.reports.append(event.payload)


async def run_ranks(config: HostConfig) -> list[dict[str, Any]]:
    """Run a job; return what its ranks reported. Raises `UserError` with their last lines if it fails."""
    output = RanksOutput()
    ended = await Host(config, output=output, observer=output).run()
    if ended.exit_code:
        raise UserError("\n".join([f"the ranks failed: {ended.reason}", *output.lines]))
    return output.reports
