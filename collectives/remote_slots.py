"""Where members on other hosts put what travels with their descriptors, if it is too much for a mirror.

Each member of a group that shares memory with none of the others keeps two slots for every member in its
inbox, used in turn as descriptors are: a slot is not written again before its operation's successor's
successor begins, when everybody has ended it. Where its slots begin every member says in its descriptors.
So from the second operation of an epoch on an input of up to `slot_payload_bytes` travels with its
descriptor, and an all-reduce of two hosts is one message each way. A member is sent what it reads of an
input (`Algorithm.sends`), to where all of it would have it; a long part as a message of its own, in front of
the descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives._remote import RemoteGroup
from zbmd.collectives._stepper import DESCRIPTOR_HEADER_BYTES, PUB_BYTES_MAX
from zbmd.transport._native import address_of
from zbmd.transport.checked_region import CheckedRegion
from zbmd.transport.errors import ArenaFull
from zbmd.transport.region import RegionHandle
from zbmd.transport.remote_memory import RemoteMemory
from zbmd.transport.segment import Segment
from zbmd.transport.transfer import Transfer

SLOTS_BYTES: Final = 1 << 20
"""What all members together may send a member with their descriptors."""
APART_BYTES_MIN: Final = 32 << 10
"""Input of so many bytes is a message of its own, and not copied; less is copied behind its descriptor."""
_ALIGNMENT: Final = 64


def slot_payload_bytes(members: int) -> int:
    """The longest input that travels so, in a group of so many."""
    return SLOTS_BYTES // max(1, members - 1) // _ALIGNMENT * _ALIGNMENT


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
        self._slot_bytes = (
            -(-(DESCRIPTOR_HEADER_BYTES + slot_payload_bytes(members)) // _ALIGNMENT) * _ALIGNMENT
        )
        self._array: NDArray[np.uint8] = np.empty(0, np.uint8)
        """What the others write, each its own two, in the order of their places behind ours."""
        self._own: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._handle: RegionHandle | None = None
        self._regions: dict[int, CheckedRegion] = {}
        self._learnt = False
        self.payload_max = PUB_BYTES_MAX
        if len(remote) == members - 1 > 0 and slot_payload_bytes(members) > PUB_BYTES_MAX:
            self._make()

    @property
    def address(self) -> int:
        """Of ours; 0 if there are none."""
        return address_of(self._array) if self._array.nbytes else 0

    def learn(self) -> None:
        """Hear of the others' slots, after the first meeting of all."""
        if self._learnt:
            return
        self._learnt = True
        offsets = {place: self._group.slots_of(place) for place in self._remote}
        if not self.address or len(offsets) < self._members - 1 or not all(offsets.values()):
            return
        for place, offset in offsets.items():
            self._regions[place] = self._remote[place].lent(offset, self._nbytes, writable=True)
        self._own = np.zeros(2 * self._slot_bytes, np.uint8)
        addresses = [
            self.address + self._at(place, self._place) if place != self._place else address_of(self._own)
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
        if (at or nbytes >= APART_BYTES_MIN) and self._regions[place].put_now(
            group.input_part(at, nbytes), self._at(self._place, place) + behind, channel=channel, value=0
        ):
            nbytes = 0
        elif nbytes:
            group.keep_input(at, nbytes)
            if at:
                self.put(place, behind, nbytes, channel=channel, value=0)
                nbytes = 0
        return self.put(place, offset, DESCRIPTOR_HEADER_BYTES + nbytes, channel=channel, value=value)

    def put(self, place: int, offset: int, nbytes: int, *, channel: int, value: int) -> Transfer:
        """Put a part of our slots to where the member at `place` has them; as `RemoteMemory.describe`.

        It is a part of one array: a device that must know memory knows it.
        """
        at = self._at(self._place, place) + offset
        data = self._own[offset : offset + nbytes]
        return self._regions[place].put(data, at, channel=channel, value=value)

    def _at(self, writer: int, owner: int) -> int:
        """Where in the owner's memory the slots of another place are."""
        return (writer - owner - 1) % self._members * 2 * self._slot_bytes

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        if self._handle is not None:
            self._segment.regions.take_back(self._handle)
            self._handle = None
        self._array = self._own = np.empty(0, np.uint8)

    @property
    def _nbytes(self) -> int:
        return 2 * (self._members - 1) * self._slot_bytes

    def _make(self) -> None:
        try:
            array = self._segment.inbox.empty(self._nbytes, np.uint8)
        except ArenaFull:
            return  # then inputs are fetched, as without slots
        offset = self._segment.inbox.offset_of(array)
        assert offset is not None, "it lies in the inbox"
        array[:] = 0
        self._array = array
        self._handle = self._segment.regions.lend(array, offset, writable=True)
