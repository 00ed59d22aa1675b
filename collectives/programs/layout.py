"""The places of an operation's blocks in the callers' arrays, if they are not all of one length.

A block has one place in the arrays it is read from and one in those it is written to, whichever rank looks:
block s*n + d of an all-to-all is what rank s sends to rank d, and lies in the `in` of rank s and the `out` of
rank d alone. So one table serves all ranks. Large operations are done in pieces (`plan.PIECE_BYTES`): piece p
of P takes elements [p*length//P, (p+1)*length//P) of every block. An array that is staged holds one piece,
packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.uint64]
Counts: TypeAlias = tuple[int, ...]

LAYOUTS_MAX = 256
"""Layouts kept; the least recently used is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of a layout, as native execution takes it.

    `table`, uint64 (5, blocks): length, offset in `in` used in place, in a staged `in`, in `out` used in
    place, in a staged `out`. `extents`, uint64 (n, 4): elements of each rank's `in` (in place, staged) and
    `out` (in place, staged). `begin`: where the piece begins within each block. `digest` tells layouts apart.
    """

    table: Table
    extents: Table
    begin: Table
    longest: int
    digest: int


@dataclass(frozen=True)
class Layout:
    """Blocks of `lengths` elements; block b belongs to `in` of the ranks `readers[b]`, `out` of `writers[b]`.

    The blocks of a rank lie one after the other, in the order of their numbers, in both arrays.
    """

    n: int
    lengths: Counts
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash, the same in every process."""
        text = repr((self.n, self.lengths, self.sources, self.targets))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    @cached_property
    def longest(self) -> int:
        """Elements of the longest block."""
        return max(self.lengths, default=0)

    @cached_property
    def published_max(self) -> int:
        """Elements of the largest `in`: what a rank would publish, if all of it travelled."""
        return max(self.offsets(self.lengths, self.sources)[1], default=0)

    def blocks_in(self, rank: int) -> list[int]:
        """The blocks of a rank's `in`, in order."""
        return [block for block, ranks in enumerate(self.sources) if rank in ranks]

    def blocks_out(self, rank: int) -> list[int]:
        """The blocks of a rank's `out`, in order."""
        return [block for block, ranks in enumerate(self.targets) if rank in ranks]

    def pieces(self, elements: int) -> tuple[Piece, ...]:
        """Pieces that take at most `elements` of each block; one at least."""
        return _pieces(self, max(1, -(-self.longest // max(1, elements))))

    def offsets(
        self, lengths: Sequence[int], sides: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[int]]:
        """Return the first element of each block, packed by rank; and the elements of each rank."""
        ends, begins = [0] * self.n, [0] * len(lengths)
        for block, ranks in enumerate(sides):
            for rank in ranks:
                begins[block] = ends[rank]
                ends[rank] += lengths[block]
        return begins, ends


@lru_cache(maxsize=LAYOUTS_MAX)
def _pieces(layout: Layout, count: int) -> tuple[Piece, ...]:
    whole_in, size_in = layout.offsets(layout.lengths, layout.sources)
    whole_out, size_out = layout.offsets(layout.lengths, layout.targets)
    pieces: list[Piece] = []
    for p in range(count):
        begin = [p * length // count for length in layout.lengths]
        lengths = [(p + 1) * length // count - at for length, at in zip(layout.lengths, begin, strict=True)]
        staged_in, staged_size_in = layout.offsets(lengths, layout.sources)
        staged_out, staged_size_out = layout.offsets(lengths, layout.targets)
        rows = [
            lengths,
            [at + b for at, b in zip(whole_in, begin, strict=True)],
            staged_in,
            [at + b for at, b in zip(whole_out, begin, strict=True)],
            staged_out,
        ]
        columns = [size_in, staged_size_in, size_out, staged_size_out]
        pieces.append(
            Piece(
                table=np.array(rows, np.uint64).reshape(len(rows), len(lengths)),
                extents=np.ascontiguousarray(np.array(columns, np.uint64).T),
                begin=np.array(begin, np.uint64),
                longest=max(lengths, default=0),
                digest=layout.digest,
            )
        )
    return tuple(pieces)


@lru_cache(maxsize=LAYOUTS_MAX)
def all_to_all_layout(counts: tuple[Counts, ...]) -> Layout:
    """Rank s sends `counts[s][d]` elements to rank d: block s*n + d."""
    n = len(counts)
    return Layout(
        n=n,
        lengths=tuple(counts[s][d] for s in range(n) for d in range(n)),
        sources=tuple((s,) for s in range(n) for _ in range(n)),
        targets=tuple((d,) for _ in range(n) for d in range(n)),
    )


@lru_cache(maxsize=LAYOUTS_MAX)
def all_gather_layout(counts: Counts) -> Layout:
    """Rank r gives `counts[r]` elements to all: block r."""
    n = len(counts)
    everyone = tuple(range(n))
    return Layout(n=n, lengths=counts, sources=tuple((r,) for r in range(n)), targets=(everyone,) * n)


@lru_cache(maxsize=LAYOUTS_MAX)
def reduce_scatter_layout(counts: Counts) -> Layout:
    """Rank r keeps `counts[r]` elements of everybody's sum: block r."""
    n = len(counts)
    everyone = tuple(range(n))
    return Layout(n=n, lengths=counts, sources=(everyone,) * n, targets=tuple((r,) for r in range(n)))


@lru_cache(maxsize=LAYOUTS_MAX)
def gather_layout(counts: Counts, root: int) -> Layout:
    """Rank r gives `counts[r]` elements to the root: block r."""
    n = len(counts)
    return Layout(n=n, lengths=counts, sources=tuple((r,) for r in range(n)), targets=((root,),) * n)


@lru_cache(maxsize=LAYOUTS_MAX)
def scatter_layout(counts: Counts, root: int) -> Layout:
    """The root gives `counts[r]` elements to rank r: block r."""
    n = len(counts)
    return Layout(n=n, lengths=counts, sources=((root,),) * n, targets=tuple((r,) for r in range(n)))
