"""Hugging Face's folders of weights: safetensors files of a bounded size, and the index of several.

Tensors are written and read one by one: no more than one is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np

from zbmd.training.checkpoint.formats.tensors import MODEL, Bytes, Content, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.hugging_face import (
    INDEX_NAME,
    PREFIX,
    WEIGHTS_NAME,
    hugging_face_name,
    read_index,
    save_config,
    weights_file,
)
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

SHARD_BYTES: Final = 5_000_000_000
"""The bound of `save_pretrained`. A tensor that is larger has a file of its own."""
HEADER_BYTES_MAX: Final = 100_000_000
"""The bound of the format."""
NAMES: Final = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""Dtypes of the format, by PyTorch's names."""
_DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
_ALIGNMENT: Final = 8
_METADATA: Final = "__metadata__"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """A safetensors file. tensors: by their names there. Raises `UserError` for another kind of file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}: give the folder of a model.") from error
        try:
            self._entries, self._begin = _header(self._file, path.stat().st_size)
        except (OSError, ValueError, RecursionError) as error:
            self._file.close()
            raise UserError(f"{path} cannot be read as a safetensors file: {error}. Restore it.") from error
        self.tensors = {
            name: Tensor(f"{MODEL}{name}", "", name, _DTYPES[entry.dtype], entry.shape)
            for name, entry in self._entries.items()
        }

    def read(self, name: str) -> Bytes:
        """Return the bytes of a tensor, flat."""
        begin, end = self._entries[name].data_offsets
        self._file.seek(self._begin + begin)
        data = self._file.read(end - begin)
        if len(data) < end - begin:
            raise UserError(f"{self.path} ended while it was read: restore it.")
        return np.array(memoryview(data), np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _header(file: IO[bytes], size: int) -> tuple[dict[str, _Entry], int]:
    """Return the tensors of a file of `size` bytes, and where their bytes begin. Raises `ValueError`."""
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if not 2 <= length <= HEADER_BYTES_MAX or begin > size:
        raise ValueError(f"its header has {length} bytes, and the file {size}")
    raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    raw.pop(_METADATA, None)
    entries = {name: msgspec.json.decode(each, type=_Entry) for name, each in raw.items()}
    for name, entry in entries.items():
        first, last = entry.data_offsets
        if entry.dtype not in _DTYPES or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} is {entry.dtype} of shape {entry.shape}")
        wanted = Tensor(name, "", name, _DTYPES[entry.dtype], entry.shape).nbytes
        if not 0 <= first <= last <= size - begin or last - first != wanted:
            raise ValueError(f"{name} of {wanted} bytes is at {first} to {last} of {size - begin}")
    return entries, begin


def is_safetensors(path: Path) -> bool:
    """Return whether `path` is a folder of safetensors files."""
    return (path / WEIGHTS_NAME).is_file() or (path / INDEX_NAME).is_file()


def open_folder(path: Path) -> Content:
    """Return the weights in a folder, of one file or of several and their index. Raises `UserError`."""
    file = weights_file(path)
    places = read_index(file) if file.suffix == ".json" else dict[str, Path]()
    tensors: dict[str, tuple[Tensor, Path]] = {}
    for each in dict.fromkeys(places.values()) if places else [file]:
        with closing(SafetensorsFile(each)) as opened:
            for name, tensor in opened.tensors.items():
                if not places or places.get(name) == each:
                    tensors[name] = tensor, each
    if absent := [name for name in places if name not in tensors]:
        raise UserError(
            f"{places[absent[0]]} lacks tensor {absent[0]}, which {file.name} names: restore both."
        )

    def read(tensor: Tensor) -> Bytes:
        with closing(SafetensorsFile(tensors[tensor.name][1])) as opened:
            return opened.read(tensor.name)

    return Content(tensors=tuple(tensor for tensor, _ in tensors.values()), read=read)


def write_folder(path: Path, content: Content, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of `content`, each file atomically and the index last.

    A GPT-2 of the engine gets Hugging Face's names and its `config.json`. Raises `UserError`.
    """
    weights = [tensor for tensor in content.tensors if tensor.key.startswith(MODEL)]
    if not weights:
        raise UserError(f"there are no weights to write: expected tensors whose names begin with {MODEL!r}")
    name_of = _names(content.model)
    shards = list(_shards(weights, shard_bytes))
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS_NAME
        named = [(name_of(tensor.key), tensor) for tensor in shard]
        write_atomically(path / one, _writer(named, content.read))
        placed |= {name: one for name, _ in named}
    if content.model is not None and content.model.family == "gpt2":
        save_config(path, content.model)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in weights)
        text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": placed})
        write_atomically(path / INDEX_NAME, lambda file: file.write(msgspec.json.format(text)))


def _names(model: GPTConfig | None) -> Callable[[str], str]:
    if model is None or model.family != "gpt2":
        return lambda key: key.removeprefix(MODEL)
    return lambda key: PREFIX + hugging_face_name(key.removeprefix(MODEL))


def _shards(tensors: Sequence[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the tensors of each file, in their order."""
    shard, size = list[Tensor](), 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _writer(
    named: Sequence[tuple[str, Tensor]], read: Callable[[Tensor], Bytes]
) -> Callable[[IO[bytes]], None]:
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in named:
        begin, end = end, end + tensor.nbytes
        header[name] = _Entry(NAMES[tensor.dtype], tensor.shape, (begin, end))
    text = msgspec.json.encode(header)
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in named:
            data = read(tensor)
            if data.nbytes != tensor.nbytes:
                raise UserError(f"{tensor.key} has {data.nbytes} bytes, expected {tensor.nbytes}")
            file.write(data.data)

    return write
