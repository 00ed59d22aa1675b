"""Where in a step the first value that is not finite arose on this rank.

A step that has diverged is computed once more with a `Lookout` on its thread (`with lookout.on():`). It is
told of what each unit of the model makes, forwards and backwards, and of what passes between ranks: so it
knows whether the first such value was made here or came from another rank. Where none is on, this costs a
look at a thread's variable a unit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from zbmd.training.autograd.array_module import Array


class Where(IntEnum):
    """What is not finite, in the order of a step."""

    WEIGHTS = 0
    """Of a parameter, before the step."""
    FORWARD = 1
    """The output of a unit."""
    BACKWARD = 2
    """What a unit computes on the way back."""
    GRADIENT = 3
    """The gradient of a parameter, summed over this rank's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """`bad` of `size` elements are not finite. place: a unit of the model, or a parameter, by index.

    came: it came from another rank so, and all before it was finite here.
    """

    where: Where
    place: int
    is_nan: bool
    bad: int
    size: int
    came: bool = False


class Lookout:
    """The first sighting of this rank in one attempt at a step. For one thread."""

    def __init__(self) -> None:
        self.first: Sighting | None = None
        self._where, self._place = Where.FORWARD, 0

    @contextlib.contextmanager
    def on(self) -> Generator[None]:
        """Look at what is computed on this thread."""
        _on_thread.lookout = self
        try:
            yield
        finally:
            _on_thread.lookout = None

    def at(self, where: Where, place: int) -> None:
        """What is looked at from here on is of this place."""
        self._where, self._place = where, place

    def look(self, values: Array, *, came: bool = False) -> None:
        """Look at an array, of floats and of any shape, unless something was seen before."""
        if self.first is None:
            seen = sighting(self._where, self._place, values)
            self.first = None if seen is None else replace(seen, came=came)


class _OnThread(threading.local):
    lookout: Lookout | None = None


_on_thread = _OnThread()


def lookout() -> Lookout | None:
    """The one that is on, on this thread."""
    return _on_thread.lookout


def given(values: Array) -> None:
    """Other ranks are about to be given `values`, which were made here."""
    if _on_thread.lookout is not None:
        _on_thread.lookout.look(values)


def taken(values: Array) -> None:
    """Other ranks have given `values`, or a part in them."""
    if _on_thread.lookout is not None:
        _on_thread.lookout.look(values, came=True)


def sighting(where: Where, place: int, values: Array) -> Sighting | None:
    """What is not finite in `values`, of any float dtype and shape; None if all is finite."""
    bad = int(values.size - np.isfinite(values).sum())
    if not bad:
        return None
    return Sighting(where=where, place=place, is_nan=bool(np.isnan(values).any()), bad=bad, size=values.size)
