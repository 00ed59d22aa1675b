"""State of a loop as bytes, without pickle: nested containers and numbers, tensors as numbered holes.

    data, tensors = encode(scheduler.state_dict(), "the scheduler")
    state = decode(data, tensors)

Dictionaries keep their order and the types of their keys, tuples stay tuples. What else is in a state is
refused by name: nothing that comes from another process is ever executed.
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from zbmd.collectives.torch.tensors import bytes_over
from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = importlib.import_module("torch")

DEPTH_MAX: Final = 64
_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_TENSOR, _DICT, _LIST, _TUPLE, _SET, _BIG, _DTYPE, _DEVICE, _ARRAY, _COMPLEX = range(10)
_decoder: Final = msgspec.msgpack.Decoder()
INT_BITS: Final = 63


def encode(state: Any, what: str) -> tuple[bytes, list[Any]]:
    """Return `state` as bytes, and its tensors in the order of their holes.

    what: names it in the `UserError` that something which cannot be encoded raises.
    """
    tensors: list[Any] = []
    tree = _packed(state, what, tensors, 0)
    return msgspec.msgpack.encode(tree), tensors


def decode(data: bytes | memoryview, tensors: Sequence[Any]) -> Any:
    """Return the state, with these tensors in its holes. Raises `RemoteProtocolError`."""
    try:
        return _unpacked(_decoder.decode(data), tensors, 0)
    except (msgspec.DecodeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RemoteProtocolError(f"the state of a loop, as another rank has sent it: {error}") from None


def _packed(value: Any, where: str, tensors: list[Any], depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise UserError(f"{where} is nested deeper than {DEPTH_MAX}")
    kind = type(value)
    if kind is int and value.bit_length() > INT_BITS:
        return [_BIG, str(value)]
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return [_TENSOR, len(tensors) - 1]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        pairs = [
            [_packed(key, where, tensors, depth + 1), _packed(each, f"{where}[{key!r}]", tensors, depth + 1)]
            for key, each in value.items()
        ]
        return [_DICT, pairs]
    if kind in (list, tuple, set, frozenset, deque, torch.Size):
        tag = _LIST if kind in (list, deque) else _SET if kind in (set, frozenset) else _TUPLE
        each = sorted(value, key=repr) if tag == _SET else value
        return [
            tag,
            [_packed(one, f"{where}[{i}]", tensors, depth + 1) for i, one in enumerate(each)],
        ]
    return _packed_leaf(value, where)


def _packed_leaf(value: Any, where: str) -> Any:
    if isinstance(value, torch.dtype):
        return [_DTYPE, name_of(value)]
    if isinstance(value, torch.device):
        return [_DEVICE, str(value)]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.hasobject is False:
        array = np.ascontiguousarray(value)
        return [_ARRAY, array.dtype.str, list(np.shape(value)), array.tobytes()]
    if isinstance(value, complex):
        return [_COMPLEX, value.real, value.imag]
    raise UserError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to a "
        "replacement: a state may hold numbers, strings, tensors, arrays, and lists and dictionaries of them"
    )


def _unpacked(tree: Any, tensors: Sequence[Any], depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    if not isinstance(tree, list):
        return tree
    match tree:
        case [int(tag), int(number)] if tag == _TENSOR and 0 <= number < len(tensors):
            return tensors[number]
        case [int(tag), list(pairs)] if tag == _DICT:
            unpacked = [
                (_unpacked(k, tensors, depth + 1), _unpacked(v, tensors, depth + 1)) for k, v in pairs
            ]
            return dict(unpacked)
        case [int(tag), list(items)] if tag in (_LIST, _TUPLE, _SET):
            each = [_unpacked(item, tensors, depth + 1) for item in items]
            return each if tag == _LIST else tuple(each) if tag == _TUPLE else set(each)
        case [int(tag), str(text)] if tag == _BIG:
            return int(text)
        case [int(tag), str(name)] if tag == _DTYPE:
            return dtype_named(name)
        case [int(tag), str(name)] if tag == _DEVICE:
            try:
                return torch.device(name)
            except RuntimeError as error:
                raise ValueError(str(error).partition("\n")[0]) from None
        case [int(tag), str(dtype), list(shape), bytes(data)] if tag == _ARRAY:
            array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
            return array if shape else array[()]
        case [int(tag), float(real), float(imag)] if tag == _COMPLEX:
            return complex(real, imag)
        case _:
            pass
    raise ValueError(f"{tree!r:.60} is nothing that a state is made of")


class Blob(msgspec.Struct, array_like=True, frozen=True):
    """A state in one piece. tree: without its tensors, which follow as (dtype, shape, bytes)."""

    tree: bytes
    tensors: list[tuple[str, list[int], bytes]]


_blobs: Final = msgspec.msgpack.Decoder(Blob)


def to_blob(state: Any, what: str) -> bytes:
    """Return `state` with its tensors, which are small, as bytes. Raises as `encode`."""
    tree, tensors = encode(state, what)
    return msgspec.msgpack.encode(Blob(tree, [to_bytes(tensor) for tensor in tensors]))


def from_blob(data: bytes | memoryview, what: str) -> Any:
    """Return the state. what: names it in the `RemoteProtocolError` that other bytes raise."""
    try:
        blob = _blobs.decode(data)
        tensors = [from_bytes(*each) for each in blob.tensors]
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"{what}: {error}") from None
    return decode(blob.tree, tensors)


def name_of(dtype: Any) -> str:
    """Return the name of a dtype of torch: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> Any:
    """Return the dtype of that name. Raises `ValueError` if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def to_bytes(tensor: Any) -> tuple[str, list[int], bytes]:
    """Return a small tensor as its dtype, shape and bytes."""
    whole = tensor.detach().cpu().contiguous()
    return name_of(tensor.dtype), list(tensor.shape), bytes_over(whole).tobytes()


def from_bytes(dtype: str, shape: list[int], data: bytes) -> Any:
    """Return the tensor. Raises `ValueError`."""
    try:
        if not data:
            return torch.empty(shape, dtype=dtype_named(dtype))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return flat.view(dtype_named(dtype)).reshape(shape)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"{dtype}{shape} of {len(data)} bytes: {error}") from None
