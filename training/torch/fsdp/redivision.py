"""The exchange of a parameter and its moments between a division and the next; see `division`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.training.torch.fsdp.division import Division, Holder, Piece, pieces_of, rows_of, windows_of

torch: Any = importlib.import_module("torch")


class Redivision:
    """The exchange of one parameter and its moments, for `division`, from the holders of the old parts."""

    def __init__(self, shape: Sequence[int], division: Division, holders: Sequence[Holder]) -> None:
        self._rows, self._rest = shape[0], tuple(shape[1:])
        self._division, self._holders = division, holders

    def _windows(self, place: int) -> list[tuple[int, int]]:
        return windows_of(self._rows, self._division.size, place, self._division.distinct)

    def _pieces(self, source: int, target: int) -> list[Piece]:
        """Return what `source` sends to `target`, in order."""
        every = pieces_of(self._rows, len(self._holders), self._windows(target))
        return [each for each in every if self._holders[each.part].rank == source]

    def run(
        self, group: Group, end_ns: int, held: Mapping[int, Sequence[Any]], dtypes: Sequence[Any]
    ) -> list[list[Any]]:
        """Return the arrays of each window of this rank. held: of each old part that others have from it."""
        size, place = group.size, self._division.place
        outbox, sends = list[Any](), list[int]()
        for target in range(size):
            rows = [self._read(held[piece.part], piece) for piece in self._pieces(place, target)]
            outbox += [each for arrays in rows for each in arrays]
            sends.append(sum(each.size for arrays in rows for each in arrays))
        windows = [
            [torch.empty((stop - begin, *self._rest), dtype=dtype) for dtype in dtypes]
            for begin, stop in self._windows(place)
        ]
        targets = [
            [self._target(windows[piece.window], piece) for piece in self._pieces(source, place)]
            for source in range(size)
        ]
        receives = [sum(each.size for arrays in pieces for each in arrays) for pieces in targets]
        sent = np.concatenate([*outbox, np.zeros(0, np.uint8)])
        came = np.empty(sum(receives), np.uint8)
        group.submit(lambda c: c.all_to_all_v(sent, sends, receives, came, deadline_ns=end_ns)).result()
        at = 0
        for into in (each for pieces in targets for arrays in pieces for each in arrays):
            into[:] = came[at : at + into.size]
            at += into.size
        return windows

    def _read(self, arrays: Sequence[Any], piece: Piece) -> list[Any]:
        first, _ = rows_of(self._rows, len(self._holders), piece.part)
        rows = slice(piece.begin - first, piece.stop - first)
        return [bytes_over(each[rows].contiguous()) for each in arrays]

    def _target(self, arrays: Sequence[Any], piece: Piece) -> list[Any]:
        first, _ = self._windows(self._division.place)[piece.window]
        return [bytes_over(each[piece.begin - first : piece.stop - first]) for each in arrays]
