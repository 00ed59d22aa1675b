"""The runs of a dashboard: their databases and answers, and which runs there are.

One thread at a time uses them; a run that a rank has just begun is found in what its launcher holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.dashboard.queries import QUESTIONS, timeline
from zbmd.tools.runs.goodput import goodput_of, read_runs
from zbmd.tools.runs.goodput_command import as_json
from zbmd.tools.runs.profile import read_rings, trace_of
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import Measure, RunMeasures
from zbmd.training.profiler.announcements import FILE_BYTES_MAX, RankLost, RunBegun, read_announcements
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, read_profiles
from zbmd.transport.errors import UserError

REFRESH_S: Final = 1.0
"""The database is brought up to date at most that often, and pages hear of it."""
SPANS_REFRESH_S: Final = 5.0
"""Spans are read again at most that often: they are 3.6 MB a rank."""
GOODPUT_BYTES_MAX: Final = 200 << 20
"""Of profiles, which goodput reads as a whole."""
RUNS_MAX: Final = 64
"""The first ones that are begun are shown."""


class ShownRun:
    """One run's database, which one thread at a time uses."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.version = 0
        """Grows with what is new."""
        self.problem = ""
        self._database = RunDatabase(directory)
        self._measures = RunMeasures(name, directory)
        self._updated_s = self._spans_s = -1e9
        self._answers: dict[tuple[Any, ...], tuple[int, bytes]] = {}

    def close(self) -> None:
        self._database.connection.close()

    def update(self, *, spans: bool = False) -> int:
        """Bring the database up to date, unless that was done just now; return the version."""
        now_s = time.monotonic()
        spans = spans and now_s - self._spans_s >= SPANS_REFRESH_S
        if spans or now_s - self._updated_s >= REFRESH_S:
            before = self._database.connection.total_changes
            try:
                self._database.update(spans=spans)
                self.problem = ""
            except UserError as error:  # a run that has just begun has written nothing
                self.problem = str(error)
            self.version += self._database.connection.total_changes != before
            self._updated_s = time.monotonic()
            self._spans_s = self._updated_s if spans else self._spans_s
        return self.version

    def answer(self, question: str, steps: tuple[int, int] | None) -> bytes:
        """Return the answer as JSON, computed once for each version."""
        version = self.update(spans=question in ("timeline", "slowest_ops"))
        key = (question, steps)
        known = self._answers.get(key)
        if known is not None and known[0] == version:
            return known[1]
        connection = self._database.connection
        if question == "timeline":
            found = timeline(connection, *(steps or (None, None)))
        elif question == "goodput":
            found = self._goodput()
        else:
            found = QUESTIONS[question](connection)
        data = msgspec.json.encode({**found, "version": version, "problem": self.problem})
        if len(self._answers) > 4 * len(QUESTIONS):
            self._answers.clear()  # time lines of many ranges of steps
        self._answers[key] = version, data
        return data

    def measures(self, causes: Mapping[tuple[int, int], str]) -> list[Measure]:
        """Return its metrics. causes: of deaths, by rank and incarnation."""
        self.update()
        return self._measures.collect(self._database.connection, causes)

    def _goodput(self) -> dict[str, Any]:
        paths = (self.directory / PROFILE_DIRECTORY).glob("rank*.jsonl*")
        if sum(path.stat().st_size for path in paths) > GOODPUT_BYTES_MAX:
            return {"missing": f"the profile is too large for a page: zbmd goodput {self.directory}"}
        try:
            return as_json(goodput_of(read_runs([self.directory])))
        except UserError as error:
            return {"missing": str(error)}

    def trace(self) -> bytes:
        """Return the latest spans as a trace for Perfetto. Raises `UserError`."""
        return trace_of(read_rings([self.directory]), read_profiles(self.directory))


class ShownRuns:
    """The runs in `directories`, and those that are announced in the file `announced`.

    Raises `UserError` for a directory that is no run.
    """

    def __init__(self, directories: Sequence[Path], announced: int | None = None) -> None:
        self.all: list[ShownRun] = []
        self.causes: dict[tuple[int, int], str] = {}
        """Of deaths, by rank and incarnation."""
        self.announced = announced
        try:
            for directory in directories:
                self._add(directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close their databases."""
        for run in self.all:
            run.close()

    def look(self) -> int:
        """Add the runs that have been announced; return how many there are now."""
        if self.announced is None:
            return len(self.all)
        for found in read_announcements(os.pread(self.announced, FILE_BYTES_MAX, 0)):
            match found:
                case RunBegun(directory=text) if len(self.all) < RUNS_MAX:
                    directory = Path(text)
                    if all(run.directory != directory for run in self.all) and directory.is_dir():
                        self._add(directory)
                case RankLost(rank=rank, incarnation=incarnation, cause=cause):
                    self.causes[rank, incarnation] = cause
                case _:
                    pass
        return len(self.all)

    def measures(self) -> list[Measure]:
        """Return the metrics of all."""
        self.look()
        return [one for run in self.all for one in run.measures(self.causes)]

    def _add(self, directory: Path) -> None:
        name = directory.name or str(directory)
        known = {run.name for run in self.all}
        names = (name, str(directory), f"{directory}#{len(known)}")
        self.all.append(ShownRun(directory, next(one for one in names if one not in known)))
