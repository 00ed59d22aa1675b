"""Times of what a device does in one step, by CUDA events: of the stream that computes, and of copies.

An event is recorded where something begins or ends, which the host does not wait for. The times are read once
the step is over, so a step whose work is timed is asked for as any other one. Events are made once, when the
first step needs them, and there are at most `EVENTS_MAX`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

EVENTS_MAX: Final = 1 << 14
"""Of a step. What comes after the last one is timed as one."""
_NO_TIMES: Final = nullcontext()


class EventApi(Protocol):
    """The part of `CudaApi` that times need; PyTorch's events have it, too."""

    def event_create(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """See `CudaApi`."""
        ...

    def event_record(self, event: int, stream: int) -> None:
        """See `CudaApi`."""
        ...

    def event_query(self, event: int) -> bool:
        """See `CudaApi`."""
        ...

    def event_synchronize(self, event: int) -> None:
        """See `CudaApi`."""
        ...

    def event_elapsed_ns(self, begin: int, end: int) -> int:
        """See `CudaApi`."""
        ...


@dataclass(frozen=True, slots=True)
class CopyTime:
    """A copy between host and device, from the mark `begin` to the mark `end`.

    in_order: it was asked of the stream that computes.
    """

    op: str
    nbytes: int
    begin: int
    end: int
    in_order: bool


class StepTimes:
    """The marks of one step, in the order of their numbers; for any thread."""

    def __init__(self, api: EventApi, stream: int, events: list[int]) -> None:
        self._api, self._stream, self._events = api, stream, events
        self._lock = threading.Lock()
        self._used = self._expected = 0
        self._is_over = False
        self._ends: list[int] = []
        """Marks that are to be done before times are read, the last one of each stream among them."""
        self._open: set[int] = set()
        """Marks of other streams where a copy begins that has not been asked for as a whole."""
        self.copies: list[CopyTime] = []
        self.mark()

    def mark(self, stream: int | None = None) -> int:
        """Note what a stream, by default the one that computes, was asked for so far; return a number.

        Once there is no event left, it is that of the last mark. Raises `CudaFault`.
        """
        with self._lock:
            if self._is_over or self._used >= EVENTS_MAX - 1:  # the last one is that of the step's end
                return self._used - 1
            number = self._record(self._stream if stream is None else stream)
            if stream not in (None, self._stream):
                self._open.add(number)
            return number

    def _record(self, stream: int) -> int:
        if self._used == len(self._events):
            self._events.append(self._api.event_create(timed=True))
        self._api.event_record(self._events[self._used], stream)
        self._used += 1
        return self._used - 1

    def expect(self) -> None:
        """Wait with the reading for a copy that another thread will ask for; it says `arrived` then."""
        with self._lock:
            self._expected += 1

    def arrived(self) -> None:
        """See `expect`."""
        with self._lock:
            self._expected -= 1

    @contextmanager
    def copied(self, op: str, nbytes: int, stream: int) -> Generator[None]:
        """Time what a stream is asked for in the block: a copy of so many bytes."""
        begin = self.mark(stream)
        try:
            yield
        finally:
            end = self.mark(stream)
            with self._lock:
                if end > begin and not self._is_over:  # else there was no event left, or nobody waits for it
                    self.copies.append(CopyTime(op, nbytes, begin, end, in_order=stream == self._stream))
                    self._ends.append(end)
                    self._open -= {begin, end}

    def finish(self) -> None:
        """Note the end of the step on the stream that computes."""
        with self._lock:
            self._ends.append(self._record(self._stream))

    @property
    def is_full(self) -> bool:
        """Whether there was no event left before the end."""
        return self._used >= EVENTS_MAX

    @property
    def is_done(self) -> bool:
        """Whether the times can be read without waiting."""
        with self._lock:
            ends, waits = list(self._ends), self._expected > 0
        return not waits and all(self._api.event_query(self._events[end]) for end in ends)

    def read(self) -> list[int]:
        """Return the time of each mark since the first one, in ns; waits for the device.

        Copies that have not ended by now are left out. Raises `CudaFault`.
        """
        self.abandon()
        for end in self._ends:
            self._api.event_synchronize(self._events[end])
        elapsed_ns, first = self._api.event_elapsed_ns, self._events[0]
        return [
            0 if number in self._open else elapsed_ns(first, self._events[number])
            for number in range(self._used)
        ]

    def abandon(self) -> None:
        """Record no event any more: the next step uses them."""
        with self._lock:
            self._is_over = True


class Timer:
    """Times steps of one device, one after the other. Copies are timed in a step whose times are wanted."""

    def __init__(self, api: EventApi, stream: int) -> None:
        self._api, self._stream = api, stream
        self._events: list[int] = []
        self._last: StepTimes | None = None
        self.step: StepTimes | None = None
        """That of the step under way, if it is timed."""

    def begin(self) -> StepTimes:
        """Time a step from here on. The times of the one before must have been read, or are lost."""
        if self._last is not None:
            self._last.abandon()
        self.step = self._last = StepTimes(self._api, self._stream, self._events)
        return self.step

    def end(self) -> None:
        """Time no longer."""
        if self.step is not None:
            self.step.finish()
            self.step = None

    def copied(
        self, op: str, nbytes: int, stream: int, step: StepTimes | None = None
    ) -> AbstractContextManager[None]:
        """Enter the result around requests for a copy. step: the one that it is of, by default this one."""
        step = self.step if step is None else step
        return _NO_TIMES if step is None else step.copied(op, nbytes, stream)
