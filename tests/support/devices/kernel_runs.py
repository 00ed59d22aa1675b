"""Kernels of the table, run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.devices.ptx_programs import compiler
from zbmd.tools.lab import ptx
from zbmd.training.ops.cuda.table import BY_NAME, compile_source
from zbmd.transport.cuda.tiles import TileLayout

Array = npt.NDArray[Any]
KINDS: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@cache
def _kernels(source: str, architecture: str) -> dict[str, ptx.Kernel]:
    return ptx.parse(compile_source(compiler(), source, architecture).ptx)


def run(
    name: str,
    grid: int | Sequence[int],
    outputs: Sequence[Array],
    *arguments: Array | ptx.Tiles | float | None,
) -> ptx.Launch:
    """Run a kernel: arrays that it writes, undefined before, then its other arguments.

    An array that it reads and writes is a writable argument (`flags.writeable`); None is a null pointer.
    """
    entry = BY_NAME[name]
    given: list[Any] = [ptx.Buffer(one, initialised=False) for one in outputs]
    for one in arguments:
        if isinstance(one, np.ndarray):
            given.append(ptx.Buffer(one, writable=one.flags.writeable))
        else:
            given.append(0 if one is None else one)
    return ptx.launch(
        _kernels(entry.source, entry.architectures[0])[name],
        grid=grid,
        block=entry.block,
        arguments=given,
        shared=entry.dynamic,
    )


def tiled(array: Array, box_rows: int, box_columns: int) -> ptx.Tiles:
    """Return a tensor map of a matrix, with a swizzle of 128 bytes."""
    kind = {1: "u8", 2: "bf16", 4: "f32"}[array.itemsize]
    rows, columns = array.shape
    layout = TileLayout(element=kind, rows=rows, columns=columns, box_rows=box_rows, box_columns=box_columns)
    return ptx.Tiles(ptx.Buffer(array, writable=False), layout)


def fixed(values: Any, kind: str = "f32") -> Array:
    """Return a read-only array of a kind."""
    found = np.ascontiguousarray(values, dtype=KINDS.get(kind, kind))
    found.flags.writeable = False
    return found


def empty(shape: tuple[int, ...] | int, kind: str = "f32") -> Array:
    return np.zeros(shape, KINDS.get(kind, kind))


def wide(values: Array) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)


def same(found: Array, expected: Array) -> None:
    """Compare exactly; NaN equals NaN."""
    np.testing.assert_array_equal(wide(found), wide(expected))


def close(found: Array, expected: Array, kind: str, *, ulps: float = 8.0) -> None:
    """Compare, with so many units in the last place of the largest expected value; NaN and inf exactly."""
    expected = np.asarray(expected, np.float64)
    finite = np.abs(expected[np.isfinite(expected)])
    unit = 2.0 ** (-23 if kind == "f32" else -8)
    atol = ulps * unit * (float(finite.max()) if finite.size else 1.0)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=atol)
