"""The two recorders: `LogRecorder` writes a log, `RingRecorder` keeps the last records in memory.

The log's records are appended by the loop's thread; another thread encodes, compresses and writes them. A
record is handed to the kernel within `FLUSH_S`, not synced: it survives the process, not the machine. So a
SIGKILL loses at most the last `FLUSH_S` of records, and what was written before is whole.

The ring costs an append a record and encodes no frame, so it is always on. `dump_on_crash` writes it down at
an unhandled exception and at those fatal signals after which Python still runs. A SIGKILL, and a fault inside
native code (SIGSEGV, SIGBUS), lose it: only a log on disk outlives those.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType

import structlog

from zbmd.transport.capture.errors import CaptureError
from zbmd.transport.capture.files import DiskLimits, LogFiles, declared_again
from zbmd.transport.capture.format import BLOCK_RECORDS_MAX, Origin
from zbmd.transport.capture.recorder import RECORD_WEIGHT_BYTES, TEXT_CHARS_MAX, Clocks, Detail, Recorder
from zbmd.transport.capture.records import PROCESS_STREAM, RawRecord, RecordType, Taken
from zbmd.transport.errors import LocalProtocolError

RING_BYTES = 8 << 20
RING_PARTS = 64
"""The ring forgets by parts of this fraction."""
PARTS_PER_STRETCH = 16
"""So often machines' states are recorded: of the ring's records at least three quarters can be replayed."""
CRASH_SIGNALS = (signal.SIGABRT, signal.SIGQUIT, signal.SIGXCPU)
"""Sent from outside, these end a process that can still run Python."""


class RingRecorder(Recorder):
    """Keeps the last records, `ring_bytes` of them by weight, and the newest one beyond it."""

    def __init__(
        self,
        origin: Origin,
        clocks: Clocks,
        *,
        ring_bytes: int = RING_BYTES,
        bulk: Detail = Detail.DIGEST,
        actions: Detail = Detail.WHOLE,
    ) -> None:
        super().__init__(origin, clocks, bulk=bulk, actions=actions)
        self._ring_bytes = ring_bytes
        self._part_bytes = ring_bytes // RING_PARTS
        if self._part_bytes < RECORD_WEIGHT_BYTES:
            raise LocalProtocolError(f"a ring of {ring_bytes} bytes holds next to no record")
        self.forgotten = 0
        """Records that have left the ring; an actor's turn counts as one."""
        self._parts: deque[list[Taken]] = deque()
        self._begun: deque[tuple[int, int]] = deque()
        """For each part, what was taken before it, by weight, and how many records."""
        self._parts_begun = 0
        self._ended: deque[tuple[int, RawRecord]] = deque()
        """Streams that have ended, with the part in which they did: its records may still name them."""
        self._make_room(0)
        self._packs = True

    def dump(self, directory: Path, reason: str) -> Path:
        """Write the ring as a log into `directory`, which may hold those of others; returns where.

        The ring stays as it is. Raises `CaptureExists` if it was dumped there before, `CaptureError` or
        `OSError` if it cannot be written.
        """
        taken = [one for part in list(self._parts) for one in list(part)]
        at_ns, hlc = self.now_ns(), self._stamp()
        files = LogFiles(
            directory, self.origin, DiskLimits(), self.clocks.anchor, records_before=self.forgotten
        )
        records = files.unfolded(taken)
        begun = {record[1] for record in records if record[0] == RecordType.STREAM}
        first_ns, first_hlc = records[0][2:4] if records else (at_ns, hlc)
        known = [*self._streams.values(), *(stream for _, stream in self._ended)]
        older = sorted((stream for stream in known if stream[1] not in begun), key=lambda stream: stream[1])
        try:
            files.write([declared_again(stream, first_ns, first_hlc) for stream in older])
            files.write(records)
            files.write([(int(RecordType.NOTE), PROCESS_STREAM, at_ns, hlc, f"dumped from memory: {reason}")])
            files.write([(int(RecordType.END), PROCESS_STREAM, at_ns, hlc, reason)])
        finally:
            files.close()
        return files.path

    def close(self, reason: str = "closed") -> None:
        """Stop recording; what is in the ring can still be dumped."""
        self._off()

    def end_stream(self, stream: int, reason: str) -> None:
        """The machine or link of this stream is no more."""
        declared = self._streams.get(stream)
        super().end_stream(stream, reason)
        if declared is not None:
            self._ended.append((self._parts_begun, declared))

    def _make_room(self, weight: int) -> bool:
        oldest_bytes = self._taken_bytes + self._part_bytes - self._ring_bytes
        while self._begun and self._begun[0][0] < oldest_bytes:
            self._parts.popleft()
            self._begun.popleft()
        part: list[Taken] = []
        self._parts.append(part)
        self._begun.append((self._taken_bytes - weight, self._taken_records))
        self.forgotten = self._begun[0][1]
        self._parts_begun += 1
        self.stretch = self._parts_begun // PARTS_PER_STRETCH
        while self._ended and self._ended[0][0] <= self._parts_begun - len(self._parts):
            self._ended.popleft()
        self._append = part.append
        self._alarm_bytes = self._taken_bytes + self._part_bytes
        return True

    def _forget(self) -> None:
        self._parts.clear()

    def _hold_files(self) -> None:
        """The ring has no file."""

    def _release_files(self) -> None:
        """The ring has no file."""


def dump_on_crash(ring: RingRecorder, directory: Path) -> Callable[[], None]:
    """Dump the ring into `directory` at the first crash of this process; returns what undoes it.

    A crash is an exception that nothing handles, in any thread, or a signal of `CRASH_SIGNALS` whose handler
    is the kernel's. Call it in the main thread. An exception that ends a task of an event loop is the
    loop's to report: call `RingRecorder.dump` from its exception handler.
    """
    hooks = _CrashHooks(ring, directory)
    hooks.install()
    return hooks.remove


class _CrashHooks:
    def __init__(self, ring: RingRecorder, directory: Path) -> None:
        self._ring = ring
        self._directory = directory
        self._pid = os.getpid()
        self._dumped = False
        self._excepthook = sys.excepthook
        self._thread_hook = threading.excepthook
        self._signals = [s for s in CRASH_SIGNALS if signal.getsignal(s) is signal.SIG_DFL]

    def install(self) -> None:
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread
        for number in self._signals:
            signal.signal(number, self._on_signal)

    def remove(self) -> None:
        sys.excepthook = self._excepthook
        threading.excepthook = self._thread_hook
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            self._dump(f"{kind.__name__}: {error}")
        self._excepthook(kind, error, trace)

    def _on_thread(self, crash: threading.ExceptHookArgs) -> None:
        where = crash.thread.name if crash.thread is not None else "a thread"
        self._dump(f"{crash.exc_type.__name__} in {where}: {crash.exc_value}")
        self._thread_hook(crash)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._dump(f"ended by {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _dump(self, reason: str) -> None:
        if self._dumped or os.getpid() != self._pid:
            return
        self._dumped = True
        try:
            path = self._ring.dump(self._directory, reason[:TEXT_CHARS_MAX])
        except (CaptureError, OSError) as error:
            _log.error("the last records before the crash cannot be written", error=str(error))
        else:
            _log.error("the last records before the crash are written", log=str(path), reason=reason)


FLUSH_S = 0.1
"""Longest time until a record is written: what a crash loses at most."""
WAIT_S_MAX = 1.0
"""Longest time that a full buffer blocks the recording thread before records are dropped."""
CLOSE_S_MAX = 5.0
"""Longest wait of `close` and `flush` for the disk."""
WAKES_PER_BUFFER = 8
"""The writer is woken early each time that this fraction of the buffer has filled."""

_log = structlog.get_logger("zbmd.capture")


class Overflow(Enum):
    """The reaction to a full buffer, when the disk is too slow. Dropped records are counted in the log."""

    WAIT = "wait"  # hold up the recording thread, WAIT_S_MAX at most, then drop
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """The bounds of a log. buffer_bytes: what may wait to be written, by weight."""

    buffer_bytes: int = 16 << 20
    overflow: Overflow = Overflow.WAIT
    disk: DiskLimits = field(default_factory=DiskLimits)

    def __post_init__(self) -> None:
        if self.buffer_bytes < WAKES_PER_BUFFER * RECORD_WEIGHT_BYTES:
            raise LocalProtocolError(f"a buffer of {self.buffer_bytes} bytes holds next to no record")


class LogRecorder(Recorder):
    """Records into `<directory>/<process>#<incarnation>/`.

    When the disk is full or fails, the capture stops with one warning, and the process goes on. In a forked
    child the recorder is off. Raises `CaptureExists`, or `CaptureError` if the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        origin: Origin,
        clocks: Clocks,
        *,
        limits: LogLimits | None = None,
        bulk: Detail = Detail.DIGEST,
        actions: Detail = Detail.WHOLE,
    ) -> None:
        super().__init__(origin, clocks, bulk=bulk, actions=actions)
        limits = limits or LogLimits()
        self._limit_bytes = limits.buffer_bytes
        self._wake_bytes = limits.buffer_bytes // WAKES_PER_BUFFER
        self._overflow = limits.overflow
        self._buffer: deque[RawRecord] = deque()
        self._written_bytes = 0
        """The writer's count against `_taken_bytes`: each of the two has one thread that changes it."""
        self._lost = 0
        self.failure: str | None = None
        """Why the capture stopped before its time, if it did."""
        self._files = LogFiles(directory, origin, limits.disk, clocks.anchor, on_segment=self._begin_stretch)
        self.path = self._files.path
        self._closing = False
        self._writer_done = False
        self._passes = 0
        self._passed = threading.Condition()
        self._wake = threading.Event()
        self._append = self._buffer.append
        self._alarm_bytes = self._wake_bytes
        self._writer = threading.Thread(target=self._write_on, name="zbmd-capture", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def flush(self) -> bool:
        """Wait until what was recorded so far is written; False if it is not, after `CLOSE_S_MAX` at most."""
        with self._passed:
            # The pass under way may have begun before the last record; the one after it has not.
            wanted = self._passes + 2
            while self._passes < wanted and not self._writer_done:
                self._wake.set()
                if not self._passed.wait(CLOSE_S_MAX):
                    return False
        return self.failure is None

    def close(self, reason: str = "closed") -> None:
        """Write what is left and end the log; returns after `CLOSE_S_MAX` also if the disk hangs."""
        if self._closing:
            return
        if self._lost:
            self._append(self._lost_record())
        self._append((int(RecordType.END), PROCESS_STREAM, self.now_ns(), self._stamp(), reason))
        self._off()
        self._closing = True  # only now: the writer's last pass begins after it has seen this
        self._wake.set()
        self._writer.join(CLOSE_S_MAX)
        if self._writer.is_alive():
            _log.warning("the capture's last records wait for the disk", log=str(self.path))
        atexit.unregister(self.close)

    # ---- the recording thread

    def _make_room(self, weight: int) -> bool:
        if self.failure is not None:
            self._off()
            return True
        waiting_bytes = self._taken_bytes - self._written_bytes
        if waiting_bytes > self._limit_bytes and self._overflow is Overflow.WAIT and not self._lost:
            self._wait_for_room()
            waiting_bytes = self._taken_bytes - self._written_bytes
        if waiting_bytes > self._limit_bytes:
            self._taken_bytes -= weight
            self._alarm_bytes = 0  # the next record comes here too: the loss is recorded before it
            self._lost += 1
            self._wake.set()
            return False
        if self._lost:
            self._append(self._lost_record())
            self._lost = 0
        if waiting_bytes > self._wake_bytes:
            self._wake.set()
        # The bound itself is an alarm too: no step towards it passes over it.
        self._alarm_bytes = self._taken_bytes + min(self._wake_bytes, self._limit_bytes - waiting_bytes)
        return True

    def _wait_for_room(self) -> None:
        with self._passed:
            self._wake.set()
            self._passed.wait_for(
                lambda: self._writer_done or self._taken_bytes - self._written_bytes <= self._limit_bytes,
                WAIT_S_MAX,
            )

    def _lost_record(self) -> RawRecord:
        reason = "the disk was too slow for the buffer"
        return (int(RecordType.LOST), PROCESS_STREAM, self.now_ns(), self._stamp(), self._lost, reason)

    # ---- the writing thread

    def _begin_stretch(self, segment: int) -> None:
        self.stretch = segment

    def _write_on(self) -> None:
        try:
            closing = False
            while not closing:
                self._wake.wait(FLUSH_S)
                self._wake.clear()
                closing = self._closing
                self._write_waiting()
                with self._passed:
                    self._passes += 1
                    self._passed.notify_all()
            self._files.close()
        except OSError as error:
            self._stop(error)
        finally:
            with self._passed:
                self._writer_done = True
                self._passed.notify_all()
            if not self._closing and self.failure is None:
                self.failure = "the writing thread has failed; its error was reported"

    def _write_waiting(self) -> None:
        buffer = self._buffer
        # In this order: what is counted here is in the buffer, but for one record on its way.
        taken_bytes = self._taken_bytes
        left = len(buffer)
        while left:
            count = min(left, BLOCK_RECORDS_MAX)
            take = buffer.popleft
            self._files.write([take() for _ in range(count)])
            # Each record by this pass's average: weighing them one by one would take longer than writing.
            self._written_bytes += (taken_bytes - self._written_bytes) * count // left
            left -= count
            with self._passed:
                self._passed.notify_all()

    def _stop(self, error: OSError) -> None:
        self.failure = error.strerror or str(error)
        self._off()
        self._buffer.clear()
        self._files.abandon()
        _log.warning(
            "the capture has stopped, the job goes on: free some space, or give the capture a smaller bound",
            log=str(self.path),
            error=self.failure,
        )

    def _forget(self) -> None:
        self._closing = True
        self._buffer.clear()
        self._files.forget()
        atexit.unregister(self.close)

    def _hold_files(self) -> None:
        self._files.changing.acquire()

    def _release_files(self) -> None:
        self._files.changing.release()
