"""The JSON "Trace Event Format", which Perfetto (ui.perfetto.dev) and Chrome open: one writer for all traces.

Source: "Trace Event Format", Google, 2016. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from zbmd.transport.errors import UserError

TraceEvent = dict[str, Any]


class TraceEvents:
    """The events of a trace. A process has threads, each a track of slices that nest by their times."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def process(self, pid: int, name: str) -> None:
        """Name a process, which stands where its number says."""
        self._about("process_name", {"pid": pid}, {"name": name})
        self._about("process_sort_index", {"pid": pid}, {"sort_index": pid})

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a thread, which stands where its number says."""
        self._about("thread_name", {"pid": pid, "tid": tid}, {"name": name})
        self._about("thread_sort_index", {"pid": pid, "tid": tid}, {"sort_index": tid})

    def _about(self, what: str, which: Mapping[str, int], told: Mapping[str, Any]) -> None:
        self.events.append({"ph": "M", "name": what, **which, "args": told})

    def slice(
        self,
        pid: int,
        tid: int,
        name: str,
        begin_us: float,
        end_us: float,
        *,
        category: str = "",
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Something that took a time; one that ends before it begins took none."""
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin_us}
        event |= {"dur": max(0.0, end_us - begin_us), "args": told or {}}
        if category:
            event["cat"] = category
        self.events.append(event)

    def instant(self, pid: int, tid: int, name: str, at_us: float, told: Mapping[str, Any]) -> None:
        """Something that happened."""
        where = {"pid": pid, "tid": tid, "ts": at_us}
        self.events.append({"ph": "i", "s": "t", "name": name, "args": told, **where})

    def flow(
        self,
        number: int,
        name: str,
        begin: tuple[int, int, float],
        end: tuple[int, int, float],
        *,
        category: str,
    ) -> None:
        """An arrow from a slice to another, each found by (pid, tid, time)."""
        about = {"cat": category, "id": number, "name": name}
        for phase, (pid, tid, at_us) in (("s", begin), ("f", end)):
            event = {"ph": phase, **about, "pid": pid, "tid": tid, "ts": at_us}
            self.events.append(event | {"bp": "e"} if phase == "f" else event)

    def encode(self, written_by: str) -> bytes:
        """The file's content."""
        about = {"displayTimeUnit": "ns", "otherData": {"written by": written_by}}
        return msgspec.json.encode({**about, "traceEvents": self.events})


def write_trace_file(path: Path, data: bytes) -> None:
    """Write it. Raises `UserError`."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
