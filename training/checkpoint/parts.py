"""Parts of an index: what each host has written of a checkpoint, until one of them publishes the whole.

A host that has written the shards of its ranks puts `checkpoint-<version>-<token>-part-<place>.json` beside
them, by the place of its first rank. A process that finds the parts of all hosts knows the digest of each
shard, and can write the index; two that do so write the same bytes. Once that is published, parts are removed
with what is not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from zbmd.training.checkpoint.blocks import digest_of
from zbmd.training.checkpoint.index import MANIFEST_BYTES_MAX
from zbmd.training.checkpoint.storage import Storage

PART_FORMAT: Final = "zbmd-checkpoint-part-1"


class HostPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shards of one host. checkpoint: the digest of what the parts of all hosts have in common.

    headers: the digest of each shard's header by the place of its rank, "" where there is nothing to write;
    digest: of the part itself.
    """

    format: str
    checkpoint: str
    headers: dict[int, str]
    digest: str = ""

    def encode(self) -> bytes:
        """Return the file, with its digest."""
        return msgspec.json.encode(msgspec.structs.replace(self, digest=_digest(self)))


def _digest(part: HostPart) -> str:
    return digest_of(msgspec.json.encode(msgspec.structs.replace(part, digest="")))


def part_name(stem: str, first: int) -> str:
    """Return the name of the part of the host whose first rank is at place `first`."""
    return f"{stem}-part-{first}.json"


def put_part(storage: Storage, stem: str, checkpoint: str, headers: Mapping[int, str]) -> None:
    """Write a host's part, durable on return. Raises `UserError`."""
    part = HostPart(format=PART_FORMAT, checkpoint=checkpoint, headers=dict(sorted(headers.items())))
    storage.put(part_name(stem, min(headers)), [part.encode()])


def decode_part(data: bytes, checkpoint: str) -> dict[int, str]:
    """Return the digests of the headers in a part, by place. Raises `ValueError` for a damaged or strange
    one.
    """
    part = msgspec.json.decode(data, type=HostPart)
    if part.format != PART_FORMAT:
        raise ValueError(f"its format is {part.format}: expected {PART_FORMAT}")
    if part.digest != _digest(part):
        raise ValueError("checksum mismatch: the part was corrupted after it was written")
    if part.checkpoint != checkpoint:
        raise ValueError("it is of another plan or version: give all hosts the same settings and code")
    for place, header in part.headers.items():
        if place < 0 or (header and not (len(header) == 16 and set(header) <= set("0123456789abcdef"))):
            raise ValueError(f"it has the digest {header[:32]!r} for place {place}")
    return part.headers


def read_parts(
    storage: Storage, stem: str, checkpoint: str, homes: Collection[int], places: int
) -> dict[int, str]:
    """Return the digest of the header of each shard of a checkpoint, by place: "" for no shard.

    homes: the first places of its hosts. Raises `OSError`, `FileNotFoundError` for an absent part, and
    `ValueError` for what is no part of it.
    """
    found = dict[int, str]()
    for first in sorted(homes):
        name = part_name(stem, first)
        data = storage.get(name, MANIFEST_BYTES_MAX + 1)
        try:
            if len(data) > MANIFEST_BYTES_MAX:
                raise ValueError(f"it has more than {MANIFEST_BYTES_MAX} bytes")
            headers = decode_part(data, checkpoint)
            if found.keys() & headers.keys() or not headers or min(headers) != first:
                raise ValueError(f"it has shards of another host: {sorted(headers)[:8]}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{storage.where(name)} cannot be used: {error}") from error
        found |= headers
    if found.keys() != set(range(places)):
        raise ValueError(f"{storage.where()} has parts of {len(found)} shards of {stem}: expected {places}")
    return found
