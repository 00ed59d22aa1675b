"""Replicas at a buddy rank: copy the ward's shard during the passes, pull the own shard after a loss.

A shard is what a rank alone holds (`ProtectedState`), under ZeRO and on a mesh alike.

Nothing is sent: the buddy reads its ward's shard where it lies, in the ward's arena (`RemoteRegion.get`), on
a thread of its own. The collectives that a step runs anyway tell it that every rank holds a version, and that
every copy is complete. The job uses the interface `Redundancy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.failures import Cancellation, WorkCancelled
from zbmd.training.redundancy.interface import Digests, ProtectedState, RedundancyDriver
from zbmd.training.redundancy.machine import SLOTS, Copy, Held
from zbmd.training.redundancy.pull import FETCH_ELEMENTS, pull
from zbmd.training.step.step_hook import Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import now_ns

HANDLES: Final = 2 * SLOTS
"""The slots of the own shard, then those of copies."""
_HEAD: Final = 3 + SLOTS
_PER_COPY: Final = 3
ROW_NUMBERS: Final = _HEAD + _PER_COPY * SLOTS + 2 * HANDLES
VERSION_MAX: Final = 1 << 40
_ADDRESS_MAX: Final = (1 << 63) - 1

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsRow:
    """The report of one rank. `handles`: where peers read its slots."""

    held: Held
    handles: tuple[RegionHandle, ...]

    def encoded(self) -> Numbers:
        """Return (ROW_NUMBERS,): versions and wards are incremented by one, 0 means none.

        So does a handle of no bytes, of a slot that a rank does not have.
        """
        held = self.held
        numbers = [0 if version is None else version + 1 for version in held.own]
        numbers += [held.known, held.first, held.digest]
        for copy in held.copies:
            numbers += [0, 0, 0] if copy is None else [copy.ward + 1, copy.version, copy.digest]
        for handle in self.handles:
            numbers += [handle.offset, handle.nbytes]
        numbers += [0] * (ROW_NUMBERS - len(numbers))
        return np.array(numbers, np.uint64)

    @classmethod
    def decoded(cls, row: Numbers, slot: int, incarnation: int) -> HoldingsRow:
        """Return the report of the member in `slot`. Raises `RemoteProtocolError`: the numbers are a peer's.

        Handles are checked when they are opened.
        """
        numbers = [int(number) for number in row]
        if len(numbers) != ROW_NUMBERS:
            raise RemoteProtocolError(f"slot {slot} reports {len(numbers)} numbers, expected {ROW_NUMBERS}")
        own = [None if number == 0 else number - 1 for number in numbers[:SLOTS]]
        copies: list[Copy | None] = []
        for at in range(_HEAD, _HEAD + _PER_COPY * SLOTS, _PER_COPY):
            ward, version, digest = numbers[at : at + _PER_COPY]
            copies.append(None if ward == 0 else Copy(ward=ward - 1, version=version, digest=digest))
        said = [(place, version) for place, version in enumerate(own) if version is not None]
        said += [(place, copy.version) for place, copy in enumerate(copies) if copy is not None]
        known, first, digest = numbers[SLOTS:_HEAD]
        places = numbers[_HEAD + _PER_COPY * SLOTS :]
        if max(known, first) > VERSION_MAX or any(v > VERSION_MAX or v % SLOTS != at for at, v in said):
            raise RemoteProtocolError(f"slot {slot} reports impossible versions: {numbers}")
        if max(places) > _ADDRESS_MAX:
            raise RemoteProtocolError(f"slot {slot} reports memory at impossible addresses: {places}")
        handles = tuple(
            RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=False)
            for offset, nbytes in zip(places[::2], places[1::2], strict=True)
        )
        held = Held(
            own=(own[0], own[1]), known=known, copies=(copies[0], copies[1]), first=first, digest=digest
        )
        return cls(held=held, handles=handles)


COPIES: Final = 1 + zm.SLOTS
"""Shards for which a rank needs memory: its own last version, and two of its ward's."""


COPY_POINT = faults.declare("mirror.copy", "before a copy of the ward's shard")
COPY_MIDDLE_POINT = faults.declare("mirror.middle", "half-way through a copy of the ward's shard")
COPIED_POINT = faults.declare("mirror.copied", "when a copy is whole, before it is voted for")
RESTORE_POINT = faults.declare("mirror.restore", "before the own shard is pulled back")
RESTORE_MIDDLE_POINT = faults.declare("mirror.restore_middle", "half-way through that")
RESTORED_POINT = faults.declare("mirror.restored", "when the own shard is back")


class BuddyReplica(RedundancyDriver):
    """`Redundancy` of what `own` holds at `place` of `ranks`: a replica at a buddy, or ranks of equal keys.

    `copies`: `SLOTS` arrays that peers can read, each large enough for the slot of any rank; none if ranks
    with equal keys stand for each other (see `Mirror`). `known`: the highest version known to be committed.
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
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
    ) -> None:
        if len(copies) not in (0, zm.SLOTS):
            raise LocalProtocolError(f"expected {zm.SLOTS} slots for copies, or none, got {len(copies)}")
        machine = zm.Mirror(place=place, ranks=ranks, known=known, first=own.first, replicas=not copies)
        super().__init__(worker, own, machine, outlives=False, on_update=on_update, on_commit=on_commit)
        self._worker = worker
        self._copies = list(copies)
        register = worker.segment.regions.register
        self._handles = tuple(register(array) for array in (*own.slots, *self._copies))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-mirror")
        self._cancellation = Cancellation()
        self._under_way: Future[tuple[int, int | None]] | None = None
        self._rows: list[HoldingsRow] = []
        self.busy_ns = 0
        """Total duration of copies, in parallel to the passes."""
        self.waited_ns = 0
        """Total time that steps waited for copies."""

    # ---- epochs

    def meet(self, group: Group, keys: Sequence[int] = (), known: int = 0) -> int:
        """See `Redundancy`."""
        self._group, self._cancellation = group, Cancellation()
        mine = HoldingsRow(held=self._machine.report(known), handles=self._handles).encoded()
        every = group.blocking.all_gather(mine).reshape(group.size, ROW_NUMBERS)
        self._rows = [
            HoldingsRow.decoded(row, *self._whose(rank))
            for row, rank in zip(every, group.members, strict=True)
        ]
        entered = zm.Entered(
            held=tuple(row.held for row in self._rows),
            hosts=hosts_of(group.view, group.members),
            place=group.rank,
            keys=tuple(keys),
        )
        self._perform(self._handle(entered))
        return self._machine.version

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
            return self.asked.vote(_digest(self._own.slots[(self._machine.version + 1) % zm.SLOTS]), 0)
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
        return self.asked.vote(own, copied)

    def _start_copy(self, work: zm.CopyWard) -> None:
        self._under_way = self._pool.submit(self._copy, work)

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        faults.hit(RESTORE_POINT)
        into = self._own.slots[version % zm.SLOTS]
        handle = self._rows[source.place].handles[source.slot + (0 if source.own else zm.SLOTS)]
        self._pull(source.place, handle, into, middle=RESTORE_MIDDLE_POINT)
        faults.hit(RESTORED_POINT)
        return zm.Restored(digest=_digest(into))

    def _copy(self, work: zm.CopyWard | None) -> tuple[int, int | None]:
        """Return the digests of the own shard and of the copy of the ward's, on the thread of the replica."""
        began_ns, copied = now_ns(), None
        if work is not None:
            faults.hit(COPY_POINT)
            handle = self._rows[work.ward].handles[work.version % zm.SLOTS]
            into = self._room(work, handle)
            self._pull(work.ward, handle, into, middle=COPY_MIDDLE_POINT)
            copied = _digest(into)
        own = _digest(self._own.slots[self._own.slot])
        self.busy_ns += now_ns() - began_ns
        return own, copied

    def _room(self, work: zm.CopyWard, handle: RegionHandle) -> Array:
        """Return the destination of the copy, of the length of the original."""
        whole = self._copies[work.slot]
        if handle.nbytes > whole.nbytes or handle.nbytes % whole.itemsize:
            raise RemoteProtocolError(
                f"place {work.ward} holds {handle.nbytes} bytes, more than can be copied"
            )
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


def _digest(flat: Array) -> int:
    return xxhash.xxh3_64_intdigest(flat.data)
