"""Runs plans over a group's memory: what all executors share, and the one for groups of one host."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.errors import (
    CollectiveError,
    Desynchronised,
    EpochExhausted,
    MembersLost,
    OperationAborted,
)
from zbmd.collectives.execution.plan import Plan, Run
from zbmd.collectives.native._stepper import (
    PUB_BYTES_MAX,
    STATUS_ABORTED,
    STATUS_BAD_DESCRIPTOR,
    STATUS_DEADLINE,
    STATUS_DESYNCHRONISED,
    STATUS_DONE,
    STATUS_LOST,
    STATUS_UNREADABLE,
    NativeGroup,
)
from zbmd.collectives.programs.channels import title
from zbmd.collectives.programs.program import BUFFERS, INBOX, Program, hash_text
from zbmd.collectives.programs.reductions import DTYPE_NAMES, REDUCTIONS, slot_itemsize
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import (
    ArenaFull,
    DeadlineExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.memory.segment import PeerMemory, PeerSegment, Segment
from zbmd.transport.native._native import address_of

COLLECTIVE_POINT = faults.declare(
    "collective.point", "in a collective: before it enters, between any two instructions, or at its end"
)
SPINS_ALONE = 200
"""Looks before a wait lets others have the core, when every rank could have one of its own: some 8 µs."""
YIELDS_ALONE = 20
"""Times that it does so before it parks: some 160 µs. The cores may have others to serve than our ranks."""
SPINS_SHARED = 4
"""Looks before a wait lets others have the core, when ranks share cores and it is for one of them to run."""
YIELDS_SHARED = 200
"""Times that it does so before it parks."""
SPINS_REMOTE = 64
"""Looks before a wait parks, when what it waits for comes over a network."""
INBOX_BYTES_MIN = 256 << 10
"""Of a group that uses any of it: as many as a process can be in have room."""

_HEADER = struct.Struct("=6Q2BHI2Q35Q")
NativeGroupT = TypeVar("NativeGroupT", bound=NativeGroup)
_OPERATIONS = {operation.value: operation.name.lower() for operation in Operation}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's end of a group in one epoch.

    `peers` maps every other member, and perhaps more ranks, to its memory. Raises `LocalProtocolError` unless
    `rank` and some of `peers` make up `members`.
    """

    segment: Segment
    peers: Mapping[int, PeerMemory]
    members: tuple[int, ...]
    rank: int
    epoch: int
    channel: int

    def __post_init__(self) -> None:
        if self.rank not in self.members or len(set(self.members)) != len(self.members):
            raise LocalProtocolError(f"rank {self.rank} is not one of the members {self.members}")
        missing = [member for member in self.members if member != self.rank and member not in self.peers]
        if missing:
            raise LocalProtocolError(f"no memory is attached for the members {missing} of {self.members}")

    @property
    def others(self) -> dict[int, PeerMemory]:
        """The memory of every other member, by its place."""
        return {i: self.peers[m] for i, m in enumerate(self.members) if m != self.rank}

    def native(self, kind: type[NativeGroupT], bases: Mapping[int, int], **settings: Any) -> NativeGroupT:
        """Make the native group. `bases`: where the segments of other members begin here, by place; 0 if it
        is on another host. Raises `LocalProtocolError` if the channel has been used in this epoch.
        """
        own, place = self.segment, self.members.index(self.rank)
        ranges = [(bases[i], peer.slot, peer.arena_offset, peer.nbytes) for i, peer in self.others.items()]
        own_inbox_end = own.nbytes - own.arena.capacity_bytes
        ranges.insert(place, (own.base, own.slot, own_inbox_end, own.nbytes))
        try:
            return kind(
                ranges,
                rank=place,
                channel=self.channel,
                epoch=self.epoch,
                identity=hash_text(f"members={self.members} epoch={self.epoch}"),
                **settings,
            )
        except ValueError as error:
            text = f"no executor for {self.members} in epoch {self.epoch}: {error}"
            raise LocalProtocolError(text) from None


class Executor(ABC):
    """One rank's executor for the group `members` at `epoch`: its memory, statuses and errors.

    `native` holds the group's counters and descriptors. Subclasses say how a program is walked.
    """

    def __init__(self, native: NativeGroup, membership: Membership) -> None:
        self.members = membership.members
        self.place = membership.members.index(membership.rank)
        self.epoch = membership.epoch
        self.title = title(membership.channel, membership.epoch)
        self.native = native
        self._segment = membership.segment
        # The native group holds bare addresses: these keep the mappings behind them alive.
        self._own_mapping = membership.segment.mapping
        self._peer_mappings = [m.mapping for m in membership.others.values() if isinstance(m, PeerSegment)]
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._inbox: NDArray[Any] = np.empty(0, np.uint8)
        self._addresses = np.zeros(BUFFERS, np.uint64)
        self._kill_at: tuple[int, int] | None = None
        self.raised: Exception | None = None
        """The exception that has ended a run of the fast path, if it was none of the native statuses."""

    @abstractmethod
    def _execute(self, run: Run, *, deadline_ns: int, kill_point: int) -> int:
        """Enter and run one operation over `_addresses`; returns a STATUS."""

    @property
    def scratch(self) -> NDArray[np.uint8]:
        """The memory for partial results; a later run may take more, elsewhere."""
        return self._scratch

    @property
    def inbox(self) -> NDArray[np.uint8]:
        """The slots that peers put into; a later run may take more, elsewhere."""
        return self._inbox

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """The addresses of the buffers of the latest run."""
        return self._addresses

    @property
    def eager_bytes_max(self) -> int:
        """The largest input that travels with a rank's descriptor, bytes; the same on all ranks."""
        return PUB_BYTES_MAX

    @property
    def far(self) -> bool:
        """Whether there are members on other hosts; the same on all ranks."""
        return False

    @property
    def reads_peers(self) -> bool:
        """Whether all members can read each other's ordinary arrays where they lie (`group_trials`)."""
        return self.native.reads_peers

    def read_peers(self, pids: list[int]) -> None:
        """Have them do so; `pids`: the process of each member. No operation may be running."""
        self.native.read_peers(pids)

    @property
    def sequence(self) -> int:
        """Native runs begun in this epoch."""
        return self.native.sequence_number

    @property
    def may_have_moved(self) -> bool:
        """Whether the last run may have written anything but its descriptor."""
        return True

    def ran(self, plan: Plan) -> Plan:
        """Return `plan`, or its `in_arena` if the last run, which was of `plan`, used that."""
        return plan if plan.in_arena is None or not self.native.reads else plan.in_arena

    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection: SIGKILL this process at `point` of the run with this sequence number."""
        self._kill_at = (sequence, point)

    def abort(self) -> None:
        """End the running operation, and every later one; from any thread, within microseconds."""
        self.native.abort()

    def give_up(self) -> None:
        """Take part in nothing more, and let the peers know: whoever waits for us ends as aborted.

        Call it while no operation runs.
        """
        self.native.give_up()

    def unmap_peers(self) -> None:
        """Unmap the peers' memory. Only `abort`, `give_up` and `release` may follow.

        Call it while no operation runs. A group that has ended may be kept by its user or a reference cycle:
        the memory of the dead must not be.
        """
        self.native.let_go()
        self._peer_mappings.clear()

    def release(self) -> None:
        """Give back inbox and scratch."""
        self._scratch = self._inbox = np.empty(0, np.uint8)

    def run(self, run: Run, *, deadline_ns: int) -> None:
        """Carry out a run, and return when this rank has completed.

        Raises `MembersLost`, `OperationAborted`, `DeadlineExceeded`, `Desynchronised`,
        `RemoteProtocolError` (a peer's descriptor is out of bounds), `EpochExhausted`, and `ArenaFull` if
        the inbox cannot hold the algorithm's slots.
        """
        plan, addresses = run.plan, self._addresses
        if self.native.capacity_left(plan.native) < 1:
            raise EpochExhausted(f"{self.title} has used up its notification counters: install a new view")
        addresses.fill(0)
        for buffer, address in run.addresses.items():
            addresses[buffer] = address
        for each in (plan, plan.in_arena):
            if each is not None:
                self._make_room(each.program, run)
        addresses[INBOX] = address_of(self._inbox)
        point = -1
        if self._kill_at is not None and self._kill_at[0] == self.sequence + 1:
            point = self._kill_at[1]
        elif faults.armed():
            point = faults.reserve(COLLECTIVE_POINT, plan.kill_points)
        status = self._execute(run, deadline_ns=deadline_ns, kill_point=point)
        if status != STATUS_DONE:
            raise self.error_of(status, plan)

    def _make_room(self, program: Program, run: Run) -> None:
        if not program.scratch_slots and not program.inbox_slots:
            return
        per_block = program.chunks // program.blocks
        slot_bytes = -(-(-(-run.count // per_block) * slot_itemsize(run.dtype)) // 64) * 64
        if self._scratch.nbytes < program.scratch_slots * slot_bytes:
            self._scratch = np.empty(program.scratch_slots * slot_bytes, np.uint8)
        if self._inbox.nbytes < (needed := program.inbox_slots * slot_bytes):
            # More than is needed: the fast path forgets what it has learnt whenever the inbox grows.
            roomy, self._inbox = max(INBOX_BYTES_MIN, 1 << (needed - 1).bit_length()), np.empty(0, np.uint8)
            try:
                self._inbox = self._empty_inbox(roomy, program.algorithm)
            except ArenaFull:
                self._inbox = self._empty_inbox(needed, program.algorithm)

    def _empty_inbox(self, nbytes: int, algorithm: str) -> NDArray[np.uint8]:
        try:
            slots: NDArray[np.uint8] = self._segment.inbox.empty(nbytes, np.uint8)
        except ArenaFull as full:
            raise ArenaFull(
                f"{algorithm} of {self.title} needs {nbytes:,} bytes of this rank's inbox, and the "
                f"largest hole there has {full.available_bytes:,}: give zbmd.join a larger inbox_bytes, or "
                "close groups that are not needed",
                asked_bytes=full.asked_bytes,
                available_bytes=full.available_bytes,
            ) from None
        return slots

    def _where(self, plan: Plan) -> str:
        pc, program = self.native.pc, self.ran(plan).program
        at = "entering" if pc < 0 else f"at instruction {pc} of {len(program.instructions)}"
        if 0 <= pc < len(program.instructions):
            at += f" ({program.instructions[pc]})"
        rank = self.members[self.place]
        return f"{program.algorithm} #{self.sequence} of {self.title}, rank {rank} {at}"

    def error_of(self, status: int, plan: Plan) -> ZbmdError:
        """Return the error of a native run that ended with `status`."""
        if self.raised is not None and not isinstance(self.raised, ZbmdError):
            raise self.raised
        if self.raised is not None:
            return self.raised
        where = self._where(plan)
        if status == STATUS_LOST:
            lost = tuple(self.members[i] for i in self.lost_places())
            if lost:
                return MembersLost(lost, f"during {where}; wait for the next view and retry in it")
            return OperationAborted(f"{where}: a member was lost and has been replaced since")
        if status == STATUS_ABORTED:
            return OperationAborted(f"{where}: a member gave it up, or this rank; retry in the next view")
        if status == STATUS_DEADLINE:
            culprit = self.native.culprit  # the first that had not entered, if all were waited for
            absent = () if culprit < 0 else (self.members[culprit],)
            why = f"rank {absent[0]} did not enter it in time" if absent else "the deadline has passed"
            return DeadlineExceeded(f"{where}: {why}; the group is not usable any more", absent=absent)
        if status == STATUS_DESYNCHRONISED:
            return self._desynchronised()
        if status == STATUS_BAD_DESCRIPTOR:
            peer = self.members[self.native.culprit]
            return RemoteProtocolError(
                f"rank {peer} described memory outside its segment",
                story=(where, self._describe(self.native.culprit)),
            )
        if status == STATUS_UNREADABLE:
            peer = self.members[self.native.culprit]
            return RemoteProtocolError(
                f"the memory that rank {peer} described cannot be read; when the group was made, it could",
                story=(where, self._describe(self.native.culprit)),
            )
        return CollectiveError(f"{where}: the executor returned the unknown status {status}")

    def lost_places(self) -> list[int]:
        """The places of the members that are known to be gone."""
        return self.native.lost()

    def _desynchronised(self) -> Desynchronised:
        calls = {member: self._describe(i) for i, member in enumerate(self.members)}
        named = [self.place, self.native.culprit]
        # A third rank shows which of the two is the odd one. The calls of some are not read, and empty.
        named += [i for i in range(len(self.members)) if i not in named and any(self.native.header(i))][:1]
        told = ", ".join(f"rank {self.members[i]} called {calls[self.members[i]]}" for i in named)
        return Desynchronised(
            f"operation #{self.sequence} of {self.title}: {told}; every rank must make the same calls in the "
            "same order",
            calls,
        )

    def _describe(self, index: int) -> str:
        """A call as its rank's descriptor tells it (untrusted, so nothing is looked up unchecked)."""
        fields = _HEADER.unpack(self.native.header(index))
        plan, count, total, operation, how_reduced, root, piece = fields[3:10]
        dtype, reduction = how_reduced & 15, how_reduced >> 4
        kind = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else f"dtype {dtype}"
        how = REDUCTIONS[reduction] if reduction < len(REDUCTIONS) else f"reduction {reduction}"
        text = f"{_OPERATIONS.get(operation, f'operation {operation}')}({kind}[{total}], {how}, root={root})"
        if count != total:
            text += f" piece {piece}"
        return f"{text} by plan {plan:016x}"


class MappedExecutor(Executor):
    """The executor of a group whose members all share memory with this process.

    `ranges` of the native group are trusted: they come from the mappings, not from shared memory.
    """

    def __init__(self, membership: Membership) -> None:
        others = {i: peer for i, peer in membership.others.items() if isinstance(peer, PeerSegment)}
        alone = a_core_each(len(membership.members))
        native = membership.native(
            NativeGroup,
            {i: peer.base for i, peer in others.items()},
            spins=SPINS_ALONE if alone else SPINS_SHARED,
            yields=YIELDS_ALONE if alone else YIELDS_SHARED,
        )
        super().__init__(native, membership)

    @property
    def may_have_moved(self) -> bool:
        """See `Executor`: it has got past its entry."""
        return self.native.pc >= 0

    def _execute(self, run: Run, *, deadline_ns: int, kill_point: int) -> int:
        return self.native.run(
            run.plan.native,
            run,
            self._addresses,
            self._scratch,
            deadline_ns=deadline_ns,
            kill_point=kill_point,
        )


def a_core_each(members: int) -> bool:
    """Whether so many on one host need not share cores."""
    return members <= len(os.sched_getaffinity(0))
