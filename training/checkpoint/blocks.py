"""A shard: a safetensors file whose tensors are checked in blocks, and compressed if that was asked for.

Not compressed, the tensors are those that were written: any reader of safetensors opens the file.
Compressed (`Codec.ZSTD`), a tensor is a row of bytes: its blocks, each byte-shuffled (the first bytes of
all elements, then the second ones, …) and compressed with zstd. In both cases the metadata
`blocks.<tensor>` has dtype, shape and a checksum (XXH3-64) of each block's uncompressed bytes, and the
index of the checkpoint has the digest of the header: no byte of a shard can change without being noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.storage import Buffer, StoredFile

BLOCK_BYTES: Final = 1 << 20
HEADER_BYTES_MAX: Final = 100_000_000
"""That safetensors allows."""
LEVEL: Final = 1
"""Of zstd: level 9 takes 4 to 6 times as long for at most 2.5 % of shuffled float32."""
METADATA: Final = "__metadata__"
_LENGTH: Final = struct.Struct("<Q")
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(kind)
    for name, kind in {
        **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4"},
        **{"I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?"},
    }.items()
}
"""Those that checkpoints have, by the names of safetensors."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Codec(Enum):
    """The encoding of the blocks of tensors."""

    NONE = "none"
    ZSTD = "zstd"


class Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Blocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks of one tensor. digests: 16 hexadecimal digits of each; sizes: compressed, in bytes."""

    codec: Codec
    dtype: str
    shape: tuple[int, ...]
    block: int
    digests: str
    sizes: tuple[int, ...] = ()

    def spans(self, nbytes: int) -> Iterator[tuple[int, int, int, str]]:
        """Yield the number of each block, its first byte and its length in the file, and its digest.

        nbytes: of the tensor in the file. Raises `ValueError` unless the blocks are exactly that.
        """
        count = len(self.digests) // 16
        if self.codec is Codec.ZSTD:
            sizes = self.sizes
        else:
            sizes = tuple(min(self.block, nbytes - at) for at in range(0, nbytes, self.block))
        if len(sizes) != count or sum(sizes) != nbytes or min(sizes, default=1) < 1:
            raise ValueError(f"its {count} blocks are not its {nbytes} bytes")
        at = 0
        for number, size in enumerate(sizes):
            yield number, at, size, self.digests[16 * number : 16 * number + 16]
            at += size


class BlockMismatch(ValueError):
    """A block has other bytes than were written. tensor, block: which; first, size: where in the file."""

    def __init__(self, tensor: str, block: int, first: int, size: int, why: str) -> None:
        super().__init__(
            f"checksum mismatch in block {block} of {tensor} (bytes {first} to {first + size}): {why}"
        )
        self.tensor, self.block = tensor, block


def digest_of(data: Any) -> str:
    """Return the digest of bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def encoded(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], codec: Codec
) -> tuple[list[Buffer], str]:
    """Return the bytes of a file with these tensors, and the digest of its header. Raises `ValueError`."""
    entries, body, at = dict[str, Any](), list[Buffer](), 0
    found = dict(metadata)
    order = sorted(tensors, key=lambda name: (-_written(tensors[name], codec).itemsize, name))
    for name in order:  # wide dtypes first, so that all are aligned
        tensor = np.ascontiguousarray(tensors[name])
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which no checkpoint has")
        blocks, parts = _blocks_of(tensor, codec)
        size = sum(len(part) for part in parts)
        kept = codec is Codec.NONE
        entries[name] = Entry(
            blocks.dtype if kept else "U8", blocks.shape if kept else (size,), (at, at + size)
        )
        found[f"blocks.{name}"] = msgspec.json.encode(blocks).decode()
        body += parts
        at += size
    header = msgspec.json.encode({METADATA: found, **entries})
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"the header has {len(header)} bytes, at most {HEADER_BYTES_MAX} are possible")
    head = _LENGTH.pack(len(header)) + header
    return [head, *body], digest_of(head)


def _written(tensor: Array, codec: Codec) -> np.dtype[Any]:
    return tensor.dtype if codec is Codec.NONE else np.dtype(np.uint8)


def _blocks_of(tensor: Array, codec: Codec) -> tuple[Blocks, list[Buffer]]:
    data, digests, parts = tensor.reshape(-1).view(np.uint8).data, list[str](), list[Buffer]()
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        digests.append(digest_of(block))
        parts.append(block if codec is Codec.NONE else _compressed(block, tensor.itemsize))
    blocks = Blocks(
        codec=codec,
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tensor.shape,
        block=BLOCK_BYTES,
        digests="".join(digests),
        sizes=() if codec is Codec.NONE else tuple(map(len, parts)),
    )
    return blocks, parts


def _compressed(block: memoryview, itemsize: int) -> bytes:
    shuffled = np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, itemsize).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(shuffled.data)


class Shard:
    """An open shard of a checkpoint. Raises `ValueError` and `OSError` for damage, with what was found.

    metadata: of the file, without the blocks'.
    """

    def __init__(self, file: StoredFile, *, digest: str = "") -> None:
        """Read the header. digest: that it must have; empty: any."""
        self._file = file
        (size,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
        if not 2 <= size <= min(HEADER_BYTES_MAX, file.size - _LENGTH.size):
            raise ValueError(f"its header would have {size} bytes, and the file has {file.size}")
        head = file.read(0, _LENGTH.size + size)
        if digest and digest_of(head) != digest:
            raise ValueError("checksum mismatch in its header: the shard was corrupted after it was written")
        self._data = _LENGTH.size + size
        entries = msgspec.json.decode(head[_LENGTH.size :], type=dict[str, dict[str, Any]])
        self.metadata = msgspec.convert(entries.pop(METADATA, {}), dict[str, str])
        self._entries = msgspec.convert(entries, dict[str, Entry])
        self._check()
        self._blocks = dict[str, Blocks]()
        for name in self._entries:
            blocks = self.metadata.pop(f"blocks.{name}", None)
            if blocks is None:
                raise ValueError(f"it has no checksums of {name}, so no checkpoint has written it")
            self._blocks[name] = _decoded(blocks)

    def _check(self) -> None:
        at = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].data_offsets):
            first, end = entry.data_offsets
            if first != at or end < first or entry.dtype not in DTYPES or min(entry.shape, default=1) < 0:
                raise ValueError(f"its header places {name} at {first} to {end}, as {entry.dtype}")
            at = end
        if self._data + at != self._file.size:
            raise ValueError(f"its header names {at} bytes, and it has {self._file.size - self._data}")

    @property
    def tensors(self) -> Sequence[str]:
        """Return the names of its tensors."""
        return list(self._entries)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def tensor(self, name: str) -> Array:
        """Return a tensor, its blocks verified. Raises `KeyError` if it is absent, and as the class."""
        entry, blocks = self._entries[name], self._blocks[name]
        dtype = DTYPES.get(blocks.dtype)
        if dtype is None or min(blocks.shape, default=1) < 0:
            raise ValueError(f"{name} is {blocks.dtype} of shape {blocks.shape}")
        count = 1
        for size in blocks.shape:
            count *= size
        whole = _room(count * dtype.itemsize, entry, blocks)
        at = 0
        for part in self._read(name, entry, blocks, dtype.itemsize, whole.size):
            whole[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if at != whole.size:
            raise ValueError(f"{name} has {at} bytes, and its shape {blocks.shape} needs {whole.size}")
        return whole.view(dtype).reshape(blocks.shape)

    def verify(self, blocks: Sequence[tuple[str, int]] | None = None) -> None:
        """Read all blocks, or these of (tensor, number), and compare their checksums. Raises as the class."""
        wanted = None if blocks is None else set(blocks)
        for name, entry in self._entries.items():
            held = self._blocks[name]
            itemsize = DTYPES[held.dtype].itemsize if held.dtype in DTYPES else 1
            for _ in self._read(name, entry, held, itemsize, None, wanted):
                pass

    def block_names(self) -> list[tuple[str, int]]:
        """Return (tensor, number) of every block."""
        return [
            (name, number) for name, held in self._blocks.items() for number in range(len(held.digests) // 16)
        ]

    def _read(
        self,
        name: str,
        entry: Entry,
        blocks: Blocks,
        itemsize: int,
        room: int | None,
        wanted: set[tuple[str, int]] | None = None,
    ) -> Iterator[bytes]:
        """Yield the uncompressed blocks of a tensor, verified. room: bytes that there may be in all."""
        first, end = entry.data_offsets
        for number, at, size, digest in blocks.spans(end - first):
            if wanted is not None and (name, number) not in wanted:
                continue
            data = self._file.read(self._data + first + at, size)
            try:
                found = data if blocks.codec is Codec.NONE else _decompressed(data, blocks.block, itemsize)
                why = "" if digest_of(found) == digest else "the shard was corrupted after it was written"
            except (zstandard.ZstdError, ValueError) as error:
                found, why = b"", f"it cannot be decompressed ({error})"
            if why:
                raise BlockMismatch(name, number, self._data + first + at, size, why)
            if room is not None:
                room -= len(found)
                if room < 0:
                    raise ValueError(f"{name} has more bytes than its shape {blocks.shape} needs")
            yield found


def _room(nbytes: int, entry: Entry, blocks: Blocks) -> NDArray[np.uint8]:
    """Return room for a tensor. Raises `ValueError` for more than its blocks can hold."""
    first, end = entry.data_offsets
    most = end - first if blocks.codec is Codec.NONE else blocks.block * len(blocks.sizes)
    if nbytes > most or (blocks.codec is Codec.ZSTD and blocks.block > BLOCK_BYTES):
        raise ValueError(f"its shape {blocks.shape} needs {nbytes} bytes, and its blocks have at most {most}")
    return np.empty(nbytes, np.uint8)


def _decoded(text: str) -> Blocks:
    found = msgspec.json.decode(text, type=Blocks)
    if found.block < 1 or len(found.digests) % 16:
        raise ValueError(f"blocks of {found.block} bytes, with {len(found.digests)} digits of checksums")
    return found


def _decompressed(data: bytes, most: int, itemsize: int) -> bytes:
    size = zstandard.frame_content_size(data)  # it is allocated, whatever it says
    if not 0 < size <= min(most, BLOCK_BYTES) or size % itemsize:
        raise ValueError(f"it would have {size} bytes, at most {most} are possible")
    raw = zstandard.ZstdDecompressor().decompress(data)
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T).tobytes()
