"""Messages between a rank and the snapshot process that writes its shards: the payloads of `Work`, `Worked`.

Whatever a rank sends is checked before it is used: spans against the memory that is held, sizes against
bounds.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from zbmd.actors.snapshots.messages import PACKET_BYTES_MAX
from zbmd.training.autograd.parameter_layout import ParameterSlice
from zbmd.training.checkpoint.blocks import DTYPES, Codec
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.host.process import decoded_packet

ARGUMENTS_BYTES_MAX: Final = 256 << 20
"""Of the description of a shard: about 100 bytes for each of its arrays."""
VERSION_MAX: Final = 1 << 40
RANKS_MAX: Final = 2047
_HEAD: Final = 8
ALIGNMENT: Final = 64


class Span(msgspec.Struct, frozen=True, array_like=True):
    """An array of a shard: `count` elements from byte `at` of the rank's block, or of what came with it."""

    at: int
    count: int
    dtype: str
    attached: bool = False

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        return self.count * DTYPES[self.dtype].itemsize


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """A `Piece`, whose arrays lie in memory that is held. dtype: that is written; "": each as it is."""

    name: str
    cut: ParameterSlice
    names: tuple[str, ...]
    dtype: str
    spans: tuple[Span, ...]


class SaveShard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Write the shard of `rank`, at `place` of `places`, of a checkpoint of `version`.

    homes: for each place, the lowest one whose rank asks the same process. block: the name of
    the memory; counter, count: where in it a u64 changes before the version is overwritten, and its value.
    storage: a directory or URL; keep, every: of `Retention`; log: the commit log, as this host names it.
    attached: the bytes of arrays that came with it.
    """

    version: int
    stem: str
    rank: int
    place: int
    homes: tuple[int, ...]
    block: str
    counter: int
    count: int
    storage: str
    log: str
    plan: str
    loss_scale: tuple[float, ...]
    keep: int
    every: int
    codec: Codec
    pieces: tuple[HeldPiece, ...]
    attached: int = 0

    @property
    def places(self) -> int:
        """The shards of the checkpoint."""
        return len(self.homes)

    @property
    def here(self) -> list[int]:
        """The places whose ranks ask this process."""
        return [place for place, home in enumerate(self.homes) if home == self.homes[self.place]]

    @property
    def together(self) -> bool:
        """Whether all ranks ask this process."""
        return not any(self.homes)

    def checkpoint(self) -> tuple[object, ...]:
        """Return what all shards of a checkpoint on a host have in common."""
        return (*self.everywhere(), self.storage, self.log, self.keep, self.every, self.codec)

    def everywhere(self) -> tuple[object, ...]:
        """Return what all shards of a checkpoint have in common; a directory may have other names."""
        return (self.version, self.stem, self.homes, self.plan, self.loss_scale)

    def check(self) -> None:
        """Raise `RemoteProtocolError` for a request that no rank makes."""
        numbers = (self.rank, self.place, self.counter, self.count, self.every, self.attached)
        if min(numbers) < 0 or not 0 <= self.version <= VERSION_MAX or self.keep < 1:
            raise RemoteProtocolError(f"a rank asks for a shard with impossible numbers: {numbers}")
        if not self.place < self.places <= RANKS_MAX:
            raise RemoteProtocolError(f"a rank asks for a shard at place {self.place} of {self.places}")
        if any(not 0 <= home <= at or self.homes[home] != home for at, home in enumerate(self.homes)):
            raise RemoteProtocolError(f"a rank asks for a shard of hosts that are none: {self.homes[:8]}")
        for piece in self.pieces:
            if len(piece.names) < len(piece.spans) or piece.dtype not in ("", *DTYPES):
                raise RemoteProtocolError(f"a piece of {piece.name} with {len(piece.spans)} arrays")
            for span in piece.spans:
                if min(span.at, span.count) < 0 or span.dtype not in DTYPES:
                    raise RemoteProtocolError(f"an array of {piece.name} at {span.at}, as {span.dtype}")
                if span.attached and span.at + span.nbytes > self.attached:
                    raise RemoteProtocolError(f"an array of {piece.name} beyond what came with the request")


class Save(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """A `SaveShard` is in the memfd that comes with this: see `arguments_of`."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A rank waits: answer `ALIVE`. hurry: all ranks wait for the checkpoint `stem`."""

    stem: str
    hurry: bool


class Decided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """The step of the checkpoint `stem` is committed, or the ranks went back behind it."""

    stem: str
    is_committed: bool


class Event(IntEnum):
    """A stage of a shard, as its rank hears of it."""

    COPIED = 0
    """Its memory may change."""
    WROTE = 1
    """The shard is durable; another process, or the ranks, publish the checkpoint."""
    PUBLISHED = 2
    FAILED = 3
    """A write failed, and is tried again."""
    GAVE_UP = 4
    REFUSED = 5
    """This process cannot write it: it does not hold the memory."""
    DAMAGED = 6
    ALIVE = 7


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard"):
    """Progress of the checkpoint `stem`. header: the digest of the shard's, 0 for none."""

    stem: str
    event: Event
    header: int = 0
    reason: str = ""


Asked: TypeAlias = Save | Ask | Decided
_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_heard = msgspec.msgpack.Decoder(Heard)
_shard = msgspec.msgpack.Decoder(SaveShard)
encode = msgspec.msgpack.Encoder().encode


def decode_asked(payload: bytes) -> Asked:
    """Decode what a rank asks for. Raises `RemoteProtocolError`."""
    problem = "a rank asked the snapshot process for nothing that it knows"
    return decoded_packet(_asked, payload, problem, PACKET_BYTES_MAX)


def decode_heard(payload: bytes) -> Heard:
    """Decode the progress of a shard. Raises `RemoteProtocolError`."""
    heard = decoded_packet(_heard, payload, "the snapshot process sent no progress", PACKET_BYTES_MAX)
    if not 0 <= heard.header < 1 << 64:
        raise RemoteProtocolError(f"the snapshot process sent the digest {heard.header}: expected a u64")
    return heard


def decode_shard(data: bytes) -> SaveShard:
    """Decode and check the description of a shard. Raises `RemoteProtocolError`."""
    try:
        request = _shard.decode(data)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a rank described no shard: {error}") from error
    request.check()
    return request


def put_arguments(memory: int, request: SaveShard) -> int:
    """Write a request into a memfd; return the first byte of what is attached to it."""
    data = encode(request)
    os.pwrite(memory, len(data).to_bytes(_HEAD, "little") + data, 0)
    return _attached_at(len(data))


def arguments_of(memory: int) -> tuple[SaveShard, int]:
    """Return the request in a memfd, and the first byte of what is attached. Raises `RemoteProtocolError`."""
    try:
        length = int.from_bytes(os.pread(memory, _HEAD, 0), "little")
        if not 0 < length <= ARGUMENTS_BYTES_MAX:
            raise RemoteProtocolError(f"a rank described a shard in {length} bytes")
        request = decode_shard(os.pread(memory, length, _HEAD))
        if os.fstat(memory).st_size < (_attached_at(length) + request.attached if request.attached else 0):
            raise RemoteProtocolError("a rank attached less than its request says")
    except OSError as error:
        raise RemoteProtocolError(f"a rank's request cannot be read: {error.strerror}") from error
    return request, _attached_at(length)


def _attached_at(length: int) -> int:
    return -(-(_HEAD + length) // ALIGNMENT) * ALIGNMENT
