"""What a node says may be larger than a frame, as a view with many jobs is: then it goes in parts.

The parts of a message follow one another on one link, though others may come in between. A message that was
given up on the way, for want of room, is forgotten when the next begins.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.transport.errors import RemoteProtocolError

PART_BYTES: Final = 1 << 19
MESSAGE_BYTES_MAX: Final = 8 << 20
"""Also what may wait for room in a link: so a message fits into one that is empty."""
PARTS_MAX: Final = MESSAGE_BYTES_MAX // PART_BYTES


class Part(Contract, id="zbmd.cluster.part"):
    """Bytes of another contract. index: which of `count` parts, from 0."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=PARTS_MAX)]
    count: Annotated[int, msgspec.Meta(ge=2, le=PARTS_MAX)]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]


def frames_of(encoded: bytes) -> list[bytes]:
    """The payloads of frames for an encoded contract; none if it is over `MESSAGE_BYTES_MAX`."""
    if len(encoded) <= PART_BYTES:
        return [encoded]
    if len(encoded) > MESSAGE_BYTES_MAX:
        return []
    cut = [encoded[at : at + PART_BYTES] for at in range(0, len(encoded), PART_BYTES)]
    parts = [Part(index=index, count=len(cut), data=data) for index, data in enumerate(cut)]
    return [msgspec.msgpack.encode(part) for part in parts]


class Assembly:
    """The message that comes in parts over one link. Holds `MESSAGE_BYTES_MAX` bytes at most."""

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[bytes] = []

    def take(self, part: Part) -> bytes | None:
        """The whole message, with its last part. Raises `RemoteProtocolError` on one out of its turn."""
        if part.index == 0:
            self._count, self._parts = part.count, []
        if (part.index, part.count) != (len(self._parts), self._count):
            raise RemoteProtocolError(
                f"part {part.index} of {part.count} where {len(self._parts)} of {self._count} is next"
            )
        self._parts.append(part.data)
        if len(self._parts) < self._count:
            return None
        whole = b"".join(self._parts)
        self._count, self._parts = 0, []
        return whole
