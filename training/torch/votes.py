"""A rank's vote as bytes: its ballot, its part of the means, what is recorded, what it asks all ranks for,
what it has written of a checkpoint, and its own part of the state.

Every rank keeps the votes of the last commit: a replacement gets its predecessor's own state out of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch.encoding import from_blob, to_blob
from zbmd.training.torch.transaction import Ballot
from zbmd.transport.errors import RemoteProtocolError, UserError

_HEAD: Final = struct.Struct("<qIIBBIIII")
"""Version, means of each share, shares, whether it holds, wishes, bytes noted and written, digests, copied"""
MEET: Final = 1 << 7
"""A wish of a loop, beside those of `Wish`: to take in ranks that wait, before the next step."""
MEANS_MAX: Final = 1_024
DIGESTS_MAX: Final = 1 << 20


class Noted(msgspec.Struct, array_like=True, frozen=True):
    """The part of a vote that is recorded: the step's number, names of means, the batch of each share."""

    step: int
    names: tuple[str, ...]
    drawn: tuple[Drawn, ...]


class Wrote(msgspec.Struct, array_like=True, frozen=True):
    """A rank's part of the checkpoint under way, once it is durable.

    stem: of the names of its shards. step: whose state it is. digest: of the header of its shard; "": none.
    failed: why it could not be written, or the last one not named; "" if it could.
    """

    stem: str
    step: int
    digest: str
    failed: str = ""


_noted: Final = msgspec.msgpack.Decoder(Noted)
_wrote: Final = msgspec.msgpack.Decoder(Wrote)


def pack(
    ballot: Ballot,
    means: Sequence[Mapping[str, float]],
    own: Any,
    noted: Noted | None = None,
    *,
    asks: int = 0,
    wrote: Wrote | None = None,
) -> bytes:
    """Return a vote. own: as `encoding.encode` takes it. noted: None: the loop is not recorded.

    means: of each share of the batch that this rank has. asks: the wishes of this rank.
    """
    values = [each[name] for each in means for name in sorted(each)]
    blob = to_blob(own, "the state of this rank alone")
    told = b"" if noted is None else msgspec.msgpack.encode(noted)
    done = b"" if wrote is None else msgspec.msgpack.encode(wrote)
    digests = (*ballot.digests, *ballot.copy)
    counts = (len(told), len(done), len(ballot.digests), len(ballot.copy))
    widths = {len(each) for each in means} or {0}
    if len(widths) > 1:
        raise UserError("run.mean() gets other values in one share of a batch than in another: give the same")
    head = _HEAD.pack(ballot.version, *widths, max(1, len(means)), ballot.holds, asks, *counts)
    packed = struct.pack(f"<{len(values)}d{len(digests)}Q", *values, *digests)
    return head + packed + told + done + blob


def ballot_of(row: bytes) -> Ballot:
    """Return the ballot of a vote. Raises `RemoteProtocolError`."""
    head = _head(row)
    digests = struct.unpack_from(f"<{head.digests + head.copy}Q", row, _HEAD.size + 8 * head.values)
    return Ballot(
        version=head.version,
        holds=head.holds != 0,
        digests=digests[: head.digests],
        copy=digests[head.digests :],
    )


def means_of(rows: Sequence[bytes], names: Sequence[str]) -> dict[str, float]:
    """Return the means over all shares of what ranks gave under these names, in sorted order."""
    heads = [_head(row) for row in rows]
    counts, width = [head.means for head in heads], len(names)
    if set(counts) != {width}:
        raise RemoteProtocolError(
            f"ranks give {counts} values to run.mean() in one step, this one {width}: all give the same"
        )
    parts = [
        struct.unpack_from(f"<{head.values}d", row, _HEAD.size) for head, row in zip(heads, rows, strict=True)
    ]
    every = [value for part in parts for value in part]
    return {name: sum(every[at::width]) * width / len(every) for at, name in enumerate(names)}


def noted_of(row: bytes, ranks: int) -> Noted | None:
    """Return what is to be recorded of a vote of one of `ranks`. Raises `RemoteProtocolError`."""
    head = _head(row)
    if not head.noted:
        return None
    try:
        noted = _noted.decode(row[head.begin : head.begin + head.noted])
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"what a vote says of its batch: {error}") from None
    if len(noted.names) != head.means or not noted.drawn:
        raise RemoteProtocolError(f"{len(noted.names)} names of {head.means} means came in a vote")
    for each in noted.drawn:
        each.check(ranks)
    return noted


def asked_in(rows: Sequence[bytes]) -> int:
    """Return the wishes of all ranks together. Raises `RemoteProtocolError`."""
    asked = 0
    for row in rows:
        asked |= _head(row).asks
    return asked


def without_wishes(row: bytes) -> bytes:
    """Return a vote of a run that has ended: nobody asks for anything any more."""
    head = _head(row)
    return _HEAD.pack(*head._replace(asks=0)) + row[_HEAD.size :]


def written_in(rows: Sequence[bytes]) -> list[Wrote]:
    """Return what ranks have written of a checkpoint; empty unless all have. Raises `RemoteProtocolError`.

    One that has failed stands for all.
    """
    found = [each for row in rows if (each := _wrote_of(row)) is not None]
    failed = [each for each in found if each.failed]
    return failed[:1] or (found if len(found) == len(rows) else [])


def _wrote_of(row: bytes) -> Wrote | None:
    head = _head(row)
    if not head.wrote:
        return None
    begin = head.begin + head.noted
    try:
        return _wrote.decode(row[begin : begin + head.wrote])
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"what a vote says of a checkpoint: {error}") from None


def own_of(row: bytes) -> Any:
    """Return what a rank has put into its vote as its own. Raises `RemoteProtocolError`."""
    head = _head(row)
    return from_blob(row[head.begin + head.noted + head.wrote :], "the own state of a rank in its vote")


class _Head(NamedTuple):
    version: int
    means: int
    shares: int
    holds: int
    asks: int
    noted: int
    wrote: int
    digests: int
    copy: int

    @property
    def values(self) -> int:
        """Return the number of means of all shares."""
        return self.means * self.shares

    @property
    def begin(self) -> int:
        """Return the offset of the noted bytes."""
        return _HEAD.size + 8 * (self.values + self.digests + self.copy)


def _head(row: bytes) -> _Head:
    if len(row) < _HEAD.size:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes")
    head = _Head(*_HEAD.unpack_from(row))
    if (
        max(head.means, head.shares) > MEANS_MAX
        or max(head.digests, head.copy) > DIGESTS_MAX
        or len(row) < head.begin + head.noted + head.wrote
    ):
        raise RemoteProtocolError(f"a vote of {len(row)} bytes begins with {head}")
    return head
