"""Read a state in files that is recut, as the members of a new epoch meet. Files of dead ranks are read, too.

Nobody reads the folder of another host. So on each host the lowest rank reports the files that no living rank
has in use, beside what the ranks report; and the parts that are needed are sent to all, one after the other,
by the rank that has the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy.buddy import ROW_NUMBERS, HoldingsRow
from zbmd.training.redundancy.cut_events import Cut, CutSource, HeldCut, Resharding
from zbmd.training.redundancy.holdings import SLOTS, Held
from zbmd.training.redundancy.resizing import CutChoice, choose_cut, nothing_held
from zbmd.training.redundancy.state_file import FoundFile
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

SENT_ELEMENTS: Final = 1 << 20
"""Float32 numbers of a part that are sent at once."""
Name = tuple[int, int, int]
"""A file by the epoch in which they were made, their place and number of ranks."""


@dataclass(frozen=True, slots=True)
class _Reported:
    """What `rank` reports. file: of nobody that lives, in the folder of its host."""

    rank: int
    row: HoldingsRow
    file: FoundFile | None = None


class FileMeeting:
    """Collects the reports of all files as the `active` members of `everyone` meet; for one epoch.

    mine: what this rank holds, and elements: the length of its slots and of the older ones; None for a rank
    that waits and has no file. made: that of its file. found: returns the files in the folder of this host.
    All of `everyone` make it together.
    """

    def __init__(
        self,
        everyone: Group,
        active: Sequence[int],
        mine: HeldCut | None,
        elements: tuple[int, int],
        made: int,
        known: int,
        found: Callable[[], Sequence[FoundFile]],
    ) -> None:
        self._everyone, self._ranks = everyone, len(active)
        me = everyone.members[everyone.rank]
        row = _row_of(nothing_held(known) if mine is None else mine, elements)
        said = everyone.blocking.all_gather(np.array([*row.encoded(), mine is not None, made], np.uint64))
        said = said.reshape(everyone.size, ROW_NUMBERS + 2)
        rows = {
            rank: HoldingsRow.decoded(one[:ROW_NUMBERS], rank, 0)
            for rank, one in zip(everyone.members, said, strict=True)
        }
        hosts = dict(zip(everyone.members, hosts_of(everyone.view, everyone.members), strict=True))
        mades = {rank: int(one[-1]) for rank, one in zip(everyone.members, said, strict=True) if one[-2]}
        here = [rank for rank in mades if hosts[rank] == hosts[me]]
        self.orphans: list[FoundFile] = []
        """The files of this host that nobody has in use, if this rank reports them."""
        if me in mades and me == min(here):
            used = set[Name]().union(*(_names_in(rows[rank], made) for rank, made in mades.items()))
            self.orphans = [one for one in found() if _name_of(one) not in used]
        beside = [rank for rank in everyone.members if rank not in active]
        self._reported = [_Reported(rank, rows[rank]) for rank in (*active, *beside)]
        self._reported += self._reported_orphans(me)
        self._me = me

    def _reported_orphans(self, me: int) -> list[_Reported]:
        everyone, blocking = self._everyone, self._everyone.blocking
        counts = blocking.all_gather(np.array([len(self.orphans)], np.int64)).reshape(-1).tolist()
        most, found = max(counts), list[_Reported]()
        if most == 0:
            return found
        mine = np.zeros((most, ROW_NUMBERS), np.uint64)
        for at, one in enumerate(self.orphans):
            mine[at] = _row_of(_held_in(one), (one.name.elements, 0)).encoded()
        every = blocking.all_gather(mine).reshape(everyone.size, most, ROW_NUMBERS)
        for rank, count, rows in zip(everyone.members, counts, every, strict=True):
            files: Sequence[FoundFile | None] = self.orphans if rank == me else [None] * int(count)
            found += [
                _Reported(rank, HoldingsRow.decoded(row, rank, 0), file)
                for row, file in zip(rows[: int(count)], files, strict=True)
            ]
        return found

    @property
    def held(self) -> tuple[HeldCut, ...]:
        """The reports of the active members, in their order."""
        return tuple(one.row.of_cut() for one in self._reported[: self._ranks])

    @property
    def beside(self) -> tuple[HeldCut, ...]:
        """The reports of ranks that wait, and of files whose ranks have ended."""
        return tuple(one.row.of_cut() for one in self._reported[self._ranks :])

    @property
    def place(self) -> int:
        """The place of this rank among those that report."""
        return next(place for place, one in enumerate(self._reported) if one.rank == self._me)

    def serve(self, own: Callable[[CutSource], Array]) -> None:
        """Send what others read here, as a rank that waits, and take nothing. own: as of `read`."""
        choice = choose_cut(self.held, epoch=self._everyone.epoch, beside=self.beside)
        if isinstance(choice, CutChoice) and choice.parts:
            self.read(choice.parts, None, np.zeros(0, np.float32), own)

    def read(
        self,
        sources: Sequence[CutSource],
        wanted: Resharding | None,
        into: Array,
        own: Callable[[CutSource], Array],
    ) -> None:
        """Fill `into` with what is `wanted` of the parts in `sources`. own: returns a slot of this rank.

        All together. Raises `RemoteProtocolError` for a part of another length, and as the group does.
        """
        spans, blocking = () if wanted is None else wanted.spans, self._everyone.blocking
        needed = np.zeros(len(sources), np.int64)
        needed[[span.part for span in spans]] = 1
        every = blocking.all_gather(needed).reshape(-1, len(sources)).any(axis=0)
        for part in np.flatnonzero(every).tolist():
            found = sources[part]
            reported = self._reported[found.source.place]
            row = reported.row.older if found.older else reported.row
            assert row is not None, "what was chosen is what its rank reported"
            length = row.handles[found.source.slot].nbytes // 4
            if needed[part] and wanted is not None and length != wanted.elements:
                raise RemoteProtocolError(
                    f"rank {reported.rank} holds {length} numbers of a part of {wanted.elements}"
                )
            slot = None
            if reported.rank == self._me:
                slot = own(found) if reported.file is None else reported.file.slots[found.source.slot]
            root = self._everyone.members.index(reported.rank)
            for at in range(0, length, SENT_ELEMENTS):
                room = np.empty(min(SENT_ELEMENTS, length - at), np.float32)
                if slot is not None:
                    room[:] = slot[at : at + len(room)]
                blocking.broadcast(room, root)
                for span in spans:
                    start, stop = max(at, span.start), min(at + len(room), span.start + span.length)
                    if span.part == part and start < stop:
                        to = span.into + start - span.start
                        into[to : to + stop - start] = room[start - at : stop - at]


def attend_without_file(everyone: Group, active: Sequence[int], known: int) -> None:
    """Attend as the members of a new epoch meet, as a rank that waits and has no file."""
    FileMeeting(everyone, active, None, (0, 0), 0, known, lambda: ()).serve(_nothing)


def _nothing(found: CutSource) -> Array:
    raise LocalProtocolError(f"{found}: this rank has no file")


def _held_in(file: FoundFile) -> HeldCut:
    """Return what the file of a rank that has ended holds: it knows nothing of what was committed."""
    held = Held(own=(file.version_in(0), file.version_in(1)), known=0, copies=(None, None))
    return HeldCut(held=held, cut=Cut(made=file.made, parts=file.name.ranks, part=file.name.place))


def _row_of(held: HeldCut, elements: tuple[int, int]) -> HoldingsRow:
    def half(one: HeldCut, length: int) -> HoldingsRow:
        handle = RegionHandle(slot=0, incarnation=0, offset=0, nbytes=4 * length, writable=False)
        return HoldingsRow(held=one.held, handles=(handle,) * SLOTS, cut=one.cut)

    now, older = half(held, elements[0]), held.older
    if older is None:
        return now
    return HoldingsRow(held=now.held, handles=now.handles, cut=now.cut, older=half(older, elements[1]))


def _names_in(row: HoldingsRow, made: int) -> set[Name]:
    """Return the files that a rank has in use. made: that of the one of its own part."""
    held = row.of_cut()
    found = {(made, held.cut.part, held.cut.parts)}
    if held.older is not None:
        found.add((held.older.cut.made, held.older.cut.part, held.older.cut.parts))
    return found


def _name_of(file: FoundFile) -> Name:
    return file.made, file.name.place, file.name.ranks
