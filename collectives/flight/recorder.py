"""The flight recorder: what a communicator has run lately, for the story of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import overload

from zbmd.collectives.flight._flight import COMPLETE, FAILED, RUNNING, FlightRing
from zbmd.collectives.flight.device_clock import DeviceClock

FLIGHT_RECORDS_MAX = 4096
"""Operations remembered by a communicator."""


class FlightState(Enum):
    """The state of an operation."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


STATES = {RUNNING: FlightState.RUNNING, COMPLETE: FlightState.COMPLETE, FAILED: FlightState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """One operation. Times: CLOCK_MONOTONIC, ns; `end_ns` is 0 until the end.

    sequence: the number of its first native run. met_ns: when every member had entered it; 0 if they have
    not, or if it was over as they met (its data travelled with the descriptors).
    """

    operation: str
    algorithm: str
    sequence: int
    nbytes: int
    start_ns: int
    met_ns: int = 0
    end_ns: int = 0
    state: FlightState = FlightState.RUNNING
    error: str = ""


class FlightLog(Sequence[FlightRecord]):
    """The latest operations of one communicator, the oldest first. `ring` is what is written; `devices` times
    what they do on devices.
    """

    def __init__(self, maxlen: int = FLIGHT_RECORDS_MAX) -> None:
        self.ring = FlightRing(maxlen)
        self.devices = DeviceClock()
        self.maxlen = maxlen

    def __len__(self) -> int:
        return min(self.ring.begun, self.maxlen)

    @overload
    def __getitem__(self, index: int) -> FlightRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[FlightRecord]: ...
    def __getitem__(self, index: int | slice) -> FlightRecord | list[FlightRecord]:
        begun = self.ring.begun
        length = min(begun, self.maxlen)
        if isinstance(index, slice):
            kept: list[FlightRecord] = []
            for i in range(*index.indices(length)):
                with contextlib.suppress(IndexError):  # overwritten meanwhile
                    kept.append(self._record(begun - length + i))
            return kept
        if not -length <= index < length:
            raise IndexError(index)
        return self._record(begun + index if index < 0 else begun - length + index)

    def __iter__(self) -> Iterator[FlightRecord]:
        return iter(self[:])

    def _record(self, number: int) -> FlightRecord:
        operation, algorithm, sequence, nbytes, start, met, end, state, error = self.ring.record(number)
        return FlightRecord(
            operation=operation,
            algorithm=algorithm,
            sequence=sequence,
            nbytes=nbytes,
            start_ns=start,
            met_ns=met,
            end_ns=end,
            state=STATES[state],
            error=error,
        )
