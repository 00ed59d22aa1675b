"""A rank's vote as bytes: its ballot, its part of the means, and what of the state is its own.

Every rank keeps the votes of the last commit: a replacement gets its predecessor's own state out of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from zbmd.training.torch.encoding import decode, encode, from_bytes, to_bytes
from zbmd.training.torch.transaction import Ballot
from zbmd.transport.errors import RemoteProtocolError

_HEAD: Final = struct.Struct("<qQIB")
MEANS_MAX: Final = 1_024


class Own(msgspec.Struct, array_like=True, frozen=True):
    """A rank's own part of the state. tree: without its tensors, which follow as (dtype, shape, bytes)."""

    tree: bytes
    tensors: list[tuple[str, list[int], bytes]]


_own: Final = msgspec.msgpack.Decoder(Own)


def pack(ballot: Ballot, means: Mapping[str, float], own: Any) -> bytes:
    """Return a vote. own: as `encoding.encode` takes it."""
    names = sorted(means)
    values = struct.pack(f"<{len(names)}d", *(means[name] for name in names))
    tree, tensors = encode(own, "the state of this rank alone")
    blob = msgspec.msgpack.encode(Own(tree, [to_bytes(tensor) for tensor in tensors]))
    return _HEAD.pack(ballot.version, ballot.digest, len(names), ballot.holds) + values + blob


def ballot_of(row: bytes) -> Ballot:
    """Return the ballot of a vote. Raises `RemoteProtocolError`."""
    version, digest, _, holds = _head(row)
    return Ballot(version=version, digest=digest, holds=holds)


def means_of(rows: Sequence[bytes], names: Sequence[str]) -> dict[str, float]:
    """Return the means over all ranks of what they gave under these names, in sorted order."""
    parts = [struct.unpack_from(f"<{_head(row)[2]}d", row, _HEAD.size) for row in rows]
    counts = [len(part) for part in parts]
    if set(counts) != {len(names)}:
        raise RemoteProtocolError(
            f"ranks give {counts} values to run.mean() in one step, this one {len(names)}: all give the same"
        )
    return {name: sum(part[at] for part in parts) / len(parts) for at, name in enumerate(names)}


def own_of(row: bytes) -> Any:
    """Return what a rank has put into its vote as its own. Raises `RemoteProtocolError`."""
    begin = _HEAD.size + 8 * _head(row)[2]
    try:
        own = _own.decode(row[begin:])
        tensors = [from_bytes(*each) for each in own.tensors]
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"the own state of a rank in its vote: {error}") from None
    return decode(own.tree, tensors)


def _head(row: bytes) -> tuple[int, int, int, bool]:
    if len(row) < _HEAD.size:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes")
    version, digest, means, holds = _HEAD.unpack_from(row)
    if means > MEANS_MAX or len(row) < _HEAD.size + 8 * means:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes with {means} means")
    return version, digest, means, holds != 0
