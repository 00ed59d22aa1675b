"""The flight recorder: what a communicator has run lately, for the story of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FLIGHT_RECORDS_MAX = 4096
"""Operations remembered by a communicator."""


class FlightState(Enum):
    """How far an operation came."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class FlightRecord:
    """One operation. Times: CLOCK_MONOTONIC, ns; `end_ns` is 0 until the end."""

    operation: str
    algorithm: str
    sequence: int
    nbytes: int
    start_ns: int
    end_ns: int = 0
    state: FlightState = FlightState.RUNNING
    error: str = ""
