"""Sends to members on other hosts: copies of what is put, and inputs that travel with descriptors.

A program may overwrite the source of a put as soon as it has been put, so a copy is sent, from buffers that
are kept from run to run (`Outgoing`). A device has to know the memory that it sends from: it knows this after
the first put, where a new copy would be registered each time.

An input that is too large for a mirror goes to slots (`Slots`). Each member of a group that shares memory
with none of the others keeps two slots for every member in its inbox, used in turn as descriptors are: a slot
is not written again before its operation's successor's successor begins, when everybody has ended it. Where
its slots begin every member says in its descriptors. So from the second operation of an epoch on an input of
up to `slot_payload_bytes` travels with its descriptor, and an all-reduce of two hosts is one message each
way. A member is sent what it reads of an input (`Algorithm.sends`), to where all of it would have it; a long
part as messages of their own, in front of the descriptor.

In a group of two over TCP slots are large if the inboxes of both have room for them and for others; which
each says in the lowest bit of where its slots begin, and the shorter are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.native._remote_stepper import RemoteGroup
from zbmd.collectives.native._stepper import DESCRIPTOR_HEADER_BYTES, PUB_BYTES_MAX
from zbmd.transport.errors import ArenaFull
from zbmd.transport.memory.region import CheckedRegion, RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import DONE, Transfer
from zbmd.transport.native._native import address_of
from zbmd.transport.rdma.remote_memory import RemoteMemory

SEND_BUFFERS_MAX: Final = 8
"""Kept; what is put while all of them are under way has memory of its own."""
SEND_BUFFER_BYTES_MIN: Final = 4096


@dataclass(slots=True, eq=False)
class SendBuffer:
    """Memory for one put at a time. transfer: the last one's; its bytes stay as they are until it is done."""

    array: NDArray[np.uint8]
    transfer: Transfer = DONE


class Outgoing:
    """The send buffers of one executor. For one thread at a time."""

    def __init__(self) -> None:
        self._buffers: list[SendBuffer] = []

    def take(self, nbytes: int) -> SendBuffer:
        """Return the smallest free one of at least `nbytes` bytes; the caller sets its transfer."""
        free = [buffer for buffer in self._buffers if buffer.transfer.done]
        large = [buffer for buffer in free if buffer.array.nbytes >= nbytes]
        if large:
            return min(large, key=lambda buffer: buffer.array.nbytes)
        # A power of two: puts of about one size share their buffers.
        made = SendBuffer(np.empty(max(SEND_BUFFER_BYTES_MIN, 1 << (nbytes - 1).bit_length()), np.uint8))
        if len(self._buffers) == SEND_BUFFERS_MAX:
            if not free:
                return made
            self._buffers.remove(min(free, key=lambda buffer: buffer.array.nbytes))
        self._buffers.append(made)
        return made


SLOTS_BYTES: Final = 1 << 20
"""Bytes that all members together may send a member with their descriptors."""
PAIR_BYTES: Final = 4 << 20
"""The same in a group of two, where the inbox has room: longer inputs are asked for in less time."""
PAIR_SPARE_BYTES: Final = 8 << 20
"""Bytes of the inbox that they must leave to others."""
PART_BYTES: Final = 1 << 20
"""Input is sent in messages of so much: the tag of one is checked while the next is sent."""
APART_BYTES_MIN: Final = 32 << 10
"""Input of so many bytes is a message of its own, and not copied; less is copied behind its descriptor."""
_ALIGNMENT: Final = 64


def slot_payload_bytes(members: int, *, large: bool = False) -> int:
    """The longest input that travels so, in a group of so many. large: of two whose inboxes have room."""
    in_all = PAIR_BYTES if large else SLOTS_BYTES
    return in_all // max(1, members - 1) // _ALIGNMENT * _ALIGNMENT


def _slot_bytes(members: int, *, large: bool) -> int:
    nbytes = DESCRIPTOR_HEADER_BYTES + slot_payload_bytes(members, large=large)
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Slots:
    """One member's slots for the others, and what it knows of theirs.

    remote: the others' memory by place; slots are had only if these are all. `payload_max` is what travels
    with a descriptor: more from `learn` on, if every member has slots.
    """

    def __init__(
        self,
        segment: Segment,
        group: RemoteGroup,
        *,
        members: int,
        place: int,
        remote: Mapping[int, RemoteMemory],
    ) -> None:
        self._segment = segment
        self._group = group
        self._members = members
        self._place = place
        self._remote = remote
        self._large = False
        """Whether ours are large; they are used as such if all members' are."""
        self._slot_bytes = 0
        self._array: NDArray[np.uint8] = np.empty(0, np.uint8)
        """The slots that the others write, each its own two, in the order of their places after ours."""
        self._own: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._handle: RegionHandle | None = None
        self._regions: dict[int, CheckedRegion] = {}
        self._learnt = False
        self.payload_max = PUB_BYTES_MAX
        if len(remote) == members - 1 > 0 and slot_payload_bytes(members) > PUB_BYTES_MAX:
            self._make()

    @property
    def told(self) -> int:
        """The offset of our slots, as descriptors report it, plus 1 if they are large; 0: there are none."""
        return address_of(self._array) + self._large if self._array.nbytes else 0

    def learn(self) -> None:
        """Hear of the others' slots, after the first meeting of all."""
        if self._learnt:
            return
        self._learnt = True
        offsets = {place: self._group.slots_of(place) for place in self._remote}
        if not self._array.nbytes or len(offsets) < self._members - 1 or not all(offsets.values()):
            return
        for place, offset in offsets.items():
            large = offset % _ALIGNMENT != 0
            region = self._remote[place].lent(offset - large, self._nbytes(large=large), writable=True)
            self._regions[place] = region
        large = self._large and all(offset % _ALIGNMENT for offset in offsets.values())
        self._slot_bytes = _slot_bytes(self._members, large=large)
        self._own = np.zeros(2 * self._slot_bytes, np.uint8)
        addresses = [
            address_of(self._array) + self._at(place, self._place)
            if place != self._place
            else address_of(self._own)
            for place in range(self._members)
        ]
        self._group.widen(addresses, self._slot_bytes)
        self.payload_max = self._slot_bytes - DESCRIPTOR_HEADER_BYTES

    def send(self, place: int, at: int, nbytes: int, *, channel: int, value: int) -> Transfer:
        """Send the member at `place` these bytes of what the operation publishes, then our descriptor.

        They go from where the caller has them, if they have left when this returns, and else from our slot.
        """
        group, offset = self._group, self._group.descriptor_offset
        behind = offset + DESCRIPTOR_HEADER_BYTES + at
        # A notification that nobody waits for goes with what is sent in front: the cell holds more than 0.
        sent = self._send_now(place, at, nbytes, channel) if at or nbytes >= APART_BYTES_MIN else 0
        nbytes -= sent
        if nbytes:
            group.keep_input(at + sent, nbytes)
            if at + sent:
                self.put(place, behind + sent, nbytes, channel=channel, value=0)
                nbytes = 0
        return self.put(place, offset, DESCRIPTOR_HEADER_BYTES + nbytes, channel=channel, value=value)

    def _send_now(self, place: int, at: int, nbytes: int, channel: int) -> int:
        """Send as much of it as leaves while we wait; how much that is."""
        to = self._at(self._place, place) + self._group.descriptor_offset + DESCRIPTOR_HEADER_BYTES
        for sent in range(0, nbytes, PART_BYTES):
            part = self._group.input_part(at + sent, min(PART_BYTES, nbytes - sent))
            if not self._regions[place].put_now(part, to + at + sent, channel=channel, value=0):
                return sent
        return nbytes

    def put(self, place: int, offset: int, nbytes: int, *, channel: int, value: int) -> Transfer:
        """Put a part of our slots to where the member at `place` has them; as `RemoteMemory.describe`.

        It is a part of one array: a device that must know memory knows it.
        """
        at = self._at(self._place, place) + offset
        data = self._own[offset : offset + nbytes]
        return self._regions[place].put(data, at, channel=channel, value=value)

    def _at(self, writer: int, owner: int) -> int:
        """Return the offset, in the owner's memory, of the slots of another place."""
        return (writer - owner - 1) % self._members * 2 * self._slot_bytes

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        if self._handle is not None:
            self._segment.regions.take_back(self._handle)
            self._handle = None
        self._array = self._own = np.empty(0, np.uint8)

    def _nbytes(self, *, large: bool) -> int:
        return 2 * (self._members - 1) * _slot_bytes(self._members, large=large)

    def _make(self) -> None:
        inbox = self._segment.inbox
        if self._members == 2 and not any(memory.one_sided for memory in self._remote.values()):
            try:
                inbox.empty(self._nbytes(large=True) + PAIR_SPARE_BYTES, np.uint8)  # and given back
            except ArenaFull:
                self._large = False
            else:
                self._large = True
        try:
            array = inbox.empty(self._nbytes(large=self._large), np.uint8)
        except ArenaFull:
            return  # then inputs are fetched, as without slots
        offset = self._segment.inbox.offset_of(array)
        assert offset is not None, "it lies in the inbox"
        array[:] = 0
        self._array = array
        self._handle = self._segment.regions.lend(array, offset, writable=True)
