"""Runs plans over a group's memory: what all executors share, and the one for groups of one host."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

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
from zbmd.collectives.execution.plan import Plan
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
from zbmd.collectives.programs.layout import Piece, Table
from zbmd.collectives.programs.program import BUFFERS, INBOX, hash_text
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
"""How often it does so before it parks: some 160 µs. The cores may have others to serve than our ranks."""
SPINS_SHARED = 4
"""Looks before a wait lets others have the core, when ranks share cores and it is for one of them to run."""
YIELDS_SHARED = 200
"""How often it does so before it parks."""
SPINS_REMOTE = 64
"""Looks before a wait parks, when what it waits for comes over a network."""

_HEADER = struct.Struct("=6Q2BHI2Q35Q")
_OPERATIONS = {operation.value: operation.name.lower() for operation in Operation}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One native run: a whole operation, or one piece of it. Counts and strides in elements of a block.

    With `layout` the blocks lie where it says: `count` is the longest of this piece, `total` that of the
    whole operation, and a stride is 1 for a staged array and 0 for one used in place.
    """

    dtype: int
    reduction: int
    count: int
    total: int
    piece: int
    in_stride: int
    out_stride: int
    layout: Piece | None = None
    digest: int = 0
    """Of what the ranks must agree on beyond the plan and the layout."""


class RunArguments(TypedDict):
    """See `NativeGroup.run`."""

    operation: int
    dtype: int
    reduction: int
    root: int
    count: int
    total: int
    piece: int
    in_stride: int
    out_stride: int
    scratch: int
    scratch_bytes: int
    layout: Table | None
    extents: Table | None
    layout_digest: int


class Executor(ABC):
    """One rank's executor for the group `members` at `epoch`: its memory, statuses and errors.

    `native` holds the group's counters and descriptors. Subclasses say how a program is walked.
    """

    def __init__(
        self, native: NativeGroup, *, segment: Segment, members: tuple[int, ...], rank: int, epoch: int
    ) -> None:
        self.members = members
        self.place = members.index(rank)
        self.epoch = epoch
        self.title = title(native.channel_number, epoch)
        self.native = native
        self._segment = segment
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._inbox: NDArray[Any] = np.empty(0, np.uint8)
        self._addresses = np.zeros(BUFFERS, np.uint64)
        self._kill_at: tuple[int, int] | None = None
        self.raised: Exception | None = None
        """What has ended a run of the fast path, if it was none of the native statuses."""

    @abstractmethod
    def _execute(self, plan: Plan, call: Call, *, deadline_ns: int, kill_point: int) -> int:
        """Enter and run one operation over `_addresses`; returns a STATUS."""

    def arguments(self, plan: Plan, call: Call) -> RunArguments:
        """What the native run is told of a call."""
        piece = call.layout
        return RunArguments(
            operation=plan.request.operation.value,
            dtype=call.dtype,
            reduction=call.reduction,
            root=plan.request.root,
            count=call.count,
            total=call.total,
            piece=call.piece,
            in_stride=call.in_stride,
            out_stride=call.out_stride,
            scratch=address_of(self._scratch),
            scratch_bytes=self._scratch.nbytes,
            layout=None if piece is None else piece.table,
            extents=None if piece is None else piece.extents,
            layout_digest=call.digest if piece is None else piece.digest,
        )

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
        """Where the buffers of the latest run began."""
        return self._addresses

    @property
    def eager_bytes_max(self) -> int:
        """What a rank's input may have to travel with its descriptor; the same on all ranks."""
        return PUB_BYTES_MAX

    @property
    def far(self) -> bool:
        """Whether there are members on other hosts; the same on all ranks."""
        return False

    @property
    def reads_peers(self) -> bool:
        """Whether all members can read each other's ordinary arrays where they lie (`peer_reading`)."""
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
        """Which of a plan's programs the last run, which was of that plan, was by."""
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

    def release(self) -> None:
        """Give back inbox and scratch."""
        self._scratch = self._inbox = np.empty(0, np.uint8)

    def run(self, plan: Plan, call: Call, buffers: Mapping[int, int], *, deadline_ns: int) -> None:
        """Run `plan` over `buffers` (buffer number to address) and return when this rank has completed.

        Raises `MembersLost`, `OperationAborted`, `DeadlineExceeded`, `Desynchronised`,
        `RemoteProtocolError` (a peer's descriptor is out of bounds), `EpochExhausted`, and `ArenaFull` if
        the inbox cannot hold the algorithm's slots.
        """
        if self.native.capacity_left(plan.native) < 1:
            raise EpochExhausted(f"{self.title} has used up its notification counters: install a new view")
        addresses = self._addresses
        addresses.fill(0)
        for buffer, address in buffers.items():
            addresses[buffer] = address
        self._make_room(plan, call)
        addresses[INBOX] = address_of(self._inbox)
        point = -1
        if self._kill_at is not None and self._kill_at[0] == self.sequence + 1:
            point = self._kill_at[1]
        elif faults.armed():
            point = faults.reserve(COLLECTIVE_POINT, plan.kill_points)
        status = self._execute(plan, call, deadline_ns=deadline_ns, kill_point=point)
        if status != STATUS_DONE:
            raise self.error_of(status, plan)

    def _make_room(self, plan: Plan, call: Call) -> None:
        if plan.in_arena is not None:
            self._make_room(plan.in_arena, call)
        program = plan.program
        if not program.scratch_slots and not program.inbox_slots:
            return
        per_block = program.chunks // program.blocks
        slot_bytes = -(-(-(-call.count // per_block) * slot_itemsize(call.dtype)) // 64) * 64
        if self._scratch.nbytes < program.scratch_slots * slot_bytes:
            self._scratch = np.empty(program.scratch_slots * slot_bytes, np.uint8)
        if self._inbox.nbytes < program.inbox_slots * slot_bytes:
            self._inbox = np.empty(0, np.uint8)
            self._inbox = self._empty_inbox(program.inbox_slots * slot_bytes, program.algorithm)

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
        """What to raise for a native run that ended so."""
        if self.raised is not None and not isinstance(self.raised, ZbmdError):
            raise self.raised
        if self.raised is not None:
            return self.raised
        where = self._where(plan)
        if status == STATUS_LOST:
            lost = tuple(self.members[i] for i in self._lost())
            if lost:
                return MembersLost(lost, f"during {where}; wait for the next view and retry in it")
            return OperationAborted(f"{where}: a member was lost and has been replaced since")
        if status == STATUS_ABORTED:
            return OperationAborted(f"{where}: aborted here or on a peer; retry in the next view")
        if status == STATUS_DEADLINE:
            return DeadlineExceeded(f"{where}: the deadline has passed; the group is not usable any more")
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

    def _lost(self) -> list[int]:
        """The places of the members that are known to be gone."""
        return self.native.lost()

    def _desynchronised(self) -> Desynchronised:
        calls = {member: self._describe(i) for i, member in enumerate(self.members)}
        mine, culprit = self.members[self.place], self.members[self.native.culprit]
        return Desynchronised(
            f"operation #{self.sequence} of {self.title}: rank {mine} called {calls[mine]}, "
            f"rank {culprit} called {calls[culprit]}; every rank must make the same calls in the same order",
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

    def __init__(
        self,
        *,
        segment: Segment,
        peers: Mapping[int, PeerSegment],
        members: tuple[int, ...],
        rank: int,
        epoch: int,
        channel: int,
    ) -> None:
        own_inbox_end = segment.nbytes - segment.arena.capacity_bytes
        ranges = [
            (segment.base, segment.slot, own_inbox_end, segment.nbytes)
            if member == rank
            else (peers[member].base, peers[member].slot, peers[member].arena_offset, peers[member].nbytes)
            for member in members
        ]
        try:
            native = NativeGroup(
                ranges,
                rank=members.index(rank),
                channel=channel,
                epoch=epoch,
                identity=group_identity(members, epoch),
                spins=spins_for(len(members)),
                yields=YIELDS_ALONE if a_core_each(len(members)) else YIELDS_SHARED,
            )
        except ValueError as error:
            raise no_executor(members, epoch, error) from None
        super().__init__(native, segment=segment, members=members, rank=rank, epoch=epoch)
        # The native group holds bare addresses: these keep the mappings behind them alive.
        self._mappings = (segment.mapping, *(peer.mapping for peer in peers.values()))

    @property
    def may_have_moved(self) -> bool:
        """See `Executor`: it has got past its entry."""
        return self.native.pc >= 0

    def _execute(self, plan: Plan, call: Call, *, deadline_ns: int, kill_point: int) -> int:
        return self.native.run(
            plan.native,
            self._addresses,
            deadline_ns=deadline_ns,
            kill_point=kill_point,
            **self.arguments(plan, call),
        )


def group_identity(members: tuple[int, ...], epoch: int) -> int:
    """What tells a group's operations from those of another: it enters their fingerprints."""
    return hash_text(f"members={members} epoch={epoch}")


def spins_for(members: int) -> int:
    """Looks before a wait lets others have the core, in a group of so many on one host."""
    return SPINS_ALONE if a_core_each(members) else SPINS_SHARED


def a_core_each(members: int) -> bool:
    """Whether so many on one host need not share cores."""
    return members <= len(os.sched_getaffinity(0))


def no_executor(members: tuple[int, ...], epoch: int, error: ValueError) -> LocalProtocolError:
    """The error of a native group that cannot be."""
    return LocalProtocolError(f"no executor for {members} in epoch {epoch}: {error}")


def require_members(members: tuple[int, ...], rank: int, peers: Mapping[int, PeerMemory]) -> None:
    """Raise `LocalProtocolError` unless `rank` and exactly `peers` make up `members`."""
    if rank not in members or len(set(members)) != len(members):
        raise LocalProtocolError(f"rank {rank} is not one of the members {members}")
    missing = [member for member in members if member != rank and member not in peers]
    if missing:
        raise LocalProtocolError(f"no memory is attached for the members {missing} of {members}")
