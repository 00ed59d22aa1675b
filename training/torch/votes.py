"""A rank's vote as bytes: its ballot, its part of the means, what is recorded, and its own part of the state.

Every rank keeps the votes of the last commit: a replacement gets its predecessor's own state out of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch.encoding import decode, encode, from_bytes, to_bytes
from zbmd.training.torch.transaction import Ballot
from zbmd.transport.errors import RemoteProtocolError

_HEAD: Final = struct.Struct("<qQIBIII")
"""Version, digest, means, whether it holds, bytes noted, digests of the shard and of the copy."""
MEANS_MAX: Final = 1_024
DIGESTS_MAX: Final = 1 << 20


class Own(msgspec.Struct, array_like=True, frozen=True):
    """A rank's own part of the state. tree: without its tensors, which follow as (dtype, shape, bytes)."""

    tree: bytes
    tensors: list[tuple[str, list[int], bytes]]


class Noted(msgspec.Struct, array_like=True, frozen=True):
    """The part of a vote that is recorded: the number of the step, names of means, the batch."""

    step: int
    names: tuple[str, ...]
    drawn: Drawn


_own: Final = msgspec.msgpack.Decoder(Own)
_noted: Final = msgspec.msgpack.Decoder(Noted)


def pack(ballot: Ballot, means: Mapping[str, float], own: Any, noted: Noted | None = None) -> bytes:
    """Return a vote. own: as `encoding.encode` takes it. noted: None: the loop is not recorded."""
    names = sorted(means)
    values = struct.pack(f"<{len(names)}d", *(means[name] for name in names))
    tree, tensors = encode(own, "the state of this rank alone")
    blob = msgspec.msgpack.encode(Own(tree, [to_bytes(tensor) for tensor in tensors]))
    told = b"" if noted is None else msgspec.msgpack.encode(noted)
    digests = (*ballot.shard, *ballot.copy)
    counts = (len(told), len(ballot.shard), len(ballot.copy))
    head = _HEAD.pack(ballot.version, ballot.digest, len(names), ballot.holds, *counts)
    return head + values + struct.pack(f"<{len(digests)}Q", *digests) + told + blob


def ballot_of(row: bytes) -> Ballot:
    """Return the ballot of a vote. Raises `RemoteProtocolError`."""
    head = _head(row)
    digests = struct.unpack_from(f"<{head.shard + head.copy}Q", row, _HEAD.size + 8 * head.means)
    return Ballot(
        version=head.version,
        digest=head.digest,
        holds=head.holds != 0,
        shard=digests[: head.shard],
        copy=digests[head.shard :],
    )


def means_of(rows: Sequence[bytes], names: Sequence[str]) -> dict[str, float]:
    """Return the means over all ranks of what they gave under these names, in sorted order."""
    parts = [struct.unpack_from(f"<{_head(row).means}d", row, _HEAD.size) for row in rows]
    counts = [len(part) for part in parts]
    if set(counts) != {len(names)}:
        raise RemoteProtocolError(
            f"ranks give {counts} values to run.mean() in one step, this one {len(names)}: all give the same"
        )
    return {name: sum(part[at] for part in parts) / len(parts) for at, name in enumerate(names)}


def noted_of(row: bytes, ranks: int) -> Noted | None:
    """Return what is to be recorded of a vote of one of `ranks`. Raises `RemoteProtocolError`."""
    head = _head(row)
    if not head.noted:
        return None
    try:
        noted = _noted.decode(row[head.begin : head.begin + head.noted])
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"what a vote says of its batch: {error}") from None
    if len(noted.names) != head.means:
        raise RemoteProtocolError(f"{len(noted.names)} names of {head.means} means came in a vote")
    noted.drawn.check(ranks)
    return noted


def own_of(row: bytes) -> Any:
    """Return what a rank has put into its vote as its own. Raises `RemoteProtocolError`."""
    head = _head(row)
    try:
        own = _own.decode(row[head.begin + head.noted :])
        tensors = [from_bytes(*each) for each in own.tensors]
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"the own state of a rank in its vote: {error}") from None
    return decode(own.tree, tensors)


class _Head(NamedTuple):
    version: int
    digest: int
    means: int
    holds: int
    noted: int
    shard: int
    copy: int

    @property
    def begin(self) -> int:
        """Return the offset of the noted bytes."""
        return _HEAD.size + 8 * (self.means + self.shard + self.copy)


def _head(row: bytes) -> _Head:
    if len(row) < _HEAD.size:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes")
    head = _Head(*_HEAD.unpack_from(row))
    if (
        head.means > MEANS_MAX
        or max(head.shard, head.copy) > DIGESTS_MAX
        or len(row) < head.begin + head.noted
    ):
        raise RemoteProtocolError(f"a vote of {len(row)} bytes begins with {head}")
    return head
