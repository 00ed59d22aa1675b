"""The device memory of one peer on this host, from our side: what `CudaCopies` says, done with CUDA.

One stream, one completion thread. Calls of CUDA that only ask are made under one lock, in the order of the
machine's actions; the thread waits for the events behind copies, one after the other, without the GIL.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from zbmd.transport.cuda import copies, opened
from zbmd.transport.cuda.api import CudaApi, CudaFault
from zbmd.transport.cuda.array import DeviceHandle, EventHandle, require_device_handle
from zbmd.transport.cuda.copies import Event as CopyEvent
from zbmd.transport.cuda.opened import Event as MemoryEvent
from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import now_ns

IDLE_EVENTS_MAX: Final = 64
"""Events of one peer that are kept to be recorded again."""
_NOTHING: Final = bytearray(0)

Copy: TypeAlias = Callable[[int], None]
"""Asks the stream that it is given for a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A copy: what asks for it, and what is done once it has drained."""

    copy: Copy
    transfer: Transfer
    event: int


class CudaPeer:
    """One incarnation of a peer. For any thread and any number of tasks at once.

    cell: an open region of the same peer in the host's memory, by which its cells are set, and by which it
    is known whether it lives; it is the caller's to close, after this.
    """

    def __init__(self, api: CudaApi, cell: RemoteRegion) -> None:
        self.api = api
        self.slot = cell.handle.slot
        self.incarnation = cell.handle.incarnation
        self._cell = cell
        self._lock = threading.RLock()
        self._copies = copies.CudaCopies()
        self._memory = opened.OpenedMemory()
        self._stream = api.stream_create()
        self._next = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._shutting: deque[tuple[int, DeviceHandle]] = deque()
        """Handles that are unused once that copy, the last one asked for by then, has drained."""
        self._idle_events: list[int] = []
        self._signal_events: dict[int, int] = {}
        self._their_events: dict[int, int] = {}
        self._took_back: dict[bytes, Callable[[], None]] = {}
        self._asked: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, name="zbmd-cuda", daemon=True)
        self._thread.start()

    # -- what is asked -----------------------------------------------------------------------------------

    def require_alive(self) -> None:
        """Raise `PeerLost` if the peer is known to have ended, `CudaFault` if the device has failed."""
        with self._lock:
            if self._copies.state is copies.CopiesState.OPEN:
                try:
                    self._cell.get(_NOTHING)
                except PeerLost:
                    self._handle(copies.PeerGone())
            if self._copies.state is copies.CopiesState.GONE:
                raise self._lost()
            if self._copies.state is copies.CopiesState.FAULTED:
                raise CudaFault(self._copies.why)

    def copy(
        self, copy: Copy, *buffers: object, after: int | None, channel: int | None = None, value: int = 0
    ) -> Transfer:
        """Ask for a copy, behind what `after` was asked; then set the peer's cell if `channel` is given.

        The transfer holds the buffers until the copy has drained. Raises as `require_alive`, and `LinkFull`.
        """
        with self._lock:
            self.require_alive()
            operation = self._next
            self._next += 1
            transfer = Transfer(*buffers)
            event = self._new_event()
            self._under_way[operation] = _UnderWay(copy=copy, transfer=transfer, event=event)
            try:
                self._handle(copies.CopyAsked(operation=operation, after=after, channel=channel, value=value))
            except ZbmdError:
                self._recycle(self._under_way.pop(operation).event)
                raise
            return transfer

    def notify(self, channel: int, value: int) -> None:
        """Set the peer's cell behind all copies; raises as `copy`."""
        with self._lock:
            self.require_alive()
            self._handle(copies.CellAsked(channel=channel, value=value))

    def signal(self, channel: int, value: int, *, after: int | None = None) -> None:
        """Set the peer's cell at once; what waits by `follow` there comes behind what was asked here.

        after: a stream of ours whose work is to be done by then, too. Raises as `copy`, and
        `LocalProtocolError` if the channel was not offered (`offer_event`).
        """
        with self._lock:
            self.require_alive()
            if channel not in self._signal_events:
                raise LocalProtocolError(f"channel {channel} has no event: offer it to the peer first")
            self._handle(copies.SignalAsked(channel=channel, value=value, after=after))

    def offer_event(self, own_slot: int, own_incarnation: int, channel: int) -> EventHandle:
        """Return the event of our signals on `channel`, for the peer's `take_event`."""
        with self._lock:
            event = self._signal_events.get(channel)
            if event is None:
                event = self._signal_events[channel] = self.api.event_create(interprocess=True)
            return EventHandle(
                slot=own_slot,
                incarnation=own_incarnation,
                channel=channel,
                device=self.api.facts().uuid,
                event=self.api.ipc_get_event_handle(event),
            )

    def take_event(self, handle: EventHandle) -> None:
        """Open the event of the peer's signals on a channel. Raises `RemoteProtocolError` if CUDA refuses."""
        if (handle.slot, handle.incarnation) != (self.slot, self.incarnation):
            raise RemoteProtocolError(f"an event of slot {handle.slot} is offered by slot {self.slot}")
        with self._lock:
            if handle.channel in self._their_events:
                return
            try:
                self._their_events[handle.channel] = self.api.ipc_open_event_handle(handle.event)
            except CudaFault as error:
                raise RemoteProtocolError(
                    f"the event of slot {self.slot} cannot be opened: {error}"
                ) from error

    def follow(self, stream: int, channel: int) -> None:
        """Have `stream` wait for what the peer has signalled on `channel`.

        Call it once our cell of (peer, channel) holds the value: before that it waits for what came earlier.
        """
        with self._lock:
            event = self._their_events.get(channel)
            if event is None:
                raise LocalProtocolError(f"no event of slot {self.slot} is known for channel {channel}")
            self.api.stream_wait_event(stream, event)

    # -- memory ------------------------------------------------------------------------------------------

    def open(self, handle: DeviceHandle) -> int:
        """Return the address at which the peer's array is mapped here, until `shut`.

        Raises `RemoteProtocolError` on a handle that is forged or stale, or does not fit what CUDA opens;
        `UserError` if too many allocations are in use, `PeerLost` and `CudaFault` as `require_alive`.
        """
        require_device_handle(handle, slot=self.slot, incarnation=self.incarnation)
        with self._lock:
            self.require_alive()
            self._handle_memory(opened.Use(memory=handle.memory), handle)
            try:
                base = self._memory.address(handle.memory)
                _, nbytes = self.api.address_range(base)
                if handle.offset + handle.nbytes > nbytes:
                    raise RemoteProtocolError(
                        f"a device handle of slot {self.slot} names bytes {handle.offset}+{handle.nbytes} of "
                        f"an allocation of {nbytes}"
                    )
            except ZbmdError:
                self._handle_memory(opened.Disuse(memory=handle.memory))
                raise
            return base + handle.offset

    def shut(self, handle: DeviceHandle) -> None:
        """End one `open`, once all copies that were queued until now have drained."""
        with self._lock:
            if self._under_way:
                self._shutting.append((max(self._under_way), handle))
            else:
                self._handle_memory(opened.Disuse(memory=handle.memory))

    def take_back(self, handle: DeviceHandle, then: Callable[[], None]) -> None:
        """Close this memory, which the peer wants back, and then call `then`."""
        with self._lock:
            try:
                self._memory.address(handle.memory)
            except LocalProtocolError:
                then()
                return
            self._took_back[handle.memory] = then
            self._handle_memory(opened.TakenBack(memory=handle.memory))

    # -- the end -----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End, because the peer has: nothing more is signalled; copies in flight drain. Idempotent."""
        with self._lock:
            self._handle(copies.PeerGone())

    def close(self) -> None:
        """Let go of the peer's memory and of the stream, once all has drained; waits for it. Idempotent."""
        with self._lock:
            self._handle(copies.CopiesCloseAsked())
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- actions -----------------------------------------------------------------------------------------

    def _handle(self, event: CopyEvent) -> None:
        for action in self._copies.handle(event, now_ns=now_ns()):
            match action:
                case copies.Join(stream=stream):
                    self._ask(lambda: self._join(stream))
                case copies.Issue(operation=operation):
                    self._ask(lambda: self._issue(operation))
                case copies.RecordSignal(channel=channel):
                    self._ask(lambda: self.api.event_record(self._signal_events[channel], self._stream))
                case copies.SetPeerCell(channel=channel, value=value):
                    self._tell(channel, value)
                case copies.FinishCopy(operation=operation, outcome=outcome):
                    self._finish(operation, outcome)
                case copies.LetGo():
                    self._asked.put(None)
                case _:
                    assert_never(action)

    def _ask(self, call: Callable[[], None]) -> None:
        if self._copies.state is copies.CopiesState.FAULTED:
            return
        try:
            call()
        except CudaFault as error:
            self._handle(copies.Faulted(why=str(error)))

    def _join(self, stream: int) -> None:
        event = self._new_event()
        self.api.event_record(event, stream)
        self.api.stream_wait_event(self._stream, event)
        self._recycle(event)  # what waits for it keeps what it stood for then

    def _issue(self, operation: int) -> None:
        asked = self._under_way[operation]
        asked.copy(self._stream)
        self.api.event_record(asked.event, self._stream)
        self._asked.put((operation, asked.event))

    def _tell(self, channel: int, value: int) -> None:
        if self._copies.state is not copies.CopiesState.OPEN:
            return
        try:
            self._cell.notify(channel, value)
        except PeerLost:
            self._handle(copies.PeerGone())

    def _finish(self, operation: int, outcome: copies.CopyOutcome) -> None:
        done = self._under_way.pop(operation)
        while self._shutting and self._shutting[0][0] <= operation:
            self._handle_memory(opened.Disuse(memory=self._shutting.popleft()[1].memory))
        if outcome is copies.CopyOutcome.FAULT:
            done.transfer.finish(CudaFault(self._copies.why))
            return
        self._recycle(done.event)
        done.transfer.finish(self._lost() if outcome is copies.CopyOutcome.LOST else None)

    def _handle_memory(self, event: MemoryEvent, handle: DeviceHandle | None = None) -> None:
        for action in self._memory.handle(event, now_ns=now_ns()):
            match action:
                case opened.Open(memory=memory):
                    assert handle is not None
                    self._open_memory(memory, handle)
                case opened.Close(memory=memory, address=address):
                    self._ask(lambda: self.api.ipc_close_mem_handle(address))
                    self._took_back.pop(memory, lambda: None)()
                case _:
                    assert_never(action)

    def _open_memory(self, memory: bytes, handle: DeviceHandle) -> None:
        device = self.api.device_of(handle.device)
        try:
            if device is None:
                raise CudaFault("its device is not visible to this process")
            address = self.api.ipc_open_mem_handle(memory, device)
        except CudaFault as error:
            self._handle_memory(opened.NotOpened(memory=memory))
            raise RemoteProtocolError(
                f"device memory of slot {self.slot} cannot be opened: {error}"
            ) from error
        self._handle_memory(opened.MemoryOpened(memory=memory, address=address))

    # -- the completion thread ---------------------------------------------------------------------------

    def _complete(self) -> None:
        while (asked := self._asked.get()) is not None:
            operation, event = asked
            try:
                self.api.event_synchronize(event)
            except CudaFault as error:
                with self._lock:
                    self._handle(copies.Faulted(why=str(error)))
                continue
            with self._lock:
                self._handle(copies.Drained(operation=operation))
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        self._handle_memory(opened.AllGone())
        events = [*self._idle_events, *self._signal_events.values(), *self._their_events.values()]
        self._idle_events, self._signal_events, self._their_events = [], {}, {}
        for event in events:
            self._destroy(event)
        self._ask(lambda: self.api.stream_destroy(self._stream))

    def _new_event(self) -> int:
        if self._idle_events:
            return self._idle_events.pop()
        try:
            return self.api.event_create()
        except CudaFault as error:
            self._handle(copies.Faulted(why=str(error)))
            raise

    def _recycle(self, event: int) -> None:
        if len(self._idle_events) < IDLE_EVENTS_MAX:
            self._idle_events.append(event)
        else:
            self._destroy(event)

    def _destroy(self, event: int) -> None:
        self._ask(lambda: self.api.event_destroy(event))

    def _lost(self) -> PeerLost:
        return PeerLost(self.slot, f"its incarnation {self.incarnation} has ended")
