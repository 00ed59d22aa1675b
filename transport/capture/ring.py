"""The recorder that keeps the last records in memory, and writes them down when something has gone wrong.

It costs an append a record and encodes no frame, so it is always on. `dump_on_crash` writes it down at an
unhandled exception and at those fatal signals after which Python still runs. A SIGKILL, and a fault inside
native code (SIGSEGV, SIGBUS), take it along: only a log on disk outlives those.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import structlog

from zbmd.transport.capture.errors import CaptureError
from zbmd.transport.capture.files import DiskLimits, LogFiles, declared_again
from zbmd.transport.capture.format import Origin
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

_log = structlog.get_logger("zbmd.capture")


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
        self._forgotten = 0
        self._parts: deque[list[Taken]] = deque()
        self._begun: deque[tuple[int, int]] = deque()
        """For each part, what was taken before it, by weight, and how many records."""
        self._parts_begun = 0
        self._ended: deque[tuple[int, RawRecord]] = deque()
        """Streams that have ended, with the part in which they did: its records may still name them."""
        self._make_room(0)
        self._packs = True

    @property
    def forgotten(self) -> int:
        """Return how many records have left the ring; an actor's turn counts as one."""
        return self._forgotten

    def dump(self, directory: Path, reason: str) -> Path:
        """Write the ring as a log into `directory`, which may hold those of others; returns where.

        The ring stays as it is. Raises `CaptureExists` if it was dumped there before, `CaptureError` or
        `OSError` if it cannot be written.
        """
        taken = [one for part in list(self._parts) for one in list(part)]
        at_ns, hlc = self.now_ns(), self._stamp()
        files = LogFiles(
            directory, self.origin, DiskLimits(), self.clocks.anchor, records_before=self._forgotten
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
        self._forgotten = self._begun[0][1]
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
