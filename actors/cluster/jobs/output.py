"""Output of the ranks on this node, the newest lines of each job, kept for clients that follow it.

Written on the process's loop, read on the cluster's thread. A client asks each node for new lines; it sees
which lines were dropped meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from zbmd.actors.process.output import OutputLine

LINES_MAX: Final = 10_000
"""Of a job, on this node."""
BYTES_MAX: Final = 4 << 20
JOBS_MAX: Final = 64
"""Jobs whose lines are kept; the one that was quiet the longest goes for one more."""
ANSWER_BYTES_MAX: Final = 256 << 10


@dataclass(slots=True)
class _Kept:
    lines: deque[OutputLine] = field(default_factory=deque[OutputLine])
    first: int = 0
    nbytes: int = 0


class JobOutput:
    """The `OutputSink` of all jobs of this node. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[int, _Kept] = OrderedDict()

    async def write_line(self, line: OutputLine) -> None:
        """See `OutputSink`; never waits."""
        self.add(line.job, line)

    def add(self, job: int, line: OutputLine) -> None:
        """Store a line."""
        with self._lock:
            kept = self._jobs.setdefault(job, _Kept())
            self._jobs.move_to_end(job)
            kept.lines.append(line)
            kept.nbytes += len(line.text)
            while len(kept.lines) > LINES_MAX or kept.nbytes > BYTES_MAX:
                kept.nbytes -= len(kept.lines.popleft().text)
                kept.first += 1
            while len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)

    def since(self, job: int, number: int) -> tuple[int, list[OutputLine]]:
        """Return the number of the first line, and lines from `number` on that fit into one reply."""
        with self._lock:
            kept = self._jobs.get(job)
            if kept is None:
                return 0, []
            first = max(number, kept.first)
            found: list[OutputLine] = []
            nbytes = 0
            for place in range(first - kept.first, len(kept.lines)):
                line = kept.lines[place]
                nbytes += len(line.text) + 32
                if nbytes > ANSWER_BYTES_MAX and found:
                    break
                found.append(line)
            return first, found
