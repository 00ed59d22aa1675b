"""Sans-I/O: the code. Any k of k data and m parity shards give all others.

Parity j is the sum over i of factor (j, i) times data shard i, in GF(2^8). The factors are a matrix of
Cauchy, 1 / (x_j + y_i), all of whose square parts can be inverted; each column is scaled so that the first
row is of ones. So with m = 1 the parity is the XOR of all data (J. Blömer and others, "An XOR-based
erasure-resilient coding scheme", ICSI TR-95-048, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from zbmd.transport.errors import LocalProtocolError

POLYNOMIAL: Final = 0x11D
SHARDS_MAX: Final = 255

Matrix = tuple[tuple[int, ...], ...]


def _powers() -> tuple[list[int], list[int]]:
    exponents, logarithms, value = [0] * 510, [0] * 256, 1
    for power in range(255):
        exponents[power] = exponents[power + 255] = value
        logarithms[value] = power
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    return exponents, logarithms


_EXPONENTS, _LOGARITHMS = _powers()


def product(a: int, b: int) -> int:
    """Return a times b."""
    return _EXPONENTS[_LOGARITHMS[a] + _LOGARITHMS[b]] if a and b else 0


def inverse(a: int) -> int:
    """Return 1 / a. Raises `LocalProtocolError` for 0."""
    if a == 0:
        raise LocalProtocolError("0 has no inverse")
    return _EXPONENTS[255 - _LOGARITHMS[a]]


@cache
def parity_matrix(data: int, parity: int) -> Matrix:
    """Return the factors of the data shards in each parity shard, (parity, data)."""
    if data < 1 or parity < 0 or data + parity > SHARDS_MAX:
        raise LocalProtocolError(f"{data} + {parity} shards: expected 1 or more, and at most {SHARDS_MAX}")
    rows = [[inverse(parity_at ^ (parity + at)) for at in range(data)] for parity_at in range(parity)]
    scales = [inverse(one) for one in rows[0]] if rows else []
    return tuple(tuple(product(one, scale) for one, scale in zip(row, scales, strict=True)) for row in rows)


def rebuilding_matrix(data: int, parity: int, have: Sequence[int], want: Sequence[int]) -> Matrix:
    """Return the factors of the shards `have`, `data` many, in each of the shards `want`.

    Data shards are 0 to `data` - 1, parity shards follow. Raises `LocalProtocolError` for other numbers.
    """
    if (
        len(have) != data
        or len(set(have)) != data
        or not all(0 <= one < data + parity for one in (*have, *want))
    ):
        raise LocalProtocolError(f"shards {list(have)} of {data} + {parity}: expected {data} of them")
    factors = parity_matrix(data, parity)
    units = tuple(tuple(int(at == one) for at in range(data)) for one in range(data))
    rows = units + factors
    solved = _inverted([list(rows[one]) for one in have])
    return tuple(_times(rows[one], solved) for one in want)


def _times(row: Sequence[int], matrix: Matrix) -> tuple[int, ...]:
    sums = [0] * len(row)
    for factor, other in zip(row, matrix, strict=True):
        for at, one in enumerate(other):
            sums[at] ^= product(factor, one)
    return tuple(sums)


def _inverted(matrix: list[list[int]]) -> Matrix:
    """Return the inverse, by Gauss and Jordan's elimination; a row with 0 on the diagonal is exchanged."""
    size = len(matrix)
    both = [[*row, *(int(at == place) for at in range(size))] for place, row in enumerate(matrix)]
    for place in range(size):
        pivot = next((at for at in range(place, size) if both[at][place]), None)
        if pivot is None:
            raise LocalProtocolError("these shards do not determine the others")
        both[place], both[pivot] = both[pivot], both[place]
        scale = inverse(both[place][place])
        both[place] = [product(one, scale) for one in both[place]]
        for at in range(size):
            factor = both[at][place]
            if at != place and factor:
                both[at] = [
                    one ^ product(factor, other) for one, other in zip(both[at], both[place], strict=True)
                ]
    return tuple(tuple(row[size:]) for row in both)


def flat(matrix: Matrix) -> bytes:
    """Return the factors row by row, as the kernel takes them."""
    return bytes(one for row in matrix for one in row)
