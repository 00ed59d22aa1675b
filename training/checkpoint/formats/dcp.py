"""Folders of `torch.distributed.checkpoint` (DCP): PyTorch's own planner and file-system reader and writer.

The `.metadata` of such a folder is a pickle, which may call any function as it is loaded. It is read by an
unpickler that knows the classes of the format and no others; tensors are read with `weights_only`. Entries
that are no tensors are pickles as well, and are not read.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle  # noqa: TID251 -- of a file, and of the classes below alone
from pathlib import Path
from typing import Any, Final

import numpy as np

from zbmd.training.checkpoint.formats.tensors import (
    ITEM_BYTES,
    META_KEY,
    Bytes,
    Content,
    Tensor,
    decode_meta,
    encode_meta,
)
from zbmd.transport.errors import UserError

METADATA_NAME: Final = ".metadata"
METADATA_BYTES_MAX: Final = 1 << 30
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_KNOWN: Final = {
    **{
        (_METADATA, name): None
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
            *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): None,
    ("torch", "Size"): None,
    ("torch.serialization", "_get_layout"): None,
    ("collections", "OrderedDict"): None,
}
_PATHS: Final = frozenset(
    ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
)


class _Unpickler(pickle.Unpickler):
    """Loads the classes of DCP's metadata, dtypes, and paths as text; refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return getattr(importlib.import_module(module), name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _path_text
        if module == "torch" and isinstance(found := getattr(_torch(), name, None), _torch().dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of the format")


def _path_text(*parts: str) -> str:
    return os.path.join(*parts) if parts else ""


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise UserError(
            'a torch.distributed.checkpoint folder needs PyTorch: pip install "zbmd[torch]"'
        ) from None


def _dcp() -> Any:
    _torch()
    return importlib.import_module("torch.distributed.checkpoint")


def is_dcp(path: Path) -> bool:
    """Return whether `path` is a folder of DCP."""
    return (path / METADATA_NAME).is_file()


def read_metadata(path: Path) -> Any:
    """Return the `Metadata` of a folder. Raises `UserError` for other classes in it, and for damage."""
    file = path / METADATA_NAME
    _dcp()
    try:
        if file.stat().st_size > METADATA_BYTES_MAX:
            raise ValueError(f"it has more than {METADATA_BYTES_MAX} bytes")
        found = _Unpickler(io.BytesIO(file.read_bytes())).load()
        _check(path, found)
    except UserError:
        raise
    except Exception as error:  # a pickle that is damaged raises anything
        raise UserError(
            f"{file} cannot be read as the metadata of torch.distributed.checkpoint: {error}. Expected the "
            "classes of that format alone; convert a folder that PyTorch has saved."
        ) from error
    return found


def _check(path: Path, found: Any) -> None:
    """Raise `ValueError` for metadata of other types, of files elsewhere, or of more than the files have."""
    known = importlib.import_module(_METADATA)
    if not isinstance(found, known.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    for info in found.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"a tensor is in the file {name!r}, which is not in the folder")
    there = sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    claimed = sum(tensor.nbytes for tensor in _tensors(found))
    if claimed > there:
        raise ValueError(f"its tensors have {claimed} bytes, and its files {there}")


def _tensors(metadata: Any) -> list[Tensor]:
    known = importlib.import_module(_METADATA)
    tensors: list[Tensor] = []
    for key, each in metadata.state_dict_metadata.items():
        if isinstance(each, known.TensorStorageMetadata):
            dtype, shape = str(each.properties.dtype).removeprefix("torch."), tuple(map(int, each.size))
            if dtype not in ITEM_BYTES or min(shape, default=0) < 0:
                raise ValueError(f"{key} is {dtype} of shape {shape}")
            tensors.append(Tensor(str(key), "", str(key), dtype, shape))
    return tensors


def open_dcp(path: Path) -> Content:
    """Return the content of a folder, written by any number of ranks. Raises `UserError`."""
    metadata, torch = read_metadata(path), _torch()
    tensors = {tensor.key: tensor for tensor in _tensors(metadata)}
    reader = _reader(path, metadata)

    def read(tensor: Tensor) -> Bytes:
        if tensor.key not in tensors or tensors[tensor.key].shape != tensor.shape:
            raise UserError(f"{path} has no {tensor.key} of shape {tensor.shape}: convert it again")
        into = torch.empty(tensor.shape, dtype=getattr(torch, tensors[tensor.key].dtype))
        try:
            _dcp().load({tensor.key: into}, storage_reader=reader, no_dist=True)
        except Exception as error:  # as its reader has it: a damaged file raises anything
            raise UserError(f"{path}: {tensor.key} cannot be read ({error}): restore the folder") from error
        return _bytes_of(into)

    own = tensors.get(META_KEY)
    meta = None if own is None else decode_meta(read(own).tobytes(), path)
    others = tuple(tensor for tensor in tensors.values() if tensor is not own)
    return Content(tensors=others, read=read, meta=meta)


def _reader(path: Path, metadata: Any) -> Any:
    class Reader(_dcp().FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    return Reader(path)


def _bytes_of(tensor: Any) -> Bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    found: Bytes = flat.view(_torch().uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return found


def write_dcp(path: Path, content: Content) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads, its metadata last.

    All tensors are in memory meanwhile. Raises `UserError` for what cannot be written.
    """
    torch, state = _torch(), dict[str, Any]()
    for tensor in content.tensors:
        data = torch.from_numpy(content.read(tensor).copy())
        state[tensor.key] = data.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    if content.meta is not None:
        state[META_KEY] = torch.from_numpy(encode_meta(content.meta).copy())
    writer = _dcp().FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
    try:
        _dcp().save(state, storage_writer=writer, no_dist=True)
    except Exception as error:  # of its own threads, as it has them
        raise UserError(f"{path} cannot be written: {error}. Give a folder with room for it.") from error
