"""Messages of device arrays between processes that cannot open each other's device memory.

A message is cut into pieces. While one is on its way through a `StagedPipe`, the device copies others between
its memory and further slots of page-locked memory, which it reads and writes by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from zbmd.transport.cuda.api import CudaApi
from zbmd.transport.cuda.array import DeviceSpan, span_of
from zbmd.transport.cuda.pieces import Begin, Event, Load, Loaded, Pieces, Stored
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.staging import StagedPipe
from zbmd.transport.native._native import address_of, now_ns

PIECE_BYTES: Final = 1 << 20
"""Several chunks of the pipe, so that a call of CUDA costs little beside the copy that it asks for."""
SLOTS: Final = 3
"""For a direction: one that the device copies, one that the pipe does, one between them."""


class DevicePipe:
    """Ordered messages, both ways at once: one thread may send, one receive.

    pipe: connected, the caller's, and used by nobody else meanwhile. Takes 2 * `SLOTS` * `PIECE_BYTES` of
    page-locked memory until `close`.
    """

    def __init__(self, api: CudaApi, pipe: StagedPipe) -> None:
        """Raises `CudaFault`."""
        self._pipe = pipe
        self._sending = _Slots(api)
        self._receiving = _Slots(api)

    def send(self, src: Any, *, deadline_ns: int = 0) -> None:
        """Send what the array's own stream has been asked to put there; it may be reused on return.

        Blocks. Raises as `StagedPipe.send`, `LocalProtocolError` on an array of no use, and `CudaFault`.
        After an error the pipe is of no more use.
        """

        def piped(part: memoryview) -> None:
            self._pipe.send(part, deadline_ns=deadline_ns)

        self._sending.pass_through(span_of(src), piped, loads=True)

    def receive(self, into: Any, *, deadline_ns: int = 0) -> None:
        """Fill the device array with the next message, which must have its size; all is there on return.

        Blocks. Raises as `StagedPipe.receive`, `LocalProtocolError` on an array of no use, and `CudaFault`.
        """
        span = span_of(into)
        if span.readonly:
            raise LocalProtocolError("a message is received into a device array that cannot be written")

        def piped(part: memoryview) -> None:
            self._pipe.receive(part, deadline_ns=deadline_ns)

        self._receiving.pass_through(span, piped, loads=False)

    def close(self) -> None:
        """Give the memory back, when nothing is under way. Idempotent."""
        self._sending.close()
        self._receiving.close()


class _Slots:
    """One direction: page-locked slots, each with the event behind its last copy, and a stream."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._stream = api.stream_create()
        self._before = api.event_create()
        self._events = [api.event_create() for _ in range(SLOTS)]
        self._memory = [api.host_alloc(PIECE_BYTES) for _ in range(SLOTS)]

    def pass_through(self, span: DeviceSpan, piped: Callable[[memoryview], None], *, loads: bool) -> None:
        """Do what `Pieces` says. loads: the device loads slots and the pipe stores them, or vice versa."""
        with self._lock:
            if not self._memory:
                raise LocalProtocolError("this pipe of device arrays is closed")
            self._begin_behind(span)
            try:
                self._pass(span, piped, loads=loads)
            finally:  # the device touches neither the array nor a slot any more, whatever has happened
                self._api.stream_synchronize(self._stream)

    def _pass(self, span: DeviceSpan, piped: Callable[[memoryview], None], *, loads: bool) -> None:
        pieces = Pieces(count=max(1, -(-span.nbytes // PIECE_BYTES)), slots=SLOTS)
        of_device: deque[int] = deque()
        of_pipe: deque[int] = deque()
        event: Event = Begin()
        while True:
            for action in pieces.handle(event, now_ns=now_ns()):
                if isinstance(action, Load) == loads:
                    self._ask(action.number, span, downwards=loads)
                    of_device.append(action.number)
                else:
                    of_pipe.append(action.number)
            if pieces.over:
                return
            # The pipe goes first: what it waits for is another process, and the device works on meanwhile.
            if of_pipe:
                number = of_pipe.popleft()
                piped(self._part(number, span))
                event = Stored(number=number) if loads else Loaded(number=number)
            else:
                number = of_device.popleft()
                self._api.event_synchronize(self._events[number % SLOTS])
                event = Loaded(number=number) if loads else Stored(number=number)

    def _begin_behind(self, span: DeviceSpan) -> None:
        if span.stream is not None:
            self._api.event_record(self._before, span.stream)
            self._api.stream_wait_event(self._stream, self._before)

    def _ask(self, number: int, span: DeviceSpan, *, downwards: bool) -> None:
        part = self._part(number, span)
        there = span.address + number * PIECE_BYTES
        if part.nbytes:
            here = address_of(part)
            into, src = (here, there) if downwards else (there, here)
            self._api.memcpy_async(into, src, part.nbytes, self._stream)
        self._api.event_record(self._events[number % SLOTS], self._stream)

    def _part(self, number: int, span: DeviceSpan) -> memoryview:
        """The piece, in its slot."""
        nbytes = min(PIECE_BYTES, span.nbytes - number * PIECE_BYTES)
        return self._memory[number % SLOTS][:nbytes]

    def close(self) -> None:
        """See `DevicePipe.close`."""
        with self._lock:
            if not self._memory:
                return
            memory, self._memory = self._memory, []
            for each in memory:
                self._api.host_free(each)
            for event in (self._before, *self._events):
                self._api.event_destroy(event)
            self._api.stream_destroy(self._stream)
