"""State in a file that outlives its rank: the driver of the redundancy machine without replicas.

There is no buddy: the replacement of a killed rank, on the same host, opens its predecessor's file. All ranks
may therefore be killed at once, and one copy of the state is enough; but the files of a lost host are lost.

A state that is recut for each number of ranks has new files for each cut (`cut_meeting`); those of the cut
before, and of ranks that have ended, stay until a version is committed in the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.buddy import DIVIDE_POINT, FORGET_POINT, RESHARD_POINT, RESHARDED_POINT
from zbmd.training.redundancy.cut_events import (
    CutSource,
    Divide,
    EnteredCut,
    Keeps,
    Lend,
    Lent,
    Reshard,
    Resharded,
)
from zbmd.training.redundancy.cut_meeting import CutMeeting, name_of, row_of
from zbmd.training.redundancy.interface import Digests, RedundancyDriver, ResizableState, SegmentedState
from zbmd.training.redundancy.resizing import NEVER, ResizingMirror
from zbmd.training.redundancy.stamped import NO_VERSION, FoundState, Note, StampedSlots
from zbmd.training.redundancy.state_file import StateFile, found_in
from zbmd.training.step.step_hook import Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

STAMP_POINT = faults.declare("file.stamp", "when the next version is written, before it is stamped whole")
STAMPED_POINT = faults.declare("file.stamped", "when it is")


@dataclass(frozen=True, slots=True)
class OlderFile:
    """The file of the part as it was cut before, and the digests of its slots as they were read then."""

    file: StateFile
    digests: Sequence[int]


class FileRedundancy(RedundancyDriver):
    """`Redundancy` of what `own` holds, at `place` of `ranks`, by `file`, where its slots lie.

    `known`: the highest version known to be committed. `note`: returns what the file records of a completed
    step, for the case that all ranks are killed at once; `on_found`: is given files of ranks that have ended,
    with their notes. `resize`: if the state is recut for another number of ranks, makes it and its file for
    this rank's part; the file before is no longer its own.
    """

    def __init__(
        self,
        worker: Worker,
        own: SegmentedState,
        file: StateFile,
        *,
        place: int,
        ranks: int,
        known: int,
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
        note: Callable[[Any], Note],
        resize: Callable[[], tuple[ResizableState, StateFile]] | None = None,
        on_found: Callable[[StampedSlots], None] = lambda _: None,
    ) -> None:
        self._file, self._parted, self._note = file, own, note
        self._resize, self._on_found = resize, on_found
        self._older: OlderFile | None = None
        self._meeting: CutMeeting | None = None
        self._orphans: list[FoundState] = []
        for slot in range(zm.SLOTS):
            file.drop_damaged(slot, own.parts_in(slot))
        held = (file.version_in(0), file.version_in(1))
        machine: zm.Mirror | ResizingMirror
        if resize is None:
            machine = zm.Mirror(
                place=place, ranks=ranks, known=known, first=own.first, own=held, outlives=True
            )
        else:
            machine = ResizingMirror(place=place, ranks=ranks, known=known, first=own.first, outlives=True)
        super().__init__(worker, own, machine, outlives=True, on_update=on_update, on_commit=on_commit)
        self._worker = worker

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """See `Redundancy`. To this rank all shards differ."""
        self._group = group
        if self._resizing is not None:
            self._enter_cut(everyone or group, group.members, known)
            return self._machine.version
        held = self._machine.report(known)
        mine = [NO_VERSION if version is None else version for version in held.own]
        every = group.blocking.all_gather(np.array([*mine, held.known, held.first], np.int64))
        entered = zm.Entered(
            held=tuple(_held(row) for row in every.tolist()),
            hosts=hosts_of(group.view, group.members),
            place=group.rank,
        )
        self._perform(self._handle(entered))
        return self._machine.version

    def attend(self, everyone: Group, active: Sequence[int], known: int = 0) -> int:
        """See `Redundancy`."""
        assert self._resizing is not None, "a state that is cut for good is met for by those who train"
        self._enter_cut(everyone, active, known).serve(self._slot_of)
        return self._resizing.chosen

    def _enter_cut(self, everyone: Group, active: Sequence[int], known: int) -> CutMeeting:
        machine, older, file = self._resizing, self._older, self._file
        assert machine is not None
        elements = file.name.elements, 0 if older is None else older.file.name.elements
        folder, run = file.path.parent, file.name.run
        meeting = self._meeting = CutMeeting(
            everyone,
            active,
            row_of(machine.report(known), elements),
            known,
            lambda used, _living: [one for one in found_in(folder, run) if name_of(one) not in used],
            made=file.made,
        )
        for orphan in meeting.orphans:
            self._on_found(orphan)
        self._orphans = meeting.orphans
        hosts = hosts_of(everyone.view, active)
        entered = EnteredCut(
            held=meeting.held,
            beside=meeting.beside,
            hosts=hosts,
            place=meeting.place,
            epoch=everyone.epoch,
        )
        actions = self._handle(entered)
        if not any(isinstance(action, Divide) for action in actions) and machine.cut.made != NEVER:
            file.made = machine.cut.made
        self._perform(actions)
        self._meeting = None
        return meeting

    def _divide(self, work: Divide) -> None:
        faults.hit(DIVIDE_POINT)
        assert self._resize is not None, "the machine is one that recuts states"
        file = self._file
        if work.keeps is Keeps.OWN:
            self._forget()
            digests = [file.computed(self._parted.parts_in(slot)) for slot in range(zm.SLOTS)]
            self._older = OlderFile(file, digests)
        else:
            file.remove()
            if work.keeps is Keeps.NOTHING:
                self._forget()
        del self._own, self._parted, self._file, file  # and with them what is no state
        own, self._file = self._resize()
        self._own = self._parted = own

    def _reshard(self, work: Reshard) -> Resharded:
        faults.hit(RESHARD_POINT)
        own, file, slot, meeting = self._own, self._file, work.version % zm.SLOTS, self._meeting
        assert isinstance(own, ResizableState) and meeting is not None, "it is recut as its ranks meet"
        file.begin(slot)
        own.slots[slot][:] = 0
        meeting.read(work.sources, own.reshard(len(work.sources)), own.slots[slot], self._kept_slot)
        for part in own.parts_in(slot):
            file.wrote(part)
        file.written(slot, work.version)
        here = [found.source.slot for found in work.sources if found.source.place == meeting.place]
        faults.hit(RESHARDED_POINT)
        return Resharded(digest=file.digest_in(slot), given=tuple(self._kept.digests[one] for one in here))

    def _lend(self, work: Lend) -> Lent:
        def digest(found: CutSource) -> int:
            slot = found.source.slot
            if found.older:
                return self._kept.digests[slot]
            return self._file.computed(self._parted.parts_in(slot))

        return Lent(given=tuple(map(digest, work.sources)))

    @property
    def _kept(self) -> OlderFile:
        assert self._older is not None, "what is read here was kept"
        return self._older

    def _kept_slot(self, found: CutSource) -> Array:
        """Return a slot that is read of a rank that has a new file: what it had before is older now."""
        return self._kept.file.slots[found.source.slot]

    def _slot_of(self, found: CutSource) -> Array:
        """Return a slot that is read of a rank that waits."""
        return (self._kept.file if found.older else self._file).slots[found.source.slot]

    def _forget(self) -> None:
        older, self._older = self._older, None
        if older is not None:
            faults.hit(FORGET_POINT)
            older.file.remove()

    def epoch_over(self) -> None:
        """See `Redundancy`."""
        if self._machine.state is not zm.State.FAILED:
            self._handle(zm.EpochOver())

    def vote(self) -> Vote:
        """See `StepHook`."""
        digest = self._file.digest_in(self._own.slot)
        return self.asked.vote(digest, digest)

    def voted(self, votes: Sequence[Vote]) -> None:
        """See `StepHook`."""
        super().voted(votes)
        orphans, self._orphans = self._orphans, []
        for one in orphans:  # a version is committed without them
            if one.made < self._file.made:
                one.release()

    def _begin_slot(self, slot: int) -> None:
        self._file.begin(slot)

    def updated(self, done: Any) -> None:
        """See `StepHook`."""
        version = self._machine.version + 1
        faults.hit(STAMP_POINT)
        self._file.written(version % zm.SLOTS, version, self._note(done))
        faults.hit(STAMPED_POINT)
        super().updated(done)

    def _start_anew(self) -> None:
        first = self._parted.first
        slot = first % zm.SLOTS
        self._file.begin(slot)
        super()._start_anew()
        for part in self._parted.parts_in(slot):
            self._file.wrote(part)
        self._file.written(slot, first)

    def _keep(self, version: int) -> None:
        self._perform(self._handle(zm.AllHold(version=version)))

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        raise LocalProtocolError("state in files has no copies")

    def _start_copy(self, work: zm.CopyWard) -> None:
        raise LocalProtocolError("state in files has no copies")


def _held(row: Sequence[int]) -> zm.Held:
    """Return what a member reports. Raises `RemoteProtocolError`."""
    own = [None if version == NO_VERSION else int(version) for version in row[: zm.SLOTS]]
    known, first = row[zm.SLOTS :]
    if (
        any(v is not None and (v < 0 or v % zm.SLOTS != slot) for slot, v in enumerate(own))
        or not 0 <= first <= known
    ):
        raise RemoteProtocolError(f"a rank reports that it holds {row}, which are not versions by slot")
    return zm.Held(own=(own[0], own[1]), known=known, copies=(None, None), first=first)
