"""The report of one rank's holdings as numbers, with where peers read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.training.redundancy.cut_events import Cut, HeldCut
from zbmd.training.redundancy.holdings import SLOTS, Copy, Held
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

HANDLES: Final = 2 * SLOTS
"""The slots of the own shard, then those of copies."""
_HEAD: Final = 3 + SLOTS
_PER_COPY: Final = 3
_CUT: Final = 3
_CUT_AT: Final = _HEAD + _PER_COPY * SLOTS
_HANDLES_AT: Final = _CUT_AT + _CUT
_HALF: Final = _HANDLES_AT + 2 * HANDLES
ROW_NUMBERS: Final = 2 * _HALF
"""Both of the cut in use and of the older one."""
VERSION_MAX: Final = 1 << 40
_ADDRESS_MAX: Final = (1 << 63) - 1

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsRow:
    """The report of one rank. `handles`: where peers read its slots.

    cut: what `held` is of, if the state may be recut, and older: what the rank keeps of the cut before.
    """

    held: Held
    handles: tuple[RegionHandle, ...]
    cut: Cut | None = None
    older: HoldingsRow | None = None

    def encoded(self) -> Numbers:
        """Return (ROW_NUMBERS,): versions, wards and parts are incremented by one, 0 means none.

        So does a handle of no bytes, of a slot that a rank does not have.
        """
        numbers = self._half()
        if self.older is not None:
            numbers += self.older._half()
        numbers += [0] * (ROW_NUMBERS - len(numbers))
        return np.array(numbers, np.uint64)

    def _half(self) -> list[int]:
        held, cut = self.held, self.cut
        numbers = [0 if version is None else version + 1 for version in held.own]
        numbers += [held.known, held.first, held.digest]
        for copy in held.copies:
            numbers += [0, 0, 0] if copy is None else [copy.ward + 1, copy.version, copy.digest]
        numbers += [0, 0, 0] if cut is None else [cut.made, cut.parts, cut.part + 1]
        for handle in self.handles:
            numbers += [handle.offset, handle.nbytes]
        return numbers + [0] * (_HALF - len(numbers))

    @classmethod
    def decoded(cls, row: Numbers, slot: int, incarnation: int) -> HoldingsRow:
        """Return the report of the member in `slot`. Raises `RemoteProtocolError`: the numbers are a peer's.

        Handles are checked when they are opened.
        """
        numbers = [int(number) for number in row]
        if len(numbers) != ROW_NUMBERS:
            raise RemoteProtocolError(f"slot {slot} reports {len(numbers)} numbers, expected {ROW_NUMBERS}")
        now, older = numbers[:_HALF], numbers[_HALF:]
        kept = cls._of_half(older, slot, incarnation) if any(older) else None
        return replace(cls._of_half(now, slot, incarnation), older=kept)

    @classmethod
    def _of_half(cls, numbers: Sequence[int], slot: int, incarnation: int) -> HoldingsRow:
        own = [None if number == 0 else number - 1 for number in numbers[:SLOTS]]
        copies: list[Copy | None] = []
        for at in range(_HEAD, _CUT_AT, _PER_COPY):
            ward, version, digest = numbers[at : at + _PER_COPY]
            copies.append(None if ward == 0 else Copy(ward=ward - 1, version=version, digest=digest))
        said = [(place, version) for place, version in enumerate(own) if version is not None]
        said += [(place, copy.version) for place, copy in enumerate(copies) if copy is not None]
        known, first, digest = numbers[SLOTS:_HEAD]
        made, parts, part = numbers[_CUT_AT:_HANDLES_AT]
        if max(known, first) > VERSION_MAX or any(v > VERSION_MAX or v % SLOTS != at for at, v in said):
            raise RemoteProtocolError(f"slot {slot} reports impossible versions: {numbers}")
        if max(made, parts) > VERSION_MAX or part > parts:
            raise RemoteProtocolError(f"slot {slot} reports an impossible cut: {numbers}")
        places = numbers[_HANDLES_AT:]
        if max(places) > _ADDRESS_MAX:
            raise RemoteProtocolError(f"slot {slot} reports memory at impossible addresses: {places}")
        handles = tuple(
            RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=False)
            for offset, nbytes in zip(places[::2], places[1::2], strict=True)
        )
        held = Held(
            own=(own[0], own[1]), known=known, copies=(copies[0], copies[1]), first=first, digest=digest
        )
        cut = None if part == 0 else Cut(made=made, parts=parts, part=part - 1)
        return cls(held=held, handles=handles, cut=cut)

    def of_cut(self) -> HeldCut:
        """Return the report of a state that may be recut. Raises `RemoteProtocolError` for another."""
        if self.cut is None:
            raise RemoteProtocolError("a rank does not say how its state is cut")
        return HeldCut(
            held=self.held, cut=self.cut, older=None if self.older is None else self.older.of_cut()
        )
