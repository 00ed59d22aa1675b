"""The ledger of a sweep of kills: a line a kill, so that a sweep goes on where an earlier one was ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from zbmd.tools.kill_families import Kill
from zbmd.tools.kill_pool import Outcome
from zbmd.transport.errors import UserError


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a kill, and what became of it. `again` is of the operation that the living then ran."""

    key: str
    died: bool
    ends: dict[str, int]
    again: dict[str, int]
    faults: list[str] = []


def entry_of(kill: Kill, outcome: Outcome, faults: list[str]) -> Entry:
    """The line of a kill."""
    return Entry(
        key=kill.key,
        died=outcome.died,
        ends=dict(Counter(_kind(end) for end in outcome.ends.values())),
        again=dict(Counter(_kind(end) for end in outcome.again.values())),
        faults=faults,
    )


def _kind(end: str) -> str:
    return end.partition(" [")[0]


class Ledger:
    """The kills that have been tried, in memory and, with a path, in a file that grows with each.

    The latest line of a kill counts. Raises `UserError` if the file is not a ledger.
    """

    def __init__(self, path: Path | None) -> None:
        self.entries: dict[str, Entry] = {}
        self._file = None
        if path is None:
            return
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # the last line of a sweep that was killed may be half of one
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise UserError(f"{path}, line {number}, is not of a ledger of kills: {error}") from None
            self.entries[entry.key] = entry
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(whole))
        self._file.seek(len(whole))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, entry: Entry) -> None:
        """Note a kill."""
        self.entries[entry.key] = entry
        if self._file is not None:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            self._file.flush()

    def has(self, kill: Kill) -> bool:
        """Whether this kill was tried and nothing was wrong."""
        entry = self.entries.get(kill.key)
        return entry is not None and not entry.faults

    def of(self, kills: Iterable[Kill]) -> list[Entry]:
        """What became of those of these kills that have been tried."""
        return [entry for kill in kills if (entry := self.entries.get(kill.key)) is not None]
