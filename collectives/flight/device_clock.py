"""Times of what a communicator's operations do on devices, by CUDA events, while a profiler wants them.

A pair of events stands around what a stream is asked for at a time. It is read once somebody has waited for
that stream anyway, so that nothing ever waits for a time.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final

from zbmd.transport.cuda.api import CudaApi, CudaFault

SPANS_MAX: Final = 256
"""Pairs of events that are not read yet; what comes on top has no time."""
KEPT_MAX: Final = 4096
"""Operations, and copies of other sizes, between `start` and `stop`."""
HOST_TO_DEVICE: Final = "host_to_device"
DEVICE_TO_HOST: Final = "device_to_host"
_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class _Span:
    """A span of a stream between two events. copies: its direction and bytes, if it is a copy by itself."""

    api: CudaApi
    begin: int
    end: int
    copies: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """What was timed. of_operations: ns on the device, by number of the flight record; copies: by direction
    and bytes, how many and how long, ns.
    """

    of_operations: dict[int, int]
    copies: dict[tuple[str, int], tuple[int, int]]


class DeviceClock:
    """Times operations of one communicator, for the thread that has its turn; `start` and `stop` for any."""

    def __init__(self) -> None:
        self.is_on = False
        self._times = DeviceTimes({}, {})
        self._ns = 0
        """Of the operation under way."""
        self._spans: list[_Span] = []
        self._idle: list[tuple[CudaApi, int]] = []

    def start(self) -> None:
        """Time what begins from now on."""
        self._times = DeviceTimes({}, {})
        self.is_on = True

    def stop(self) -> DeviceTimes:
        """Time no longer; return what was timed since `start`."""
        self.is_on = False
        return self._times

    def begin(self) -> None:
        """An operation begins. What an earlier one left unread, since it failed, has no time."""
        self._ns = 0
        self._drop()

    def end(self, number: int) -> None:
        """The operation of this flight record has ended, with its work on devices."""
        if self.is_on and len(self._times.of_operations) < KEPT_MAX:
            self._times.of_operations[number] = self._ns

    def timed(
        self, api: CudaApi, stream: int, copies: tuple[str, int] | None = None
    ) -> AbstractContextManager[None]:
        """Enter the result around requests to a stream. copies: direction and bytes, if it is one copy."""
        if not self.is_on or len(self._spans) >= SPANS_MAX:
            return _NOTHING
        return self._timed(api, stream, copies)

    @contextmanager
    def _timed(self, api: CudaApi, stream: int, copies: tuple[str, int] | None) -> Generator[None]:
        begin = self._recorded(api, stream)
        try:
            yield
        except BaseException:
            self._idle.append((api, begin))
            raise
        self._spans.append(_Span(api, begin, self._recorded(api, stream), copies))

    def _recorded(self, api: CudaApi, stream: int) -> int:
        place = next((place for place, (of, _) in enumerate(self._idle) if of is api), -1)
        event = api.event_create(timed=True) if place < 0 else self._idle.pop(place)[1]
        api.event_record(event, stream)
        return event

    def read(self) -> None:
        """Take the times of all that was asked for: its streams have been waited for. Raises `CudaFault`."""
        known = self._times.copies
        for span in self._spans:
            ns = span.api.event_elapsed_ns(span.begin, span.end)
            if span.copies is None:
                self._ns += ns
            elif span.copies in known or len(known) < KEPT_MAX:
                calls, before_ns = known.get(span.copies, (0, 0))
                known[span.copies] = calls + 1, before_ns + ns
        self._drop()

    def _drop(self) -> None:
        for span in self._spans:
            self._idle += ((span.api, span.begin), (span.api, span.end))
        self._spans.clear()

    def close(self) -> None:
        """Give the events back. Idempotent."""
        self.is_on = False
        self._drop()
        with suppress(CudaFault):  # a device that has failed keeps nothing
            while self._idle:
                api, event = self._idle.pop()
                api.event_destroy(event)
