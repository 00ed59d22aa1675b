"""Replicas at a buddy rank: copy the ward's shard during the passes, pull the own shard after a loss.

A shard is what a rank alone holds (`ProtectedState`), under ZeRO and on a mesh alike.

Nothing is sent: the buddy reads its ward's shard where it lies, in the ward's arena (`RemoteRegion.get`), on
a thread of its own. The collectives that a step runs anyway tell it that every rank holds a version, and that
every copy is complete. The job uses the interface `Redundancy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy import machine as zm
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
from zbmd.training.redundancy.cut_meeting import CutMeeting
from zbmd.training.redundancy.failures import Cancellation, WorkCancelled
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.holdings_row import ROW_NUMBERS, HoldingsRow
from zbmd.training.redundancy.interface import (
    DeviceState,
    Digests,
    ProtectedState,
    RedundancyDriver,
    ResizableState,
)
from zbmd.training.redundancy.left_memory import left_by_dead, left_by_predecessor
from zbmd.training.redundancy.pull import FETCH_ELEMENTS, pull
from zbmd.training.redundancy.resizing import ResizingMirror
from zbmd.training.redundancy.stamped import FoundState, Note, StampedSlots, damage_logged, digest_of
from zbmd.training.step.step_hook import Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.redundancy")


COPIES: Final = 1 + zm.SLOTS
"""Shards for which a rank needs memory: its own last version, and two of its ward's."""


COPY_POINT = faults.declare("mirror.copy", "before a copy of the ward's shard")
COPY_MIDDLE_POINT = faults.declare("mirror.middle", "half-way through a copy of the ward's shard")
COPIED_POINT = faults.declare("mirror.copied", "when a copy is whole, before it is voted for")
RESTORE_POINT = faults.declare("mirror.restore", "before the own shard is pulled back")
RESTORE_MIDDLE_POINT = faults.declare("mirror.restore_middle", "half-way through that")
RESTORED_POINT = faults.declare("mirror.restored", "when the own shard is back")
DIVIDE_POINT = faults.declare("mirror.divide", "before memory is made for a part of a state that is recut")
RESHARD_POINT = faults.declare("mirror.reshard", "before that part is read out of those of the cut before")
RESHARD_MIDDLE_POINT = faults.declare("mirror.reshard_middle", "half-way through that")
RESHARDED_POINT = faults.declare("mirror.resharded", "when it is there, before the others know")
FORGET_POINT = faults.declare("mirror.forget", "when all parts have copies, before the older cut goes")


@dataclass(frozen=True, slots=True)
class Bank:
    """The memory of one cut: two slots of the own shard, two for copies, and how peers name them.

    lengths: of the shards that were copied last.
    """

    slots: Sequence[Array]
    copies: Sequence[Array]
    handles: tuple[RegionHandle, ...]
    release: Callable[[], None] = lambda: None
    """Gives the slots back, if they lie in memory that outlives this rank."""
    lengths: list[int] = field(default_factory=lambda: [0] * SLOTS)

    def array(self, source: zm.Source) -> Array:
        """Return what a source holds."""
        if source.own:
            return self.slots[source.slot]
        return self.copies[source.slot][: self.lengths[source.slot]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """Slots that outlive their rank, with what else is to be known of their versions.

    ready: returns once the pages of an array exist. step: the note of a step that is done, record: that of
    the last version that was committed.
    """

    slots: StampedSlots
    ready: Callable[[Array], None]
    step: Callable[[Any], Note]
    record: Callable[[], Note]

    def found(self) -> tuple[int | None, int | None]:
        """Return the versions that a predecessor has left whole, by slot; one that is damaged is named."""
        for slot, array in enumerate(self.slots.slots):
            version = self.slots.version_in(slot)
            self.slots.name_damage(slot)
            if version is not None:
                self.ready(array)
                found, stamped = digest_of(array), self.slots.digest_in(slot)
                if found != stamped:
                    self.slots.begin(slot)
                    damage_logged(version, found, stamped)
        return self.slots.version_in(0), self.slots.version_in(1)

    def note_step(self, done: Any) -> None:
        """Keep the note of a step that is done."""
        note = self.step(done)
        self.slots.put_note(int(note[0]) % SLOTS, note)

    def note_record(self) -> None:
        """Keep the note of the version that has just been committed."""
        note = self.record()
        self.slots.put_record(int(note[0]) % SLOTS, note)


def _not_sent(found: CutSource) -> Array:
    raise LocalProtocolError(f"{found}: what a living rank holds is read in its memory")


class BuddyReplica(RedundancyDriver):
    """`Redundancy` of what `own` holds at `place` of `ranks`: a replica at a buddy, or ranks of equal keys.

    A state on a device is voted for beside the step that follows it, also among replicas, by the digest of
    what the device holds.
    `copies`: `SLOTS` arrays that peers can read, each large enough for the slot of any rank; none if nothing
    is copied. `replicas`: whether ranks with equal keys stand for each other (see `Mirror`). `known`: the
    highest version known to be committed.
    `kept`: where the slots of `own` lie, if that outlives this rank, so that its replacement has them.
    `resize`: if the state is recut for another number of ranks, makes the memory for this rank's part of
    it, and for copies, in the place of `own`, and says whether it outlives this rank; what it held is let go
    of, or read by peers for a while. `on_found`: is given what dead ranks have left of such a state.
    `on_update`, `on_commit`: as of `RedundancyDriver`.
    """

    def __init__(
        self,
        worker: Worker,
        own: ProtectedState,
        *,
        place: int,
        ranks: int,
        copies: Sequence[Array],
        known: int,
        replicas: bool = False,
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
        kept: KeptState | None = None,
        resize: Callable[[], tuple[ResizableState, Sequence[Array], KeptState | None]] | None = None,
        on_found: Callable[[StampedSlots], None] = lambda _: None,
    ) -> None:
        if len(copies) not in (0, zm.SLOTS):
            raise LocalProtocolError(f"expected {zm.SLOTS} slots for copies, or none, got {len(copies)}")
        self._kept, self._resize = kept, resize
        held = (None, None) if kept is None else kept.found()
        machine: zm.Mirror | ResizingMirror
        if resize is None:
            machine = self._machine_of(
                place=place,
                ranks=ranks,
                known=known,
                first=own.first,
                own=held,
                replicas=replicas,
                beside=replicas and isinstance(own, DeviceState),
            )
        else:
            made = 0 if kept is None else kept.slots.made
            held = held if made else (None, None)
            machine = ResizingMirror(
                place=place, ranks=ranks, known=known, first=own.first, own=held, made=made
            )
        super().__init__(worker, own, machine, outlives=False, on_update=on_update, on_commit=on_commit)
        self._worker = worker
        self._digest = own.digest_of if isinstance(own, DeviceState) and resize is None else digest_of
        """Of what is voted for; stamps have `stamped.digest_of`."""
        self._bank = self._banked(own, copies)
        self._older: Bank | None = None
        """The memory of the cut before, while it counts."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-mirror")
        self._cancellation = Cancellation()
        self._under_way: Future[tuple[int, int | None]] | None = None
        self._rows: list[HoldingsRow] = []
        """The reports of `_reporting`."""
        self._reporting: list[int] = []
        """The members of the epoch, and then those that wait beside."""
        self._on_found = on_found
        self._meeting: CutMeeting | None = None
        self._orphans: Sequence[FoundState] = ()
        """States that dead ranks left, and this one reports."""
        self._predecessors: list[FoundState] | None = None
        """States that the process before this one left; None until they are looked for."""
        self._stamped = 0
        """The digest of the slot in use, for its stamp."""
        self.busy_ns = 0
        """Total duration of copies, in parallel to the passes."""
        self.waited_ns = 0
        """Total time that steps waited for copies."""

    def _machine_of(self, **arguments: Any) -> zm.Mirror:
        """Return the machine of a state that is cut for good."""
        return zm.Mirror(**arguments)

    def _banked(self, own: ProtectedState, copies: Sequence[Array]) -> Bank:
        register, shared = self._worker.segment.regions.register, (*own.slots, *copies)
        handles = () if self._worker.alone else tuple(register(array) for array in shared)
        release = (lambda: None) if self._kept is None else self._kept.slots.release
        return Bank(list(own.slots), list(copies), handles, release)

    # ---- epochs

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """See `Redundancy`."""
        self._group, self._cancellation = group, Cancellation()
        self._settle()
        hosts = group.view.domains(group.members)
        if self._resizing is None:
            self._share_holdings(group, group.members, known)
            held = tuple(row.held for row in self._rows)
            entered = zm.Entered(held=held, hosts=hosts, place=group.rank, keys=tuple(keys))
            self._perform(self._handle(entered))
            return self._machine.version
        self._enter_cut(everyone or group, group.members, hosts, known)
        self._share_holdings(group, group.members, known)  # memory may lie elsewhere; nobody reads any more
        return self._machine.version

    def attend(self, everyone: Group, active: Sequence[int], known: int = 0) -> int:
        """See `Redundancy`."""
        assert self._resizing is not None, "a state that is cut for good is met for by those who train"
        self._settle()
        self._cancellation = Cancellation()
        meeting = self._enter_cut(everyone, active, everyone.view.domains(active), known)
        meeting.serve(_not_sent)
        return self._resizing.chosen

    def _enter_cut(
        self, group: Group, active: Sequence[int], hosts: tuple[int, ...], known: int
    ) -> CutMeeting:
        machine = self._resizing
        assert machine is not None, "it is recut"
        known = max(known, self._machine.known)
        meeting = self._meeting = CutMeeting(
            group,
            active,
            self._row(known),
            known,
            lambda _used, living: () if self._kept is None else left_by_dead(self._worker, living, known),
            left=self._left_here(known),
            direct=True,
            whose=self._whose,
        )
        self._orphans = meeting.orphans
        for orphan in self._orphans:
            self._on_found(orphan)
        self._reporting = [one.rank for one in meeting.reported if one.left is None]
        self._rows = [one.row for one in meeting.reported]
        entered = EnteredCut(
            held=meeting.held, beside=meeting.beside, hosts=hosts, place=meeting.place, epoch=group.epoch
        )
        self._perform(self._handle(entered))
        if self._kept is not None:
            self._kept.slots.made = machine.cut.made
        self._meeting = None
        return meeting

    def _left_here(self, known: int) -> Sequence[FoundState]:
        """Return what the process before this one has left, found once, and what is left of that."""
        if self._predecessors is None:
            self._predecessors = [] if self._kept is None else left_by_predecessor(self._worker, known)
        return self._predecessors

    def _share_holdings(self, group: Group, first: Sequence[int], known: int) -> None:
        """Share what all members of the group hold; they are put in order with `first` before the others."""
        every = group.blocking.all_gather(self._row(known).encoded()).reshape(group.size, ROW_NUMBERS)
        rows = dict(zip(group.members, every, strict=True))
        self._reporting = [*first, *(rank for rank in group.members if rank not in first)]
        self._rows = [HoldingsRow.decoded(rows[rank], *self._whose(rank)) for rank in self._reporting]

    def _row(self, known: int) -> HoldingsRow:
        row = HoldingsRow(held=self._machine.report(known), handles=self._bank.handles)
        if self._resizing is not None:
            row = replace(row, cut=self._resizing.cut)
            kept, bank = self._resizing.older, self._older
            if kept is not None and bank is not None:
                row = replace(row, older=HoldingsRow(held=kept.held, handles=bank.handles, cut=kept.cut))
        return row

    def _whose(self, rank: int) -> tuple[int, int]:
        """Slot and incarnation of a member."""
        if rank == self._worker.rank:
            return self._worker.segment.slot, self._worker.segment.incarnation
        memory = self._worker.peers[rank].memory
        return memory.slot, memory.incarnation

    def epoch_over(self) -> None:
        """See `Redundancy`."""
        self._cancellation.cancel()
        if self._under_way is not None:
            self._end_copy(self._ended())
        if self._machine.state is not zm.State.FAILED:
            self._handle(zm.EpochOver())

    def close(self) -> None:
        """See `Redundancy`."""
        self._cancellation.cancel()
        self._pool.shutdown()
        super().close()

    # ---- steps

    def _keep(self, version: int) -> None:
        """Start to copy the ward's shard, unless its copy exists."""
        self._perform(self._handle(zm.AllHold(version=version)))
        if self._under_way is None:  # the copy is there from an epoch before
            self._under_way = self._pool.submit(self._copy, None)

    def vote(self) -> Vote:
        """See `StepHook`."""
        if self.applies_first:
            version = self._machine.version + 1
            own = digest_of(self._own.slots[version % zm.SLOTS])
            self._stamp(version, own)
            return self.asked.vote(own, 0)
        began_ns = now_ns()
        found = self._ended()
        self.waited_ns += now_ns() - began_ns
        self._end_copy(found)
        if found is None:
            raise PeerLost(self._ward_rank(), "its shard could not be copied")
        own, copied = found
        if copied is None:
            kept = self._machine.copies[self._machine.version % zm.SLOTS]
            copied = own if kept is None else kept.digest
        faults.hit(COPIED_POINT)
        self._stamp(self._machine.version, self._stamped)
        return self.asked.vote(own, copied)

    def _stamp(self, version: int, digest: int) -> None:
        """Mark what is voted for as whole."""
        if self._kept is not None:
            self._kept.slots.end(version % zm.SLOTS, version, digest)

    def updated(self, done: Any) -> None:
        """See `StepHook`."""
        if self._kept is not None:
            self._kept.note_step(done)
        super().updated(done)

    def voted(self, votes: Sequence[Vote]) -> None:
        """See `StepHook`."""
        super().voted(votes)
        if self._kept is not None:
            self._kept.note_record()
            if self._orphans:
                self._drop_orphans(self._kept.slots.made)

    def _drop_orphans(self, made: int) -> None:
        """Give back what dead ranks have left: a version is committed in a cut that was made later."""
        for one in self._orphans:
            if one.made < made:
                one.release()
        self._predecessors = [one for one in self._predecessors or () if one.made >= made]
        self._orphans = ()

    def _begin_slot(self, slot: int) -> None:
        if self._kept is not None:
            self._kept.slots.begin(slot)

    def _start_anew(self) -> None:
        self._begin_slot(self._own.first % zm.SLOTS)
        super()._start_anew()

    def _start_copy(self, work: zm.CopyWard) -> None:
        self._under_way = self._pool.submit(self._copy, work)

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        faults.hit(RESTORE_POINT)
        into = self._own.slots[version % zm.SLOTS]
        self._begin_slot(version % zm.SLOTS)
        handle = self._rows[source.place].handles[source.slot + (0 if source.own else zm.SLOTS)]
        self._pull(source.place, handle, into, middle=RESTORE_MIDDLE_POINT)
        faults.hit(RESTORED_POINT)
        return zm.Restored(digest=self._digest(into))

    def _divide(self, work: Divide) -> None:
        faults.hit(DIVIDE_POINT)
        assert self._resize is not None, "the machine is one that recuts states"
        if work.keeps is Keeps.OWN:
            self._forget()
            self._older = self._bank
        else:
            self._release(self._bank)
            if work.keeps is Keeps.NOTHING:
                self._forget()
        del self._own  # and with it what is no state
        self._bank = Bank((), (), ())
        own, copies, self._kept = self._resize()
        self._own, self._bank = own, self._banked(own, copies)

    def _forget(self) -> None:
        older, self._older = self._older, None
        if older is not None:
            faults.hit(FORGET_POINT)
            self._release(older)

    def _release(self, bank: Bank) -> None:
        for handle in bank.handles:
            self._worker.segment.regions.release(handle)
        bank.release()

    def _reshard(self, work: Reshard) -> Resharded:
        faults.hit(RESHARD_POINT)
        own, older, arena = self._own, self._older, self._worker.segment.arena
        assert isinstance(own, ResizableState) and self._group is not None
        into, here = own.slots[work.version % SLOTS], self._group.rank
        arena.ready(into)
        slot, meeting = work.version % SLOTS, self._meeting
        assert meeting is not None, "it is recut as its ranks meet"
        self._begin_slot(slot)
        into[:] = 0
        wanted = own.reshard(len(work.sources))
        meeting.read(work.sources, wanted, into, _not_sent)
        elements, spans = wanted
        for number, (part, start, count, at) in enumerate(spans):
            found, room = work.sources[part], into[at : at + count]
            if found.source.place == here:
                assert older is not None, "what is read here was kept"
                room[:] = older.array(found.source)[start : start + count]
            elif not meeting.is_sent(found):
                self._read(found, elements, start, room)
            if number == len(spans) // 2:
                faults.hit(RESHARD_MIDDLE_POINT)
        given = [found.source for found in work.sources if found.source.place == here]
        digests = tuple(digest_of(older.array(source)) for source in given if older is not None)
        digest = digest_of(into)
        self._stamp(work.version, digest)
        faults.hit(RESHARDED_POINT)
        return Resharded(digest=digest, given=digests)

    def _lend(self, work: Lend) -> Lent:
        banks = [self._older if found.older else self._bank for found in work.sources]
        assert all(bank is not None for bank in banks), "what is read here is here"
        pairs = zip(banks, work.sources, strict=True)
        return Lent(given=tuple(digest_of(bank.array(found.source)) for bank, found in pairs if bank))

    def _read(self, found: CutSource, elements: int, start: int, into: Array) -> None:
        """Fill `into` from element `start` of a slot of a peer, of the cut before."""
        source, rank = found.source, self._reporting[found.source.place]
        said = self._rows[source.place]
        row = said.older if found.older else said
        assert row is not None, "what was chosen is what its rank reported"
        handle = row.handles[source.slot + (0 if source.own else SLOTS)]
        peer = self._worker.peers.get(rank)
        if peer is None:
            raise PeerLost(rank, "it is no peer any more")
        if handle.nbytes < elements * into.itemsize:
            raise RemoteProtocolError(
                f"place {source.place} holds {handle.nbytes} bytes of a part of {elements * into.itemsize}"
            )
        region = peer.memory.open_region(handle, self._worker.segment)
        for at in range(0, len(into), FETCH_ELEMENTS):
            self._cancellation.check()
            offset = (start + at) * into.itemsize
            pull(region, peer.memory, into[at : at + FETCH_ELEMENTS], offset, self._cancellation, source=rank)

    def _copy(self, work: zm.CopyWard | None) -> tuple[int, int | None]:
        """Return the digests of the own shard and of the copy of the ward's, on the thread of the replica."""
        began_ns, copied = now_ns(), None
        if work is not None:
            faults.hit(COPY_POINT)
            handle = self._rows[work.ward].handles[work.version % zm.SLOTS]
            into = self._room(work, handle)
            self._pull(work.ward, handle, into, middle=COPY_MIDDLE_POINT)
            copied = self._digest(into)
        own = self._digest_of_own()
        self.busy_ns += now_ns() - began_ns
        return own, copied

    def _digest_of_own(self) -> int:
        """Return the digest to vote with, and keep that of the stamp."""
        own = self._own
        voted = own.digest_in_use() if isinstance(own, DeviceState) and self._resize is None else None
        self._settle()
        self._stamped = digest_of(own.slots[own.slot])
        return self._stamped if voted is None else voted

    def _room(self, work: zm.CopyWard, handle: RegionHandle) -> Array:
        """Return the destination of the copy, of the length of the original."""
        whole = self._bank.copies[work.slot]
        if handle.nbytes > whole.nbytes or handle.nbytes % whole.itemsize:
            raise RemoteProtocolError(
                f"place {work.ward} holds {handle.nbytes} bytes, more than can be copied"
            )
        self._bank.lengths[work.slot] = handle.nbytes // whole.itemsize
        return whole[: handle.nbytes // whole.itemsize]

    def _ended(self) -> tuple[int, int | None] | None:
        """Wait for the running copy; None if it was interrupted."""
        assert self._under_way is not None, "no copy is under way"
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.result()
        except (PeerLost, LinkClosed, WorkCancelled):
            return None

    def _end_copy(self, found: tuple[int, int | None] | None) -> None:
        if self._machine.state is zm.State.COPYING:
            self._perform(self._handle(zm.Copied(digest=None if found is None else found[1])))

    def _ward_rank(self) -> int:
        assert self._group is not None
        return self._group.members[self._machine.ward]

    def _pull(self, place: int, handle: RegionHandle, into: Array, *, middle: faults.Point) -> None:
        """Fill `into` from the memory of the rank at `place`."""
        assert self._group is not None
        rank = self._group.members[place]
        peer = self._worker.peers.get(rank)
        if peer is None:
            raise PeerLost(rank, "it is no peer any more")
        region, arena = peer.memory.open_region(handle, self._worker.segment), self._worker.segment.arena
        arena.want(into)
        for start in range(0, len(into), FETCH_ELEMENTS):
            self._cancellation.check()
            part = into[start : start + FETCH_ELEMENTS]
            arena.ready(part)
            pull(region, peer.memory, part, start * into.itemsize, self._cancellation, source=rank)
            if start <= len(into) // 2 < start + FETCH_ELEMENTS:
                faults.hit(middle)
