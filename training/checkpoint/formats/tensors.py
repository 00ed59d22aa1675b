"""The tensors of a checkpoint, one by one, with the names that PyTorch has for them.

A weight is `model.NAME`, a moment `optim.state.NAME.MOMENT`: so does `torch.distributed.checkpoint` name what
is in {"model": model.state_dict(), "optim": get_optimizer_state_dict(…)}. Whatever else a checkpoint of ours
has is `zbmd.NAME`, so that it can be made again from another format, with the same bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.parameter_layout import ParameterSlot, flat_slice
from zbmd.training.checkpoint.plan import read_plan
from zbmd.training.checkpoint.sharded import Piece, SavedState, write_alone
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.optim import saved_arrays
from zbmd.transport.errors import UserError

Bytes = npt.NDArray[np.uint8]

DESCRIBED_NAME: Final = "zbmd.content"
"""The piece of a loop's checkpoint that has the shapes and dtypes of its tensors, as JSON."""
STATE: Final = "state"
"""The array of a piece that is no parameter."""
WEIGHTS: Final = "weights"
META_KEY: Final = "zbmd.meta"
MODEL: Final = "model."
_WRAPPED: Final = re.compile(r"^(\d+\.)?module\.")
"""The prefix that DistributedDataParallel has in front of the names of its module."""
ITEM_BYTES: Final = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Dtypes by PyTorch's names."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor. key: its name for others; array, name: where it is in a checkpoint of ours."""

    key: str
    array: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return its size. Raises `UserError` for a dtype that formats do not share."""
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"{self.key} is {self.dtype}: expected one of {', '.join(ITEM_BYTES)}; save it as one of them"
            )
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The index of a checkpoint of ours, without its files, and its tensors."""

    version: int
    plan: str
    loss_scale: tuple[float, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a checkpoint in any format. read: returns the bytes of one of `tensors`, flat.

    meta: None unless the checkpoint was ours.
    """

    tensors: tuple[Tensor, ...]
    read: Callable[[Tensor], Bytes]
    meta: Meta | None = None

    @property
    def model(self) -> GPTConfig | None:
        """Return the GPT of the engine whose weights these are; None for other models."""
        if self.meta is None or any(tensor.name == DESCRIBED_NAME for tensor in self.meta.tensors):
            return None
        return read_plan(self.meta.plan, where="the checkpoint").model


def key_of(array: str, name: str, moment: str) -> str:
    """Return PyTorch's name for an array of a parameter. moment: its name there."""
    plain = _WRAPPED.sub(lambda found: found[1] or "", name)
    return f"{MODEL}{plain}" if array == WEIGHTS else f"optim.state.{plain}.{moment}"


def file_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the dtype that a shard of ours has for a tensor: unsigned integers where numpy has none."""
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = None
    # Another library may have given numpy more: ml_dtypes, for one, once anything has imported it.
    return known if known is not None and known.isbuiltin == 1 else np.dtype(f"u{ITEM_BYTES[dtype]}")


def content_of(saved: SavedState, plan: str) -> Content:
    """Return the content of an open checkpoint of ours. Raises `UserError` for one that lacks shapes."""
    size = saved.size_of(DESCRIBED_NAME)
    if size:
        tensors = _of_loop(saved, size)
    else:
        try:
            found = read_plan(plan, where=str(saved.path))
        except UserError:
            raise UserError(
                f"{saved.path} has no shapes: expected a checkpoint of zbmd train or zbmd.torch.resilient "
                "in this version (resume an older one once, save, and convert that)"
            ) from None
        tensors = tuple(
            Tensor(key_of(array, name, array), array, name, "float32", shape)
            for name, shape in parameter_shapes(found.model).items()
            for array in saved_arrays(found.training.optimizer, name, shape)
        )
    meta = Meta(version=saved.version, plan=plan, loss_scale=tuple(saved.loss_scale), tensors=tensors)

    def read(tensor: Tensor) -> Bytes:
        size = math.prod(tensor.shape)
        if not size:
            return np.zeros(0, np.uint8)
        slot = ParameterSlot(name=tensor.name, shape=(size,), offset=0, decayed=False)
        return saved.parameter(tensor.array, slot, file_dtype(tensor.dtype)).view(np.uint8)

    return Content(tensors=tensors, read=read, meta=meta)


def _of_loop(saved: SavedState, size: int) -> tuple[Tensor, ...]:
    slot = ParameterSlot(name=DESCRIBED_NAME, shape=(size,), offset=0, decayed=False)
    try:
        return decode_tensors(saved.parameter(STATE, slot, np.uint8).tobytes())
    except ValueError as error:
        raise UserError(f"{saved.path}: its {DESCRIBED_NAME} cannot be read ({error}): restore it") from None


def described_piece(tensors: Sequence[Tensor], others: Sequence[Piece]) -> Piece:
    """Return the piece of a loop's checkpoint that says what is in it. others: pieces that are no parameters.

    It describes itself, too: its own length is found by padding.
    """
    plain = [
        Tensor(piece.name, STATE, piece.name, "uint8", (sum(one.size for one in piece.arrays),))
        for piece in others
    ]
    size = len(msgspec.json.encode([*tensors, *plain])) + 128
    own = Tensor(DESCRIBED_NAME, STATE, DESCRIBED_NAME, "uint8", (size,))
    text = msgspec.json.encode([*tensors, *plain, own]).ljust(size)
    return Piece(
        DESCRIBED_NAME,
        flat_slice(size, 0, size),
        (np.frombuffer(text, np.uint8),),
        names=(STATE,),
        dtype=None,
    )


def decode_tensors(text: bytes) -> tuple[Tensor, ...]:
    """Return the tensors in a description. Raises `ValueError`."""
    found = msgspec.json.decode(text, type=tuple[Tensor, ...])
    check_tensors(found)
    return found


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise `ValueError` unless these have sizes, and names of their own."""
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES or any(one < 0 for one in tensor.shape):
            raise ValueError(f"{tensor.key} is {tensor.dtype} of shape {tensor.shape}")
    if len({tensor.key for tensor in tensors}) < len(tensors):
        raise ValueError("two tensors have one name")


def encode_meta(meta: Meta) -> Bytes:
    """Return what another format keeps of a checkpoint of ours, beside its tensors."""
    return np.frombuffer(msgspec.json.encode(meta), np.uint8)


def decode_meta(data: bytes, where: Path) -> Meta:
    """Return it. Raises `UserError` for other bytes."""
    try:
        found = msgspec.json.decode(data, type=Meta)
        check_tensors(found.tensors)
        if found.version < 0:
            raise ValueError(f"its version is {found.version}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: its {META_KEY} cannot be read ({error}): convert it again") from None
    return found


def write_run(directory: Path, content: Content) -> None:
    """Write a checkpoint of ours, in one shard: durable on return.

    Raises `UserError` for content that no run of zbmd has written.
    """
    meta = content.meta
    if meta is None:
        raise UserError(
            "this checkpoint was not written by a run of zbmd, which could go on from it: expected one that "
            "`zbmd checkpoint convert` has made. Begin a run with its weights instead: zbmd train --weights, "
            "or a model that has loaded them, in front of zbmd.torch.resilient"
        )
    by_name: dict[str, list[Tensor]] = {}
    for tensor in meta.tensors:
        if math.prod(tensor.shape):
            by_name.setdefault(tensor.name, []).append(tensor)
    pieces: list[Piece] = []
    for name, tensors in by_name.items():
        arrays = tuple(content.read(tensor).view(file_dtype(tensor.dtype)) for tensor in tensors)
        if len({array.size for array in arrays}) > 1:
            raise UserError(f"the arrays of {name} have different sizes: convert the checkpoint again")
        cut = flat_slice(arrays[0].size, 0, arrays[0].size)
        pieces.append(Piece(name, cut, arrays, names=tuple(one.array for one in tensors), dtype=None))
    write_alone(directory, pieces, version=meta.version, plan=meta.plan, loss_scale=meta.loss_scale)
