"""Arrays in messages: their bytes, with what is needed to read them."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec
import numpy as np

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

AXES_MAX: Final = 8
PART_BYTES_MAX: Final = 512 << 10
"""Of the arrays of one message: a message holds less than 1 MiB, with all that is around them."""
DTYPES: Final = ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")


class ArrayData(msgspec.Struct, frozen=True, array_like=True):
    """An array of `dtype` (one of `DTYPES`, little-endian), C order, whose bytes are `data`."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=AXES_MAX)]
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES_MAX)]


def pack(array: Array) -> ArrayData:
    """Put an array into a message. Raises `LocalProtocolError` if it is too large or of another dtype."""
    host = np.ascontiguousarray(to_host(array))
    if host.dtype.name not in DTYPES or host.ndim > AXES_MAX or host.nbytes > PART_BYTES_MAX:
        raise LocalProtocolError(
            f"an array of {host.dtype.name}, shape {host.shape}, {host.nbytes} bytes does not go into a "
            f"message: up to {AXES_MAX} axes and {PART_BYTES_MAX} bytes of {', '.join(DTYPES)} do"
        )
    return ArrayData(host.dtype.name, list(array.shape), host.tobytes())


def unpack(packed: ArrayData) -> Array:
    """The array of a message, writable. Raises `RemoteProtocolError` for one that is not whole."""
    if packed.dtype not in DTYPES:
        raise RemoteProtocolError(
            f"an array of dtype {packed.dtype!r:.40} was sent; there are {', '.join(DTYPES)}"
        )
    dtype = np.dtype(packed.dtype).newbyteorder("<")
    if math.prod(packed.shape) * dtype.itemsize != len(packed.data):
        raise RemoteProtocolError(
            f"an array of {packed.dtype} and shape {packed.shape} was sent in {len(packed.data)} bytes"
        )
    return np.frombuffer(bytearray(packed.data), dtype).reshape(packed.shape)
