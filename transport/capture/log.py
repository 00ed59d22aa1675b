"""The recorder that writes a log: the loop's thread appends, another encodes, compresses and writes.

What was recorded is on its way to the disk `FLUSH_S` later at most (handed to the kernel, not synced: it
survives the process, not the machine). So a SIGKILL loses at most the last `FLUSH_S` of records, and what was
written before is whole.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import structlog

from zbmd.transport.capture.files import DiskLimits, LogFiles
from zbmd.transport.capture.format import BLOCK_RECORDS_MAX, Origin
from zbmd.transport.capture.recorder import RECORD_WEIGHT_BYTES, Clocks, Detail, Recorder
from zbmd.transport.capture.records import PROCESS_STREAM, RawRecord, RecordType
from zbmd.transport.errors import LocalProtocolError

FLUSH_S = 0.1
"""Longest time until a record is written: what a crash loses at most."""
WAIT_S_MAX = 1.0
"""How long a full buffer blocks the recording thread before records are dropped."""
CLOSE_S_MAX = 5.0
"""Longest wait of `close` and `flush` for the disk."""
WAKES_PER_BUFFER = 8
"""The writer is woken early each time that this fraction of the buffer has filled."""

_log = structlog.get_logger("zbmd.capture")


class Overflow(Enum):
    """What to do while the buffer is full: the disk is too slow. What is dropped is counted in the log."""

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
        self._failure: str | None = None
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

    @property
    def failure(self) -> str | None:
        """Why the capture stopped before its time, if it did."""
        return self._failure

    def flush(self) -> bool:
        """Wait until what was recorded so far is written; False if it is not, after `CLOSE_S_MAX` at most."""
        with self._passed:
            # The pass under way may have begun before the last record; the one after it has not.
            wanted = self._passes + 2
            while self._passes < wanted and not self._writer_done:
                self._wake.set()
                if not self._passed.wait(CLOSE_S_MAX):
                    return False
        return self._failure is None

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
        if self._failure is not None:
            self._off()
            return True
        waiting_bytes = self._taken_bytes - self._written_bytes
        if waiting_bytes > self._limit_bytes and self._overflow is Overflow.WAIT and not self._lost:
            self._wait_for_room()
            waiting_bytes = self._taken_bytes - self._written_bytes
        if waiting_bytes > self._limit_bytes:
            self._taken_bytes -= weight
            self._alarm_bytes = 0  # the next record comes here too: the loss is told before it
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
            if not self._closing and self._failure is None:
                self._failure = "the writing thread has failed; its error was reported"

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
        self._failure = error.strerror or str(error)
        self._off()
        self._buffer.clear()
        self._files.abandon()
        _log.warning(
            "the capture has stopped, the job goes on: free some space, or give the capture a smaller bound",
            log=str(self.path),
            error=self._failure,
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
