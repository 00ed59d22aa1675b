"""Contracts of tagged messages between the members of a group, and what members report of their end of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.collectives.programs.reductions import DTYPE_NAMES, itemsize
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

REASON_CHARS_MAX: Final = 1000
"""Characters of a reason, or of a call, in a message."""
CALLS_MAX: Final = 8
"""Calls in a message."""


class MemberEnds:
    """One group's. Noted on the loop; read by the threads whose operations have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reasons: dict[int, str] = {}
        self._calls: dict[int, tuple[str, ...]] = {}

    def note(self, rank: int, reason: str, calls: tuple[str, ...] = ()) -> None:
        """Note a member's report; the first one of a member counts."""
        with self._changed:
            self._reasons.setdefault(rank, reason)
            if calls:
                self._calls.setdefault(rank, calls)
            self._changed.notify_all()

    @property
    def first(self) -> tuple[int, str] | None:
        """Return the member that reported first, and its reason."""
        return next(iter(self._reasons.items()), None)

    def reason_of(self, rank: int) -> str | None:
        """Return why a member ended its part; None if it did not say."""
        return self._reasons.get(rank)

    def calls_of(self, rank: int) -> tuple[str, ...]:
        """Return the last calls of a member that has failed, the latest first; none if it did not say."""
        return self._calls.get(rank, ())

    def wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Wait for more reports, at most `limit_s`, until this holds."""
        with self._changed:
            self._changed.wait_for(until, limit_s)


AXES_MAX: Final = 32
ARRAY_BYTES_MAX: Final = 2**48

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
"""For people: what follows "rank 3": "closed the group"; empty if nothing is to be said."""


class TaggedMessage(Contract, id="zbmd.tagged.message", version=2):
    """An array: `data` if it is small, otherwise where it lies. `digest`: XXH3 of its bytes if it is lent.

    If these are fewer bytes than the array has, they are its first ones: the receiver asks for the others.
    """

    epoch: Count
    channel: Count
    number: Count
    tag: Count
    dtype: Count
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=AXES_MAX)]
    data: bytes
    lent: RegionHandle | None
    digest: bytes
    label: Text = ""
    """The array in its sender's words: `float32[4,3]`."""

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array, as it is described."""
        return math.prod(self.shape) * itemsize(self.dtype)


class TaggedTaken(Contract, id="zbmd.tagged.taken"):
    """The receiver has received all of a message."""

    epoch: Count
    channel: Count
    number: Count


class TaggedAsked(Contract, id="zbmd.tagged.asked"):
    """The receiver of a message in pieces has read this many after the first, in this reading of it.

    The first of a reading asks for its pieces; see `pieces`.
    """

    epoch: Count
    channel: Count
    number: Count
    reading: Count
    read: Count


class TaggedPiece(Contract, id="zbmd.tagged.piece"):
    """More of a message's array: `data`, or where it lies and its digest. `piece`: its place in the reading.

    Empty: the sender has given the message up.
    """

    epoch: Count
    channel: Count
    number: Count
    reading: Count
    piece: Count
    data: bytes
    lent: RegionHandle | None
    digest: bytes


class TaggedClosed(Contract, id="zbmd.tagged.closed", version=2, parting=True):
    """The sender has closed the group: it neither sends nor accepts messages any more."""

    epoch: Count
    channel: Count
    reason: Text = ""


class TaggedFailed(Contract, id="zbmd.tagged.failed", parting=True):
    """The sender's operations in the group have ended. `calls`: the last, in their callers' words."""

    epoch: Count
    channel: Count
    reason: Text
    calls: Annotated[tuple[Text, ...], msgspec.Meta(max_length=CALLS_MAX)]


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
    if not min(nbytes, 1) <= came <= nbytes <= ARRAY_BYTES_MAX:
        raise RemoteProtocolError(f"rank {source} sent {came} bytes for an array of {nbytes}")
    return size


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the dtype of a code."""
    if DTYPE_NAMES[code] == "bfloat16":
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return narrow
    return np.dtype(DTYPE_NAMES[code])
