"""The reports of the members of a new epoch of a state that is recut, and of what dead ranks left.

A rank that has ended may have left its state in a file, or in memory that its launcher and the snapshot
process of its host keep. Nobody reads that on another host. So on each host the lowest rank reports what no
living rank has in use there, each rank reports what its own predecessor has left, and the parts that are
needed are sent to all, one after the other, by the rank that reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy.cut_events import Cut, CutSource, HeldCut, Resharding
from zbmd.training.redundancy.holdings import SLOTS, Held
from zbmd.training.redundancy.holdings_row import ROW_NUMBERS, HoldingsRow
from zbmd.training.redundancy.resizing import CutChoice, choose_cut, nothing_held
from zbmd.training.redundancy.stamped import FoundState
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

SENT_ELEMENTS: Final = 1 << 20
"""Float32 numbers of a part that are sent at once."""
Name = tuple[int, int, int]
"""A file by the epoch in which they were made, their place and number of ranks."""


Found = Callable[[set[Name], Collection[int]], Sequence[FoundState]]
"""Returns what dead ranks have left on this host, given the names in use, and the living ranks."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What `rank` reports. left: by one that has ended; None for its own holdings."""

    rank: int
    row: HoldingsRow
    left: FoundState | None = None
    is_own: bool = True


class CutMeeting:
    """Collects the reports of all holdings as the `active` members of `everyone` meet; for one epoch.

    mine: what this rank holds; None for a rank that waits and holds nothing. made: the epoch of its part.
    found: returns what dead ranks have left on this host; left: by this rank's predecessor. direct: whether
    what living ranks hold is read in their memory, and not sent. All of `everyone` make it together.
    """

    def __init__(
        self,
        everyone: Group,
        active: Sequence[int],
        mine: HoldingsRow | None,
        known: int,
        found: Found,
        *,
        made: int = 0,
        left: Sequence[FoundState] = (),
        direct: bool = False,
        whose: Callable[[int], tuple[int, int]] = lambda rank: (rank, 0),
    ) -> None:
        self._everyone, self._ranks, self._direct, self._whose = everyone, len(active), direct, whose
        me = everyone.members[everyone.rank]
        row = row_of(nothing_held(known), (0, 0)) if mine is None else mine
        said = everyone.blocking.all_gather(np.array([*row.encoded(), mine is not None, made], np.uint64))
        said = said.reshape(everyone.size, ROW_NUMBERS + 2)
        rows = {
            rank: HoldingsRow.decoded(one[:ROW_NUMBERS], *whose(rank))
            for rank, one in zip(everyone.members, said, strict=True)
        }
        hosts = dict(zip(everyone.members, hosts_of(everyone.view, everyone.members), strict=True))
        mades = {rank: int(one[-1]) for rank, one in zip(everyone.members, said, strict=True) if one[-2]}
        here = [rank for rank in mades if hosts[rank] == hosts[me]]
        self.orphans: list[FoundState] = list(left)
        """States that dead ranks left on this host, if this rank reports them."""
        if me in mades and me == min(here):
            used = set[Name]().union(*(_names_in(rows[rank], made) for rank, made in mades.items()))
            self.orphans += found(used, everyone.members)
        beside = [rank for rank in everyone.members if rank not in active]
        self.reported = [Reported(rank, rows[rank]) for rank in (*active, *beside)]
        self._living = len(self.reported)
        self.reported += self._reported_orphans(me)
        self._me = me

    def _reported_orphans(self, me: int) -> list[Reported]:
        everyone, blocking = self._everyone, self._everyone.blocking
        counts = blocking.all_gather(np.array([len(self.orphans)], np.int64)).reshape(-1).tolist()
        most, found = max(counts), list[Reported]()
        if most == 0:
            return found
        mine = np.zeros((most, ROW_NUMBERS), np.uint64)
        for at, one in enumerate(self.orphans):
            mine[at] = row_of(_held_in(one), (one.name.elements, 0)).encoded()
        every = blocking.all_gather(mine).reshape(everyone.size, most, ROW_NUMBERS)
        for rank, count, rows in zip(everyone.members, counts, every, strict=True):
            left: Sequence[FoundState | None] = self.orphans if rank == me else [None] * int(count)
            found += [
                Reported(rank, HoldingsRow.decoded(row, *self._whose(rank)), one, is_own=False)
                for row, one in zip(rows[: int(count)], left, strict=True)
            ]
        return found

    @property
    def held(self) -> tuple[HeldCut, ...]:
        """The reports of the active members, in their order."""
        return tuple(one.row.of_cut() for one in self.reported[: self._ranks])

    @property
    def beside(self) -> tuple[HeldCut, ...]:
        """The reports of ranks that wait, and of what dead ranks have left."""
        return tuple(one.row.of_cut() for one in self.reported[self._ranks :])

    @property
    def place(self) -> int:
        """The place of this rank among those that report."""
        return next(place for place, one in enumerate(self.reported) if one.rank == self._me and one.is_own)

    def serve(self, own: Callable[[CutSource], Array]) -> None:
        """Send what others read here, as a rank that waits, and take nothing. own: as of `read`."""
        choice = choose_cut(self.held, epoch=self._everyone.epoch, beside=self.beside)
        if isinstance(choice, CutChoice) and choice.parts:
            self.read(choice.parts, None, np.zeros(0, np.float32), own)

    def is_sent(self, found: CutSource) -> bool:
        """Whether a part is sent to all by `read`, and not to be read in a living rank's memory."""
        return not self._direct or found.source.place >= self._living

    def read(
        self,
        sources: Sequence[CutSource],
        wanted: Resharding | None,
        into: Array,
        own: Callable[[CutSource], Array],
    ) -> None:
        """Fill `into` with what is `wanted` of the parts in `sources` that are sent. own: returns a slot of
        this rank.

        All together. Raises `RemoteProtocolError` for a part of another length, and as the group does.
        """
        if not any(map(self.is_sent, sources)):
            return
        spans, blocking = () if wanted is None else wanted.spans, self._everyone.blocking
        needed = np.zeros(len(sources), np.int64)
        needed[[span.part for span in spans]] = 1
        every = blocking.all_gather(needed).reshape(-1, len(sources)).any(axis=0)
        for part in np.flatnonzero(every).tolist():
            found = sources[part]
            if not self.is_sent(found):
                continue
            reported = self.reported[found.source.place]
            row = reported.row.older if found.older else reported.row
            assert row is not None, "what was chosen is what its rank reported"
            length = row.handles[found.source.slot].nbytes // 4
            if needed[part] and wanted is not None and length != wanted.elements:
                raise RemoteProtocolError(
                    f"rank {reported.rank} reports {length} numbers of a part of {wanted.elements}"
                )
            slot = None
            if reported.rank == self._me:
                slot = own(found) if reported.left is None else reported.left.slots[found.source.slot]
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


def attend_with_nothing(everyone: Group, active: Sequence[int], known: int, *, files: bool) -> None:
    """Attend as the members of a new epoch meet, as a rank that waits and has not held anything yet.

    files: whether states are in files.
    """
    meeting = CutMeeting(everyone, active, None, known, lambda _used, _ranks: (), direct=not files)
    meeting.serve(_nothing)


def _nothing(found: CutSource) -> Array:
    raise LocalProtocolError(f"{found}: this rank holds nothing")


def _held_in(one: FoundState) -> HeldCut:
    """Return what a rank that has ended has left: it knows nothing of what was committed."""
    held = Held(own=(one.version_in(0), one.version_in(1)), known=0, copies=(None, None))
    return HeldCut(held=held, cut=Cut(made=one.made, parts=one.name.ranks, part=one.name.place))


def row_of(held: HeldCut, elements: tuple[int, int]) -> HoldingsRow:
    """Return the report of holdings that are sent. elements: of a slot, and of one of the older cut."""

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


def name_of(one: FoundState) -> Name:
    """Return the name of what a rank has left."""
    return one.made, one.name.place, one.name.ranks
