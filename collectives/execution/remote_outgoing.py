"""Copies of what is put to members on other hosts, in memory that is kept from run to run.

A program may overwrite the source as soon as it has been put, so a copy is sent. A device has to know the
memory that it sends from: it knows this after the first put, where a new copy would be registered each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.memory.transfer import DONE, Transfer

PLACES_MAX: Final = 8
"""Kept; what is put while all of them are under way has memory of its own."""
PLACE_BYTES_MIN: Final = 4096


@dataclass(slots=True, eq=False)
class Place:
    """Memory for one put at a time. transfer: the last one's; its bytes stay as they are until it is done."""

    array: NDArray[np.uint8]
    transfer: Transfer = DONE


class Outgoing:
    """The places. For one thread at a time."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    def take(self, nbytes: int) -> Place:
        """The smallest free one of at least so many bytes; whoever puts from it sets its transfer."""
        free = [place for place in self._places if place.transfer.done]
        large = [place for place in free if place.array.nbytes >= nbytes]
        if large:
            return min(large, key=lambda place: place.array.nbytes)
        # A power of two: puts of about one size share their places.
        made = Place(np.empty(max(PLACE_BYTES_MIN, 1 << (nbytes - 1).bit_length()), np.uint8))
        if len(self._places) == PLACES_MAX:
            if not free:
                return made
            self._places.remove(min(free, key=lambda place: place.array.nbytes))
        self._places.append(made)
        return made
