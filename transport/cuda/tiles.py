"""Matrices in device memory that kernels read in tiles, by the tensor memory accelerator of sm_90 and newer.

A kernel's argument is a tensor map, which `cuTensorMapEncodeTiled` encodes from this description. The rules
are those of the CUDA driver API; whatever breaks one is refused before the driver is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zbmd.transport.errors import LocalProtocolError

ELEMENT_BYTES: Final = {"u8": 1, "bf16": 2, "f32": 4}
MAP_BYTES: Final = 128
BOX_MOST: Final = 256
"""Rows, or columns, of a box."""
SWIZZLES: Final = (0, 32, 64, 128)
_GRAIN: Final = 16
_ROW_BYTES_END: Final = 1 << 40
_EXTENT_MOST: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """A row-major matrix, and the boxes in which it is copied to shared memory.

    element: one of `ELEMENT_BYTES`. stride_bytes: from a row to the next; 0: rows touch. swizzle: the bytes
    within which pieces of 16 bytes are exchanged in shared memory, or 0. What a box has outside the matrix
    is zeros. Raises `LocalProtocolError` for what CUDA refuses.
    """

    element: str
    rows: int
    columns: int
    box_rows: int
    box_columns: int
    stride_bytes: int = 0
    swizzle: int = 128

    def __post_init__(self) -> None:
        """Check against CUDA's rules."""
        if self.element not in ELEMENT_BYTES:
            raise LocalProtocolError(f"expected elements of {', '.join(ELEMENT_BYTES)}, got {self.element!r}")
        size, inner = ELEMENT_BYTES[self.element], self.box_columns * ELEMENT_BYTES[self.element]
        row = self.row_bytes
        for bad, rule in (
            (not 0 < min(self.rows, self.columns) <= _EXTENT_MOST, "1 to 2**32 rows and columns"),
            (row % _GRAIN or row >= _ROW_BYTES_END, "rows that are a multiple of 16 bytes apart"),
            (row < self.columns * size, "a stride of no less than a row"),
            (min(self.box_rows, self.box_columns) < 1, "a box of at least one row and column"),
            (max(self.box_rows, self.box_columns) > BOX_MOST, "a box of at most 256 rows and columns"),
            (self.swizzle not in SWIZZLES, "a swizzle of 0, 32, 64 or 128 bytes"),
            (inner % _GRAIN, "box rows of a multiple of 16 bytes"),
            (self.swizzle and inner > self.swizzle, "box rows no longer than the swizzle"),
        ):
            if bad:
                raise LocalProtocolError(f"a tensor map needs {rule}, got {self}")

    @property
    def row_bytes(self) -> int:
        """Return the bytes from the beginning of a row to that of the next."""
        return self.stride_bytes or self.columns * ELEMENT_BYTES[self.element]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the matrix, from its first element to its last."""
        return (self.rows - 1) * self.row_bytes + self.columns * ELEMENT_BYTES[self.element]

    @property
    def box_bytes(self) -> int:
        """Return the bytes that a copy of a box brings, those outside the matrix included."""
        return self.box_rows * self.box_columns * ELEMENT_BYTES[self.element]


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """An argument of a kernel: a matrix at an address in device memory, which it reads in tiles."""

    address: int
    layout: TileLayout

    def __post_init__(self) -> None:
        """Raises `LocalProtocolError` for an address that CUDA refuses."""
        if self.address % _GRAIN:
            raise LocalProtocolError(
                f"a tensor map needs an address that is a multiple of 16, got {self.address:#x}"
            )
