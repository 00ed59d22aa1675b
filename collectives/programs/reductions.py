"""The dtypes and reductions that there are kernels for, and which of them go together.

A 16-bit float (float16, and bfloat16 if `ml_dtypes` is installed) is reduced in float32: partial results
lie in slots as float32, and a result is rounded once (to nearest, ties to even) as it is written to the
caller's array. An average is a sum divided by the number of ranks before that rounding. Integers wrap
around, and their averages are cut off towards zero. For bool a sum is the logical or and a product the
logical and, as in numpy.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from zbmd.transport.errors import UserError

REDUCTIONS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
"""The reductions, by code (kernels.h)."""
DTYPE_NAMES = (
    "float32",
    "float64",
    "int32",
    "int64",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "bool",
)
"""The dtypes, by code (kernels.h)."""
BYTES_CODE = DTYPE_NAMES.index("uint8")
"""The dtype of operations that only move data: bytes."""

_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
_ITEMSIZES = (4, 8, 4, 8, 1, 1, 2, 2, 4, 8, 2, 2, 8, 16, 1)
_FLOATS = frozenset(("sum", "prod", "min", "max", "avg"))
_BY_KIND = {
    "f": _FLOATS,
    "V": _FLOATS,
    "i": frozenset(REDUCTIONS),
    "u": frozenset(REDUCTIONS),
    "b": frozenset(REDUCTIONS) - {"avg"},
    "c": frozenset(("sum", "prod", "avg")),
}


def itemsize(code: int) -> int:
    """Bytes of an element, by dtype code."""
    return _ITEMSIZES[code]


def slot_itemsize(code: int) -> int:
    """Bytes of an element in a slot, by dtype code: 16-bit floats are widened there."""
    return 4 if DTYPE_NAMES[code] in ("float16", "bfloat16") else _ITEMSIZES[code]


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The code of a dtype. Raises `UserError` if there is no reduction for it."""
    code = _CODES.get(dtype.name)
    if code is None or not dtype.isnative:
        raise UserError(f"no reduction for dtype {dtype.str}; use one of {', '.join(DTYPE_NAMES)}")
    return code


def reduction_code(op: str, dtype: np.dtype[Any]) -> int:
    """The code of reduction `op`. Raises `UserError` if there is none, or none for the dtype."""
    if op not in REDUCTIONS:
        raise UserError(f"no reduction {op!r}; use one of {', '.join(REDUCTIONS)}")
    takes = _BY_KIND[dtype.kind]
    if op not in takes:
        known = ", ".join(name for name in REDUCTIONS if name in takes)
        raise UserError(f"no reduction {op!r} for dtype {dtype.name}; use one of {known}")
    return REDUCTIONS.index(op)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name in `DTYPE_NAMES`. Raises `UserError` for bfloat16 where `ml_dtypes` is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    if importlib.util.find_spec("ml_dtypes") is None:
        raise UserError('bfloat16 needs ml_dtypes: pip install "zbmd[bfloat16]"')
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def dtypes() -> tuple[np.dtype[Any], ...]:
    """Every dtype that this process can reduce; bfloat16 only where `ml_dtypes` is installed."""
    found = [np.dtype(name) for name in DTYPE_NAMES if name != "bfloat16"]
    if importlib.util.find_spec("ml_dtypes") is not None:
        found.append(dtype_named("bfloat16"))
    return tuple(found)
