"""Find where in a step the first NaN or infinity arises on this rank.

When a step diverges, it is computed a second time with a `NonFiniteProbe` on its thread (`with probe.on():`).
The probe checks the output of each unit of the model, forwards and backwards, and whatever ranks exchange, so
it can tell a value that was computed here from one that another rank sent. While no probe is active, a unit
costs one read of a thread-local variable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from zbmd.training.autograd.array_module import Array


class ProbePoint(IntEnum):
    """The kind of value that is checked, in the order of a step."""

    WEIGHTS = 0
    """A parameter before the step."""
    FORWARD = 1
    """The output of a unit."""
    BACKWARD = 2
    """A value that a unit computes in the backward pass."""
    GRADIENT = 3
    """The gradient of a parameter, summed over this rank's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteValues:
    """`bad` of `size` elements are NaN or infinite. `place`: the index of a unit or of a parameter.

    `received`: another rank sent them, and everything before them was finite here.
    """

    where: ProbePoint
    place: int
    is_nan: bool
    bad: int
    size: int
    received: bool = False


class NonFiniteProbe:
    """Keeps the first non-finite values of this rank in one attempt at a step. For one thread."""

    def __init__(self) -> None:
        self.first: NonFiniteValues | None = None
        self._where, self._place = ProbePoint.FORWARD, 0

    @contextlib.contextmanager
    def on(self) -> Generator[None]:
        """Check what is computed on this thread."""
        _on_thread.probe = self
        try:
            yield
        finally:
            _on_thread.probe = None

    def at(self, where: ProbePoint, place: int) -> None:
        """Set the place to which the next checked values belong."""
        self._where, self._place = where, place

    def look(self, values: Array, *, received: bool = False) -> None:
        """Check an array of floats, of any shape, unless something non-finite was found before."""
        if self.first is None:
            found = find_non_finite(self._where, self._place, values)
            self.first = None if found is None else replace(found, received=received)


class _OnThread(threading.local):
    probe: NonFiniteProbe | None = None


_on_thread = _OnThread()


def active_probe() -> NonFiniteProbe | None:
    """Return the probe that is active on this thread."""
    return _on_thread.probe


def probe_sent(values: Array) -> None:
    """Check values of this rank before they are sent to other ranks."""
    if _on_thread.probe is not None:
        _on_thread.probe.look(values)


def probe_received(values: Array) -> None:
    """Check values that other ranks sent or contributed to."""
    if _on_thread.probe is not None:
        _on_thread.probe.look(values, received=True)


def find_non_finite(where: ProbePoint, place: int, values: Array) -> NonFiniteValues | None:
    """Describe the non-finite elements of `values`, of any float dtype and shape; None if all are finite."""
    bad = int(values.size - np.isfinite(values).sum())
    if not bad:
        return None
    is_nan = bool(np.isnan(values).any())
    return NonFiniteValues(where=where, place=place, is_nan=is_nan, bad=bad, size=values.size)
