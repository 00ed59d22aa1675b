"""Contracts of tagged messages between the members of a group."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.collectives.programs.reductions import DTYPE_NAMES, itemsize
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

AXES_MAX: Final = 32
ARRAY_BYTES_MAX: Final = 2**48

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class TaggedMessage(Contract, id="zbmd.tagged.message"):
    """An array: `data` if it is small, otherwise where it lies. `digest`: XXH3 of its bytes if it is lent."""

    epoch: Count
    channel: Count
    number: Count
    tag: Count
    dtype: Count
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=AXES_MAX)]
    data: bytes
    lent: RegionHandle | None
    digest: bytes


class TaggedTaken(Contract, id="zbmd.tagged.taken"):
    """The receiver has received all of a message."""

    epoch: Count
    channel: Count
    number: Count


class TaggedClosed(Contract, id="zbmd.tagged.closed", parting=True):
    """The sender has closed the group: it neither sends nor accepts messages any more."""

    epoch: Count
    channel: Count


class TaggedLinkEnded(Contract, id="zbmd.tagged.link_ended"):
    """Sent by a process to itself, after everything from a rank's link: the link has ended."""

    rank: Count
    incarnation: Count


class TaggedGreeting(Contract, id="zbmd.tagged.greeting"):
    """A member of an elastic group is in the view of epoch `view`; see `elastic_machine.Greeted`."""

    epoch: Count
    channel: Count
    view: Annotated[int, msgspec.Meta(ge=1, lt=1 << 29)]
    since: Annotated[int, msgspec.Meta(ge=0, lt=1 << 29)]


def described(message: TaggedMessage, source: int) -> int:
    """Return the elements of a message's array. Raises `RemoteProtocolError` if it does not fit its bytes."""
    if message.dtype >= len(DTYPE_NAMES):
        raise RemoteProtocolError(f"rank {source} sent an array of no dtype")
    size = math.prod(message.shape)
    nbytes = size * itemsize(message.dtype)
    came = len(message.data) if message.lent is None else message.lent.nbytes
    if came != nbytes or nbytes > ARRAY_BYTES_MAX:
        raise RemoteProtocolError(f"rank {source} sent {came} bytes for an array of {nbytes}")
    return size
