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

import numpy as np
import structlog
from numpy.typing import NDArray

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import (
    Cut,
    CutSource,
    Divide,
    EnteredCut,
    HeldCut,
    Keeps,
    Lend,
    Lent,
    Reshard,
    Resharded,
)
from zbmd.training.redundancy.failures import Cancellation, WorkCancelled
from zbmd.training.redundancy.holdings import SLOTS, Copy, Held
from zbmd.training.redundancy.interface import Digests, ProtectedState, RedundancyDriver, ResizableState
from zbmd.training.redundancy.pull import FETCH_ELEMENTS, pull
from zbmd.training.redundancy.resizing import ResizingMirror, nothing_held
from zbmd.training.redundancy.stamped import Note, StampedSlots, digest_of
from zbmd.training.step.step_hook import Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import now_ns

HANDLES: Final = 2 * SLOTS
"""The slots of the own shard, then those of copies."""
_HEAD: Final = 3 + SLOTS
_PER_COPY: Final = 3
_CUT: Final = 3
_CUT_AT: Final = _HEAD + _PER_COPY * SLOTS
_HANDLES_AT: Final = _CUT_AT + _CUT
_HALF: Final = _HANDLES_AT + 2 * HANDLES
ROW_NUMBERS: Final = 2 * _HALF
"""Both of the cut in use and of the older one."""
VERSION_MAX: Final = 1 << 40
_ADDRESS_MAX: Final = (1 << 63) - 1

Numbers = NDArray[np.uint64]

log: Final = structlog.stdlib.get_logger("zbmd.redundancy")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsRow:
    """The report of one rank. `handles`: where peers read its slots.

    cut: what `held` is of, if the state may be recut, and older: what the rank keeps of the cut before.
    """

    held: Held
    handles: tuple[RegionHandle, ...]
    cut: Cut | None = None
    older: HoldingsRow | None = None

    def encoded(self) -> Numbers:
        """Return (ROW_NUMBERS,): versions, wards and parts are incremented by one, 0 means none.

        So does a handle of no bytes, of a slot that a rank does not have.
        """
        numbers = self._half()
        if self.older is not None:
            numbers += self.older._half()
        numbers += [0] * (ROW_NUMBERS - len(numbers))
        return np.array(numbers, np.uint64)

    def _half(self) -> list[int]:
        held, cut = self.held, self.cut
        numbers = [0 if version is None else version + 1 for version in held.own]
        numbers += [held.known, held.first, held.digest]
        for copy in held.copies:
            numbers += [0, 0, 0] if copy is None else [copy.ward + 1, copy.version, copy.digest]
        numbers += [0, 0, 0] if cut is None else [cut.made, cut.parts, cut.part + 1]
        for handle in self.handles:
            numbers += [handle.offset, handle.nbytes]
        return numbers + [0] * (_HALF - len(numbers))

    @classmethod
    def decoded(cls, row: Numbers, slot: int, incarnation: int) -> HoldingsRow:
        """Return the report of the member in `slot`. Raises `RemoteProtocolError`: the numbers are a peer's.

        Handles are checked when they are opened.
        """
        numbers = [int(number) for number in row]
        if len(numbers) != ROW_NUMBERS:
            raise RemoteProtocolError(f"slot {slot} reports {len(numbers)} numbers, expected {ROW_NUMBERS}")
        now, older = numbers[:_HALF], numbers[_HALF:]
        kept = cls._of_half(older, slot, incarnation) if any(older) else None
        return replace(cls._of_half(now, slot, incarnation), older=kept)

    @classmethod
    def _of_half(cls, numbers: Sequence[int], slot: int, incarnation: int) -> HoldingsRow:
        own = [None if number == 0 else number - 1 for number in numbers[:SLOTS]]
        copies: list[Copy | None] = []
        for at in range(_HEAD, _CUT_AT, _PER_COPY):
            ward, version, digest = numbers[at : at + _PER_COPY]
            copies.append(None if ward == 0 else Copy(ward=ward - 1, version=version, digest=digest))
        said = [(place, version) for place, version in enumerate(own) if version is not None]
        said += [(place, copy.version) for place, copy in enumerate(copies) if copy is not None]
        known, first, digest = numbers[SLOTS:_HEAD]
        made, parts, part = numbers[_CUT_AT:_HANDLES_AT]
        if max(known, first) > VERSION_MAX or any(v > VERSION_MAX or v % SLOTS != at for at, v in said):
            raise RemoteProtocolError(f"slot {slot} reports impossible versions: {numbers}")
        if max(made, parts) > VERSION_MAX or part > parts:
            raise RemoteProtocolError(f"slot {slot} reports an impossible cut: {numbers}")
        places = numbers[_HANDLES_AT:]
        if max(places) > _ADDRESS_MAX:
            raise RemoteProtocolError(f"slot {slot} reports memory at impossible addresses: {places}")
        handles = tuple(
            RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=False)
            for offset, nbytes in zip(places[::2], places[1::2], strict=True)
        )
        held = Held(
            own=(own[0], own[1]), known=known, copies=(copies[0], copies[1]), first=first, digest=digest
        )
        cut = None if part == 0 else Cut(made=made, parts=parts, part=part - 1)
        return cls(held=held, handles=handles, cut=cut)

    def of_cut(self) -> HeldCut:
        """Return the report of a state that may be recut. Raises `RemoteProtocolError` for another."""
        if self.cut is None:
            raise RemoteProtocolError("a rank does not say how its state is cut")
        return HeldCut(
            held=self.held, cut=self.cut, older=None if self.older is None else self.older.of_cut()
        )


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


def attend_with_nothing(everyone: Group, _active: Sequence[int], known: int) -> None:
    """Attend as the members of a new epoch meet, as a rank that waits and has not held anything yet."""
    nothing = nothing_held(known)
    row = HoldingsRow(held=nothing.held, handles=(), cut=nothing.cut)
    everyone.blocking.all_gather(row.encoded())


@dataclass(frozen=True, slots=True)
class Bank:
    """The memory of one cut: two slots of the own shard, two for copies, and how peers name them.

    lengths: of the shards that were copied last.
    """

    slots: Sequence[Array]
    copies: Sequence[Array]
    handles: tuple[RegionHandle, ...]
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
            if version is not None:
                self.ready(array)
                found, stamped = digest_of(array), self.slots.digest_in(slot)
                if found != stamped:
                    self.slots.begin(slot)
                    log.warning(
                        "the state in memory is damaged, and is not used",
                        version=version,
                        digest=f"{found:016x}",
                        expected=f"{stamped:016x}",
                    )
        return self.slots.version_in(0), self.slots.version_in(1)

    def note_step(self, done: Any) -> None:
        """Keep the note of a step that is done."""
        note = self.step(done)
        self.slots.put_note(int(note[0]) % SLOTS, note)

    def note_record(self) -> None:
        """Keep the note of the version that has just been committed."""
        note = self.record()
        self.slots.put_record(int(note[0]) % SLOTS, note)


class BuddyReplica(RedundancyDriver):
    """`Redundancy` of what `own` holds at `place` of `ranks`: a replica at a buddy, or ranks of equal keys.

    `copies`: `SLOTS` arrays that peers can read, each large enough for the slot of any rank; none if nothing
    is copied. `replicas`: whether ranks with equal keys stand for each other (see `Mirror`). `known`: the
    highest version known to be committed.
    `kept`: where the slots of `own` lie, if that outlives this rank, so that its replacement has them.
    `resize`: if the state is recut for another number of ranks, makes the memory for this rank's part of
    it, and for copies, in the place of `own`; what it held is let go of, or read by peers for a while.
    `on_update`: called with each step whose update is done here; `on_commit`: with each version that is safe,
    and its digests.
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
        resize: Callable[[], tuple[ResizableState, Sequence[Array]]] | None = None,
    ) -> None:
        if len(copies) not in (0, zm.SLOTS):
            raise LocalProtocolError(f"expected {zm.SLOTS} slots for copies, or none, got {len(copies)}")
        self._kept, self._resize = kept, resize
        held = (None, None) if kept is None else kept.found()
        machine: zm.Mirror | ResizingMirror
        if resize is None:
            machine = self._machine_of(
                place=place, ranks=ranks, known=known, first=own.first, own=held, replicas=replicas
            )
        else:
            machine = ResizingMirror(place=place, ranks=ranks, known=known, first=own.first)
        super().__init__(worker, own, machine, outlives=False, on_update=on_update, on_commit=on_commit)
        self._worker = worker
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
        return Bank(list(own.slots), list(copies), handles)

    # ---- epochs

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """See `Redundancy`."""
        self._group, self._cancellation = group, Cancellation()
        hosts = hosts_of(group.view, group.members)
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
        self._cancellation = Cancellation()
        self._enter_cut(everyone, active, hosts_of(everyone.view, active), known)
        return self._resizing.chosen

    def _enter_cut(self, group: Group, active: Sequence[int], hosts: tuple[int, ...], known: int) -> None:
        self._share_holdings(group, active, known)
        cuts, ranks = tuple(row.of_cut() for row in self._rows), len(active)
        entered = EnteredCut(
            held=cuts[:ranks],
            beside=cuts[ranks:],
            hosts=hosts,
            place=self._reporting.index(self._worker.rank),
            epoch=group.epoch,
        )
        self._perform(self._handle(entered))

    def _share_holdings(self, group: Group, first: Sequence[int], known: int) -> None:
        """Share what all members of the group hold; they are put in order with `first` before the others."""
        row = HoldingsRow(held=self._machine.report(known), handles=self._bank.handles)
        if self._resizing is not None:
            row = replace(row, cut=self._resizing.cut)
            kept, bank = self._resizing.older, self._older
            if kept is not None and bank is not None:
                row = replace(row, older=HoldingsRow(held=kept.held, handles=bank.handles, cut=kept.cut))
        every = group.blocking.all_gather(row.encoded()).reshape(group.size, ROW_NUMBERS)
        rows = dict(zip(group.members, every, strict=True))
        self._reporting = [*first, *(rank for rank in group.members if rank not in first)]
        self._rows = [HoldingsRow.decoded(rows[rank], *self._whose(rank)) for rank in self._reporting]

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
        self._stamp(self._machine.version, own)
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
        """See `StepHook`. The update that follows a vote overwrites the slot before: it is incomplete."""
        super().voted(votes)
        if self._kept is not None:
            self._kept.note_record()
            if not self.applies_first:
                self._kept.slots.begin((self._machine.version + 1) % zm.SLOTS)

    def begin_step(self) -> None:
        """See `Redundancy`. Among replicas the other slot is written before the next vote."""
        if self._kept is not None and self.applies_first:
            self._kept.slots.begin((self._machine.version + 1) % zm.SLOTS)

    def _start_anew(self) -> None:
        if self._kept is not None:
            self._kept.slots.begin(self._own.first % zm.SLOTS)
        super()._start_anew()

    def _start_copy(self, work: zm.CopyWard) -> None:
        self._under_way = self._pool.submit(self._copy, work)

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        faults.hit(RESTORE_POINT)
        into = self._own.slots[version % zm.SLOTS]
        if self._kept is not None:
            self._kept.slots.begin(version % zm.SLOTS)
        handle = self._rows[source.place].handles[source.slot + (0 if source.own else zm.SLOTS)]
        self._pull(source.place, handle, into, middle=RESTORE_MIDDLE_POINT)
        faults.hit(RESTORED_POINT)
        return zm.Restored(digest=digest_of(into))

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
        own, copies = self._resize()
        self._own, self._bank = own, self._banked(own, copies)

    def _forget(self) -> None:
        older, self._older = self._older, None
        if older is not None:
            faults.hit(FORGET_POINT)
            self._release(older)

    def _release(self, bank: Bank) -> None:
        for handle in bank.handles:
            self._worker.segment.regions.release(handle)

    def _reshard(self, work: Reshard) -> Resharded:
        faults.hit(RESHARD_POINT)
        own, older, arena = self._own, self._older, self._worker.segment.arena
        assert isinstance(own, ResizableState) and self._group is not None
        into, here = own.slots[work.version % SLOTS], self._group.rank
        arena.ready(into)
        into[:] = 0
        elements, spans = own.reshard(len(work.sources))
        for number, (part, start, count, at) in enumerate(spans):
            found, room = work.sources[part], into[at : at + count]
            if found.source.place == here:
                assert older is not None, "what is read here was kept"
                room[:] = older.array(found.source)[start : start + count]
            else:
                self._read(found, elements, start, room)
            if number == len(spans) // 2:
                faults.hit(RESHARD_MIDDLE_POINT)
        given = [found.source for found in work.sources if found.source.place == here]
        digests = tuple(digest_of(older.array(source)) for source in given if older is not None)
        faults.hit(RESHARDED_POINT)
        return Resharded(digest=digest_of(into), given=digests)

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
            copied = digest_of(into)
        own = digest_of(self._own.slots[self._own.slot])
        self.busy_ns += now_ns() - began_ns
        return own, copied

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
