"""A simulated rank as it meets others in a new epoch: what all hold, and what the files of dead ranks do."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from zbmd.actors.view import MemberId
from zbmd.training.job.results import StepResults
from zbmd.training.job.task import ResultRow
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import Cut, CutSource, HeldCut
from zbmd.training.redundancy.holdings import Held
from zbmd.training.redundancy.resizing import ResizingMirror, nothing_held
from zbmd.training.scenarios.grouped_process import GroupedProcess
from zbmd.training.scenarios.world import COPIES_AT, Bank, Cells, CommitWorld, RankFile

Holdings = zm.Held | HeldCut


class Met(NamedTuple):
    """The report of a rank in a new epoch, and where it lies."""

    held: Holdings
    banks: tuple[Bank, ...]


class MeetingProcess(GroupedProcess):
    """The part of a simulated rank that has its state, and reports it."""

    def __init__(self, world: CommitWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.cells = world.open(self.member)
        self.machine: zm.Mirror | None = None
        self.resizing: ResizingMirror | None = None
        """Of a state that is recut; `machine` is in it."""
        self.met: tuple[tuple[Bank, ...], ...] = ()
        """The memory of all that reported in this epoch, in their order."""
        self.orphans: tuple[Bank, ...] = ()
        """The files of dead ranks that this rank reported; see `FileRedundancy`."""
        self.results = StepResults(ResultRow(world.contents.shards, world.contents.samples), 0)

    @property
    def _mirror(self) -> zm.Mirror:
        assert self.machine is not None
        return self.machine

    @property
    def _kept(self) -> RankFile | None:
        """The memory that outlives this rank."""
        if self.world.options.resizes:
            return self.world.banks[self.member][0].file
        return self.world.files.get(self.member.rank)

    def _report(self, known: int) -> Generator[bool, None, list[Holdings]]:
        """Report what this rank holds; return what all do."""
        machine = self.resizing or self.machine
        report = nothing_held(known) if machine is None else machine.report(known)
        banks = self.world.banks.get(self.member, ())
        every = yield from self._together("meet", Met(report, banks), meeting=True)
        told = [one for one in every if isinstance(one, Met)]
        if self.world.options.leaves:
            told += yield from self._report_orphans(told)
        self.met = tuple(one.banks for one in told)
        return [one.held for one in told]

    def _report_orphans(self, told: Sequence[Met]) -> Generator[bool, None, list[Met]]:
        """Report what dead ranks left, on each host once; return that of all hosts. See `CutMeeting`."""
        world, everyone = self.world, self._everyone
        having = [member for member, one in zip(everyone, told, strict=True) if one.banks]
        here = [member for member in having if self._host(member) == self._host(self.member)]
        self.orphans = ()
        if here and self.member == min(here, key=lambda member: member.rank):
            used = {bank.name for one in told for bank in one.banks}
            self.orphans = tuple(bank for bank in world.folder(self.member) if bank.name not in used)
        for bank in self.orphans:
            self._learn_of(bank.file)
        every = yield from self._together("orphans", self.orphans, meeting=True)
        by_rank = sorted(zip(everyone, every, strict=True), key=lambda one: one[0].rank)
        found = [bank for _, banks in by_rank if isinstance(banks, tuple) for bank in banks]
        return [Met(_held_in(bank), (bank,)) for bank in found]

    def _host(self, member: MemberId) -> int:
        return self.world.options.host(member.rank)

    def _learn_of(self, file: RankFile | None) -> None:
        """Know of a predecessor's state what its last steps reported; see `Job._take_notes`."""
        if file is None:
            return
        for version, done in zip(file.stamps, file.notes, strict=True):
            if done is not None and done.version == version:
                self.results.keep(done)
        self.results.learn_records([file.record] if file.record else [])

    def _remove_orphans(self) -> None:
        """Delete files of dead ranks that nobody needs: a version is committed without them."""
        if not self.world.options.files:
            return  # memory of the dead is there until the end of the job
        made = self.world.banks[self.member][0].made if self.orphans else 0
        self.world.remove(self.member, [bank for bank in self.orphans if bank.made < made])
        self.orphans = ()

    def _located(self, found: CutSource) -> tuple[Cells, int]:
        """Return the cells that hold a part, and the one of them that does."""
        source = found.source
        cells = self.met[source.place][int(found.older)].cells
        return cells, source.slot + (0 if source.own else COPIES_AT)


def rows_in(every: Sequence[object]) -> list[list[float]]:
    """Return the numbers that members told."""
    return [one.tolist() for one in every if isinstance(one, np.ndarray)]


def _held_in(bank: Bank) -> HeldCut:
    """Return what the file of a rank that has ended holds: it knows nothing of what was committed."""
    assert bank.file is not None, "only files outlive their ranks"
    stamps = bank.file.stamps
    held = Held(own=(stamps[0], stamps[1]), known=0, copies=(None, None))
    return HeldCut(held=held, cut=Cut(made=bank.made, parts=bank.parts, part=bank.part))
