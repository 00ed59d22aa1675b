"""Drives a rank's mirror of shards: copies its ward's shard beside the passes, pulls its own after a loss.

A shard is what a rank alone holds (`KeptState`), under ZeRO and on a mesh alike.

Nothing is sent: the buddy reads its ward's shard where it lies, in the ward's arena (`RemoteRegion.get`), on
a thread of its own. That every rank holds a version, and that every copy is whole, is learnt from operations
that a step does anyway. `Safekeeping` is what a job asks of it: an erasure code could take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol, assert_never

import numpy as np
import xxhash

from zbmd.actors.member import Node
from zbmd.collectives.commit_driver import Cancellation, StepFailed, WorkCancelled
from zbmd.collectives.commit_messages import FailureKind
from zbmd.collectives.group import Group, hosts_of
from zbmd.training.capture_kinds import MIRROR, recorded
from zbmd.training.watch import VOTE_NUMBERS, StepWatch, Vote
from zbmd.training.workload import FETCH_ELEMENTS, pull
from zbmd.training.xp import Array
from zbmd.training.zero import mirror as zm
from zbmd.training.zero.mirror_row import ROW_NUMBERS, Row
from zbmd.transport import faults
from zbmd.transport._native import now_ns
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.region import RegionHandle

COPIES: Final = 1 + zm.SLOTS
"""Copies of shards that a rank has room for: its own last version, and two of its ward's."""


class KeptState(Protocol):
    """What one rank alone holds, in two slots: version v lies in slot v % SLOTS. Peers can read them."""

    slots: list[Array]
    """1-D, of one length and dtype."""
    slot: int
    """The one in use."""

    def begin_anew(self) -> None:
        """Take the state of version 0, in slot 0."""
        ...


COPY_POINT = faults.declare("mirror.copy", "before a copy of the ward's shard")
COPY_MIDDLE_POINT = faults.declare("mirror.middle", "half-way through a copy of the ward's shard")
COPIED_POINT = faults.declare("mirror.copied", "when a copy is whole, before it is voted for")
COMMIT_POINT = faults.declare("mirror.commit", "when all copies of a version are voted for")
RESTORE_POINT = faults.declare("mirror.restore", "before the own shard is pulled back")
RESTORE_MIDDLE_POINT = faults.declare("mirror.restore_middle", "half-way through that")
RESTORED_POINT = faults.declare("mirror.restored", "when the own shard is back")

Digests = tuple[int, ...]
"""Of all ranks' shards of one version, by their places."""


class Safekeeping(StepWatch, Protocol):
    """Keeps what one rank alone holds, so that it outlives that rank. For the thread that trains."""

    def meet(self, group: Group) -> int:
        """Agree with all members of a new epoch on the version to go on from, and hold it.

        Raises `StepFailed` if the state is lost, `PeerLost` and `OperationAborted` as the group does.
        """
        ...

    def epoch_over(self) -> None:
        """Return once nothing of this epoch is under way."""
        ...

    def settle(self) -> None:
        """Keep the last version, which no further step will; all ranks together. Raises as a step does."""
        ...

    def close(self) -> None:
        """Give back threads."""
        ...


class BuddyMirror(Safekeeping):
    """`Safekeeping` by a copy at a buddy, of what `own` holds at `place` of `ranks`.

    copies: `SLOTS` arrays that peers can read, each with room for the slot of any rank. known: the highest
    version that the run is known to have committed. on_update: told of each step whose update is done here;
    on_commit: of each version that is safe, with its digests.
    """

    def __init__(
        self,
        node: Node,
        own: KeptState,
        *,
        place: int,
        ranks: int,
        copies: Sequence[Array],
        known: int,
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
    ) -> None:
        if not len(own.slots) == len(copies) == zm.SLOTS:
            raise LocalProtocolError(f"a mirrored rank has {zm.SLOTS} slots of its state, and of copies")
        self._node, self._own = node, own
        self._on_update, self._on_commit = on_update, on_commit
        self._copies = list(copies)
        register = node.segment.regions.register
        self._handles = tuple(register(array) for array in (*own.slots, *self._copies))
        self._machine = zm.Mirror(place=place, ranks=ranks, known=known)
        config = {"place": place, "ranks": ranks, "known": known}
        self._tap = recorded(node, MIRROR, "mirror", self._machine, config)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-mirror")
        self._cancellation = Cancellation()
        self._under_way: Future[tuple[int, int | None]] | None = None
        self._group: Group | None = None
        self._rows: list[Row] = []
        self.busy_ns = 0
        """How long copies took so far, beside the passes."""
        self.waited_ns = 0
        """How long steps waited for them."""

    # ---- epochs

    def meet(self, group: Group) -> int:
        """See `Safekeeping`."""
        self._group, self._cancellation = group, Cancellation()
        mine = Row(held=self._machine.held, handles=self._handles).encoded()
        every = group.blocking.all_gather(mine).reshape(group.size, ROW_NUMBERS)
        self._rows = [
            Row.decoded(row, *self._whose(rank)) for row, rank in zip(every, group.members, strict=True)
        ]
        entered = zm.Entered(
            held=tuple(row.held for row in self._rows), hosts=hosts_of(group.view, group.members)
        )
        self._perform(self._handle(entered))
        return self._machine.version

    def _whose(self, rank: int) -> tuple[int, int]:
        """Slot and incarnation of a member."""
        if rank == self._node.rank:
            return self._node.segment.slot, self._node.segment.incarnation
        memory = self._node.peers[rank].memory
        return memory.slot, memory.incarnation

    def epoch_over(self) -> None:
        """See `Safekeeping`."""
        self._cancellation.cancel()
        if self._under_way is not None:
            self._end_copy(self._ended())
        if self._machine.state is not zm.State.FAILED:
            self._handle(zm.EpochOver())

    def settle(self) -> None:
        """See `Safekeeping`."""
        assert self._group is not None, "a version is kept in an epoch"
        blocking = self._group.blocking
        blocking.barrier()
        self._copy_of(self._machine.version)
        self.voted(list(blocking.all_gather(self.vote())))

    def close(self) -> None:
        """See `Safekeeping`."""
        self._cancellation.cancel()
        self._pool.shutdown()
        self._tap.close("closed")

    # ---- steps

    def all_hold(self, version: int) -> None:
        """See `StepWatch`."""
        self._tap.mark(version + 1)
        self._copy_of(version)

    def _copy_of(self, version: int) -> None:
        """All ranks hold `version`: begin to copy the ward's shard of it, unless its copy is here."""
        self._perform(self._handle(zm.AllHold(version=version)))
        if self._under_way is None:  # the copy is there from an epoch before
            self._under_way = self._pool.submit(self._copy, None)

    def vote(self) -> Vote:
        """See `StepWatch`."""
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
        said = np.zeros(VOTE_NUMBERS, np.uint64)
        said[:2] = own, copied
        return said

    def voted(self, votes: Sequence[Vote]) -> None:
        """See `StepWatch`. Raises `StepFailed` if a copy has other bits than its original."""
        self._perform(self._handle(zm.Voted(votes=tuple((int(vote[0]), int(vote[1])) for vote in votes))))

    def updated(self, done: Any) -> None:
        """See `StepWatch`."""
        self._perform(self._handle(zm.Updated()))
        self._on_update(done)

    # ---- the machine

    def _handle(self, event: zm.Event) -> list[zm.Action]:
        return self._tap.handle(event, now_ns=now_ns())

    def _perform(self, actions: list[zm.Action]) -> None:
        for action in actions:
            match action:
                case zm.Restore(version=version, source=source):
                    self._perform(self._handle(self._restore(version, source)))
                case zm.StartAnew():
                    self._own.begin_anew()
                case zm.Resume(version=version):
                    self._own.slot = version % zm.SLOTS
                case zm.CopyWard():
                    self._under_way = self._pool.submit(self._copy, action)
                case zm.Commit(version=version, digests=digests):
                    faults.hit(COMMIT_POINT)
                    self._on_commit(version, digests)
                case zm.Fail(lost=lost, reason=reason):
                    raise StepFailed(FailureKind.STATE_LOST if lost else FailureKind.DIVERGED, reason)
                case _:
                    assert_never(action)

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        faults.hit(RESTORE_POINT)
        into = self._own.slots[version % zm.SLOTS]
        handle = self._rows[source.place].handles[zm.SLOTS + source.slot]
        self._pull(source.place, handle, into, middle=RESTORE_MIDDLE_POINT)
        faults.hit(RESTORED_POINT)
        return zm.Restored(digest=_digest(into))

    def _copy(self, work: zm.CopyWard | None) -> tuple[int, int | None]:
        """On the mirror's thread: the digest of the own shard, and that of the copy of the ward's."""
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
        """Where the copy goes: as long as what it is a copy of."""
        whole = self._copies[work.slot]
        if handle.nbytes > whole.nbytes or handle.nbytes % whole.itemsize:
            raise RemoteProtocolError(
                f"place {work.ward} holds {handle.nbytes} bytes, more than can be copied"
            )
        return whole[: handle.nbytes // whole.itemsize]

    def _ended(self) -> tuple[int, int | None] | None:
        """Wait for the copy under way; None if it was cut short."""
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
        peer = self._node.peers.get(rank)
        if peer is None:
            raise PeerLost(rank, "it is no peer any more")
        region = peer.memory.open_region(handle, self._node.segment)
        for start in range(0, len(into), FETCH_ELEMENTS):
            self._cancellation.check()
            part = into[start : start + FETCH_ELEMENTS]
            pull(region, peer.memory, part, start * into.itemsize, self._cancellation, source=rank)
            if start <= len(into) // 2 < start + FETCH_ELEMENTS:
                faults.hit(middle)


def _digest(flat: Array) -> int:
    return xxhash.xxh3_64_intdigest(flat.data)
