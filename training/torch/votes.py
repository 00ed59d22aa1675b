"""A rank's vote as bytes: its ballot, its part of the means, what is recorded, and its own part of the state.

Every rank keeps the votes of the last commit: a replacement gets its predecessor's own state out of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch.encoding import decode, encode, from_bytes, to_bytes
from zbmd.training.torch.transaction import Ballot
from zbmd.transport.errors import RemoteProtocolError

_HEAD: Final = struct.Struct("<qQIBI")
MEANS_MAX: Final = 1_024


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
    head = _HEAD.pack(ballot.version, ballot.digest, len(names), ballot.holds, len(told))
    return head + values + told + blob


def ballot_of(row: bytes) -> Ballot:
    """Return the ballot of a vote. Raises `RemoteProtocolError`."""
    version, digest, _, holds, _ = _head(row)
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


def noted_of(row: bytes, ranks: int) -> Noted | None:
    """Return what is to be recorded of a vote of one of `ranks`. Raises `RemoteProtocolError`."""
    head = _head(row)
    begin = _HEAD.size + 8 * head[2]
    if not head[4]:
        return None
    try:
        noted = _noted.decode(row[begin : begin + head[4]])
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"what a vote says of its batch: {error}") from None
    if len(noted.names) != head[2]:
        raise RemoteProtocolError(f"{len(noted.names)} names of {head[2]} means came in a vote")
    noted.drawn.check(ranks)
    return noted


def own_of(row: bytes) -> Any:
    """Return what a rank has put into its vote as its own. Raises `RemoteProtocolError`."""
    head = _head(row)
    begin = _HEAD.size + 8 * head[2] + head[4]
    try:
        own = _own.decode(row[begin:])
        tensors = [from_bytes(*each) for each in own.tensors]
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"the own state of a rank in its vote: {error}") from None
    return decode(own.tree, tensors)


def _head(row: bytes) -> tuple[int, int, int, bool, int]:
    if len(row) < _HEAD.size:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes")
    version, digest, means, holds, noted = _HEAD.unpack_from(row)
    if means > MEANS_MAX or len(row) < _HEAD.size + 8 * means + noted:
        raise RemoteProtocolError(
            f"a vote of {len(row)} bytes with {means} means and {noted} bytes of records"
        )
    return version, digest, means, holds != 0, noted
