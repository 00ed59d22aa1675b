"""Rings of slots between the stages of a pipeline: regions that a neighbour puts into, and counts in cells.

A ring lies in its receiver's inbox; its sender puts messages into the slots that the stage machine says.
Behind each put, and for each release, one of four notify cells of the pair of stages is set to how many there
have been (`Told`), under the epoch. So nothing of a step passes an event loop, and a stage waits natively.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.pipeline.program import Boundary, Shape, StageProgram, boundary_of, slots_of
from zbmd.training.pipeline.schedules import activations_max, programs_of
from zbmd.training.pipeline.stage import Await, Counts, Put, Release, Told
from zbmd.training.pipeline.verifier import verify
from zbmd.training.step.reduction import gather_rows
from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.native._native import now_ns


def runnable_programs(schedule: str, shape: Shape) -> tuple[StageProgram, ...]:
    """Return the verified programs of a schedule. Raises `UserError`."""
    programs = programs_of(schedule, shape)
    verify(programs, activations_max=activations_max(schedule, shape))
    return programs


def traffic_of(
    model: GPTConfig, config: TrainingConfig, *, dtype: np.dtype[np.floating], tensor_ranks: int = 1
) -> Traffic:
    """Return what passes between stages for one micro-batch, which is a logical shard: this rank's rows of
    it.
    """
    rows = config.sequences_per_shard * model.context // tensor_ranks
    return Traffic(shape=(rows, model.width), dtype=dtype)


CHANNEL_DEFAULT = 4
"""The first of as many notify channels as there are kinds of `Told`; no group may use one of them."""
COUNT_MAX = (1 << 32) - 1
"""A count of this says that the stage has given up."""
CLOSE_NS = 5_000_000_000
"""Longest wait, when rings are left, for messages under way to a live neighbour."""
_EPOCH_SHIFT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The shape and dtype of every message between stages."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.floating]

    @property
    def nbytes(self) -> int:
        """Return the bytes of a message."""
        return prod(self.shape) * self.dtype.itemsize


class RingOffer(msgspec.Struct, frozen=True, array_like=True):
    """The location of a ring of this stage."""

    gradient: bool
    part: int
    handle: RegionHandle


def inbox_bytes_needed(programs: Sequence[StageProgram], traffic: Traffic) -> int:
    """Return the bytes of the rings of the stage with the most rings."""
    return max(sum(slots_of(program).values()) for program in programs) * traffic.nbytes


def decode_offers(data: bytes, stage: int) -> dict[Boundary, RegionHandle]:
    """Return the rings that a stage offers. Raises `RemoteProtocolError` if they cannot be decoded."""
    try:
        offers = msgspec.msgpack.decode(data, type=list[RingOffer])
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"stage {stage} offers rings that cannot be read: {error}") from error
    return {Boundary(offer.gradient, offer.part): offer.handle for offer in offers}


def encode_offers(offers: Sequence[RingOffer]) -> bytes:
    """Encode the offers for `decode_offers`."""
    return msgspec.msgpack.encode(offers)


class RingMemory:
    """The rings in the memory of one stage, for its lifetime: neighbours write into them in every epoch.

    programs: those that the stage may run; each uses the beginnings of the rings. Neighbours can write all of
    them, so that a stage may turn to another of its programs between two steps.
    """

    def __init__(self, segment: Segment, programs: Sequence[StageProgram], traffic: Traffic) -> None:
        self.traffic = traffic
        self._regions = segment.regions
        self._handles: list[RegionHandle] = []
        most: dict[Boundary, int] = {}
        for program in programs:
            for boundary, slots in slots_of(program).items():
                most[boundary] = max(slots, most.get(boundary, 0))
        self.arrays: dict[Boundary, Array] = {
            boundary: segment.inbox.empty((slots, *traffic.shape), traffic.dtype)
            for boundary, slots in most.items()
        }

    def offered(self, program: StageProgram, writers: Sequence[int]) -> bytes:
        """Return the encoded offer of the rings of `program` to `writers`.

        Raises `LocalProtocolError` if it is none of those that the memory was made for, and needs more.
        """
        self.require_room(program)
        rings = {boundary: self.arrays[boundary] for boundary in slots_of(program)}
        self._handles = [self._regions.register(ring, writers=writers) for ring in rings.values()]
        return encode_offers(
            [
                RingOffer(gradient=boundary.gradient, part=boundary.part, handle=handle)
                for boundary, handle in zip(rings, self._handles, strict=True)
            ]
        )

    def require_room(self, program: StageProgram) -> None:
        """Raise `LocalProtocolError` for a program that needs more slots than there are."""
        if any(len(self.arrays[boundary]) < slots for boundary, slots in slots_of(program).items()):
            raise LocalProtocolError("a stage has less memory for its rings than the program needs")

    def close(self) -> None:
        """Release them. Idempotent. Memory that a neighbour may still write lives until it has ended."""
        for handle in self._handles:
            self._regions.release(handle)
        self._handles.clear()


class StageRings:
    """The rings of one stage in one epoch, and its way into those of its neighbours. For one thread.

    Made by all stages together, after the view was entered; `group` are the stages, `world` all who are lost
    together: a wait ends when any of them has ended. Every call raises `PeerLost` when one has, and
    `OperationAborted` when a neighbour has given up.
    """

    def __init__(
        self,
        worker: Worker,
        group: Group,
        programs: Sequence[StageProgram],
        own: RingMemory,
        *,
        world: Sequence[int],
        channel: int = CHANNEL_DEFAULT,
    ) -> None:
        stage = group.members.index(worker.rank)
        self._segment: Segment = worker.segment
        self._members = group.members
        self._epoch, self._channel, self._traffic = group.epoch, channel, own.traffic
        self._mask = sum(1 << rank for rank in world if rank != worker.rank)
        self._transfers: list[Transfer] = []
        self._memory, self._own = own, own.arrays
        self._said: Counts = {}
        self._heard: Counts = {}
        """Counts that this stage and its neighbours have reported under earlier programs of this epoch."""
        self._regions: dict[Boundary, RemoteRegion] = {}
        self._towards: dict[int, RemoteRegion] = {}
        self._require_fresh()
        offered = own.offered(programs[stage], [rank for rank in group.members if rank != worker.rank])
        for other, data in enumerate(_exchange(group, offered)):
            if other != stage:
                self._open(worker, programs, stage, other, data)

    def _require_fresh(self) -> None:
        """Raise `LocalProtocolError` if another pipeline has used the counters in this epoch: they begin at
        0.
        """
        for rank in self._members:
            for what in Told:
                cell = _native.load_cell(self._segment.base, rank, self._channel + what.value)
                if cell >> _EPOCH_SHIFT == self._epoch:
                    raise LocalProtocolError(
                        f"a pipeline has used channel {self._channel} in epoch {self._epoch}: give the next "
                        "one another channel"
                    )

    def _open(
        self, worker: Worker, programs: Sequence[StageProgram], stage: int, other: int, data: bytes
    ) -> None:
        """Open the rings of stage `other` that this one puts into."""
        memory = worker.peers[self._members[other]].memory
        offered = decode_offers(data, other)
        for boundary, slots in slots_of(programs[other]).items():
            sender = boundary.part + (1 if boundary.gradient else -1)
            if programs[other].shape.stage_of(sender) != stage:
                continue
            handle = offered.get(boundary)
            if handle is None or handle.nbytes < slots * self._traffic.nbytes:
                raise RemoteProtocolError(f"stage {other} offers no ring of {slots} slots for {boundary}")
            region = memory.open_region(handle, self._segment)
            self._regions[boundary] = self._towards[other] = region

    def turn_to(self, program: StageProgram, said: Counts, heard: Counts) -> None:
        """Go on with another program, whose machine counts from 0; all stages together, between two steps.

        said, heard: the totals of the program before. All stages have ended its last step: nothing is in a
        slot that they still read. Raises `LocalProtocolError` without memory for it.
        """
        self._memory.require_room(program)
        for before, more in ((self._said, said), (self._heard, heard)):
            for key, count in more.items():
                before[key] = before.get(key, 0) + count

    def slot(self, boundary: Boundary, slot: int) -> Array:
        """Return the message that a neighbour put there, to read and to overwrite until it is released."""
        found: Array = self._own[boundary][slot]
        return found

    def put(self, put: Put, array: Array) -> None:
        """Start to put `array`, which must not change until `drain`."""
        self._transfers = [transfer for transfer in self._transfers if not transfer.done]
        transfer = self._regions[boundary_of(put.message)].put(
            np.ascontiguousarray(to_host(array), self._traffic.dtype),
            put.slot * self._traffic.nbytes,
            channel=self._channel + put.what.value,
            value=self._value(put.count + self._said.get((put.stage, put.what), 0)),
        )
        self._transfers.append(transfer)

    def release(self, release: Release) -> None:
        """Report the release to the sender."""
        region = self._towards[release.stage]
        count = release.count + self._said.get((release.stage, release.what), 0)
        region.notify(self._channel + release.what.value, self._value(count))

    def drain(self, deadline_ns: int) -> None:
        """Wait until everything that was put is sent, and its memory reusable."""
        transfers, self._transfers = self._transfers, []
        failed: PeerLost | LinkClosed | DeadlineExceeded | None = None
        for transfer in transfers:
            try:
                transfer.wait(deadline_ns)
            except (PeerLost, LinkClosed, DeadlineExceeded) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def count(self, stage: int, what: Told) -> int:
        """Return the current count of a neighbour."""
        rank, channel = self._members[stage], self._channel + what.value
        cell = _native.load_cell(self._segment.base, rank, channel)
        if cell >> _EPOCH_SHIFT > self._epoch or cell == self._value(COUNT_MAX):
            raise OperationAborted(f"stage {stage} has given the step up")
        count = cell & COUNT_MAX if cell >> _EPOCH_SHIFT == self._epoch else 0
        return max(0, count - self._heard.get((stage, what), 0))

    def wait(self, awaited: Await, deadline_ns: int) -> int | None:
        """Wait, without the GIL, until a neighbour has told it; a stage that has ended meanwhile, or None.

        Raises `DeadlineExceeded`.
        """
        rank, channel = self._members[awaited.stage], self._channel + awaited.what.value
        count = awaited.count + self._heard.get((awaited.stage, awaited.what), 0)
        found = self._segment.wait(
            rank, channel, self._value(count), group_mask=self._mask, deadline_ns=deadline_ns
        )
        if found == _native.WAIT_LOST:
            lost = self._segment.lost_mask() & self._mask
            rank = (lost & -lost).bit_length() - 1
            if rank not in self._members:
                raise PeerLost(rank, "it has ended, and with it this step")
            return self._members.index(rank)
        if found == _native.WAIT_DEADLINE:
            raise DeadlineExceeded(
                f"stage {awaited.stage} (rank {rank}) lives, and has not told {awaited.count} "
                f"{awaited.what.name} in time: see what it computes, or raise the timeout"
            )
        if found == _native.WAIT_ABORTED:
            raise OperationAborted(f"stage {awaited.stage} is in a later view: get its group")
        return None

    def give_up(self) -> None:
        """Report to the neighbours that this step will not be finished: their waits end."""
        for region in self._towards.values():
            for what in Told:
                with contextlib.suppress(PeerLost, LinkClosed):
                    region.notify(self._channel + what.value, self._value(COUNT_MAX))

    def close(self) -> None:
        """Drain, and leave the neighbours' rings. Idempotent."""
        with contextlib.suppress(PeerLost, LinkClosed, DeadlineExceeded):
            self.drain(now_ns() + CLOSE_NS)
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._towards.clear()

    def _value(self, count: int) -> int:
        return self._epoch << _EPOCH_SHIFT | count


def _exchange(group: Group, data: bytes) -> list[bytes]:
    """Return every member's data, in member order."""
    sizes = group.blocking.all_gather(np.array([len(data)], np.int64)).reshape(-1)
    every = gather_rows(group, np.frombuffer(data, np.uint8))
    ends = np.cumsum(sizes)
    return [every[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]
