"""What a rank says at the start of an epoch, as numbers that a group gathers: what it holds, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.training.redundancy.machine import SLOTS, Copy, Held
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle

HANDLES: Final = 2 * SLOTS
"""The slots of the own shard, then those of copies."""
_HEAD: Final = 1 + SLOTS
_PER_COPY: Final = 3
ROW_NUMBERS: Final = _HEAD + _PER_COPY * SLOTS + 2 * HANDLES
VERSION_MAX: Final = 1 << 40
_ADDRESS_MAX: Final = (1 << 63) - 1

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank says. handles: where peers read its slots."""

    held: Held
    handles: tuple[RegionHandle, ...]

    def encoded(self) -> Numbers:
        """(ROW_NUMBERS,): a version or a ward is one more than itself, 0 stands for none."""
        held = self.held
        numbers = [0 if version is None else version + 1 for version in held.own]
        numbers.append(held.known)
        for copy in held.copies:
            numbers += [0, 0, 0] if copy is None else [copy.ward + 1, copy.version, copy.digest]
        for handle in self.handles:
            numbers += [handle.offset, handle.nbytes]
        return np.array(numbers, np.uint64)

    @classmethod
    def decoded(cls, row: Numbers, slot: int, incarnation: int) -> Row:
        """What the member in `slot` said. Raises `RemoteProtocolError`: the numbers are a peer's.

        That handles lie in its memory is checked where they are opened.
        """
        numbers = [int(number) for number in row]
        if len(numbers) != ROW_NUMBERS:
            raise RemoteProtocolError(f"slot {slot} says {len(numbers)} numbers of what it holds")
        own = [None if number == 0 else number - 1 for number in numbers[:SLOTS]]
        copies: list[Copy | None] = []
        for at in range(_HEAD, _HEAD + _PER_COPY * SLOTS, _PER_COPY):
            ward, version, digest = numbers[at : at + _PER_COPY]
            copies.append(None if ward == 0 else Copy(ward=ward - 1, version=version, digest=digest))
        said = [(place, version) for place, version in enumerate(own) if version is not None]
        said += [(place, copy.version) for place, copy in enumerate(copies) if copy is not None]
        known, places = numbers[SLOTS], numbers[_HEAD + _PER_COPY * SLOTS :]
        if known > VERSION_MAX or any(v > VERSION_MAX or v % SLOTS != at for at, v in said):
            raise RemoteProtocolError(f"slot {slot} says that it holds what there cannot be: {numbers}")
        if max(places) > _ADDRESS_MAX:
            raise RemoteProtocolError(f"slot {slot} says that its memory is where there is none: {places}")
        handles = tuple(
            RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=False)
            for offset, nbytes in zip(places[::2], places[1::2], strict=True)
        )
        held = Held(own=(own[0], own[1]), known=known, copies=(copies[0], copies[1]))
        return cls(held=held, handles=handles)
