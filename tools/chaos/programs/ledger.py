"""The ledger of a sweep of kills: a line a kill, so that a sweep goes on where an earlier one was ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from zbmd.tools.chaos.programs.families import Kill
from zbmd.tools.chaos.programs.pool import KillOutcome
from zbmd.tools.chaos.sweep.ledger import KillLines


class KillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a kill, and what became of it. `again` is of the operation that the living then ran."""

    key: str
    died: bool
    ends: dict[str, int]
    again: dict[str, int]
    faults: list[str] = []


def entry_of(kill: Kill, outcome: KillOutcome, faults: list[str]) -> KillRecord:
    """The line of a kill."""
    return KillRecord(
        key=kill.key,
        died=outcome.died,
        ends=dict(Counter(_kind(end) for end in outcome.ends.values())),
        again=dict(Counter(_kind(end) for end in outcome.again.values())),
        faults=faults,
    )


def _kind(end: str) -> str:
    return end.partition(" [")[0]


_decoder: msgspec.json.Decoder[KillRecord] = msgspec.json.Decoder(KillRecord)


class Ledger:
    """The kills that have been tried, in memory and, with a path, in a file that grows with each.

    The latest line of a kill counts. Raises `UserError` if the file is not a ledger.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lines = KillLines(path, _decoder)
        self.entries = {entry.key: entry for entry in self._lines.found}

    def add(self, entry: KillRecord) -> None:
        """Note a kill."""
        self.entries[entry.key] = entry
        self._lines.add(entry)

    def has(self, kill: Kill) -> bool:
        """Whether this kill was tried and nothing was wrong."""
        entry = self.entries.get(kill.key)
        return entry is not None and not entry.faults

    def of(self, kills: Iterable[Kill]) -> list[KillRecord]:
        """What became of those of these kills that have been tried."""
        return [entry for kill in kills if (entry := self.entries.get(kill.key)) is not None]
