"""The operands of products on Hopper: tensor maps of matrices, and matrices that are rounded to FP8."""

from __future__ import annotations

from typing import Final

import numpy as np

from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.fp8 import BLOCK
from zbmd.transport.cuda.tiles import DeviceTiles, TileLayout

_BOX_COLUMNS: Final = 64
_BOX_ROWS: Final = {"n": (128, 64), "t": (64, 256)}
"""Of the boxes of a, and of b, that `products_tma.cu` brings, by whether it is transposed."""
_IN_BLOCKS: Final = {
    "nn": ("rows", "tiles_turned"),
    "nt": ("rows", "tiles"),
    "tn": ("rows_turned", "rows_turned"),
}
"""The kernels of `fp8.cu` that round both operands, by the form of a product."""


def tile_operands(form: str, a: DeviceArray, b: DeviceArray) -> tuple[DeviceTiles, DeviceTiles]:
    """Return the tensor maps by which `hopper/products_tma.cu` reads the operands of a product."""
    boxes = _BOX_ROWS[form[0]][0], _BOX_ROWS[form[1]][1]
    left, right = (
        DeviceTiles(
            one.address,
            TileLayout(
                element="bf16",
                rows=one.shape[0],
                columns=one.shape[1],
                box_rows=box_rows,
                box_columns=_BOX_COLUMNS,
            ),
        )
        for one, box_rows in zip((a, b), boxes, strict=True)
    )
    return left, right


def block_operands(
    run: Executor, form: str, a: DeviceArray, b: DeviceArray
) -> list[tuple[DeviceArray, DeviceArray]]:
    """Return the operands of a product in E4M3, sums along their rows, each with the scales of its blocks."""
    found = list[tuple[DeviceArray, DeviceArray]]()
    for matrix, kernel in zip((a, b), _IN_BLOCKS[form], strict=True):
        outers, inners = matrix.shape[::-1] if kernel.endswith("turned") else matrix.shape
        across, down = -(-inners // BLOCK), -(-outers // BLOCK)
        q = run.empty((outers, inners), np.uint8)
        scales = run.empty((down if kernel.startswith("tiles") else outers, across), np.float32)
        sizes = (np.int32(matrix.shape[0]), np.int32(matrix.shape[1]))
        run.launch(f"fp8_{kernel}_{matrix.kind}", (across, down), Out(q), Out(scales), matrix, *sizes)
        found.append((q, scales))
    return found
