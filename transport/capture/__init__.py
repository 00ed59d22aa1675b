"""Capture: what every machine and link of a process took in, written down so that it can be played again.

Writing. One recorder a process: `LogRecorder` writes a log that outlives the process, `RingRecorder` keeps
the last records in memory for `dump`. Both are used in the same way, from the event loop's thread:

    clocks = Clocks(hybrid=endpoint.clock)
    recorder = LogRecorder(Path("capture"), origin_of(identity), clocks)
    tap = Tap(recorder, STEP_COMMIT, "step-commit", StepCommit(**config), config)
    actions = tap.handle(event, now_ns=now_ns)
    ...
    recorder.close("finished")

where `STEP_COMMIT = register("step-commit", 1, build, events=…, actions=…)` stands beside the machine.

Reading. `open_log` gives each process's records; `merged` puts those of several in causal order, `skews`
estimates how far their clocks are apart; `replay_log` plays every machine again and compares.
`capture_to_text` makes a capture a fixture that can be kept with a test's source.

`log` says what recording costs and may lose, `format` how the files are laid out.
"""

from __future__ import annotations

from zbmd.transport.capture.errors import (
    CaptureDamaged,
    CaptureError,
    CaptureExists,
    CaptureMismatch,
    NotACapture,
)
from zbmd.transport.capture.files import DiskLimits, capture_to_text, text_to_capture
from zbmd.transport.capture.format import Origin
from zbmd.transport.capture.log import LogLimits, LogRecorder, RingRecorder, dump_on_crash
from zbmd.transport.capture.reader import (
    ClockSkew,
    Ending,
    Entry,
    Filter,
    ProcessLog,
    StepPlace,
    merged,
    open_log,
    skews,
)
from zbmd.transport.capture.recorder import Clocks, Detail, Recorder, origin_of
from zbmd.transport.capture.records import Record, RecordType
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.capture.replay import (
    Divergence,
    Identical,
    Incomplete,
    Verdict,
    describe,
    replay_log,
    replay_process,
    replay_stream,
)
from zbmd.transport.capture.tap import Tap, ThreadTap

__all__ = [
    "CaptureDamaged",
    "CaptureError",
    "CaptureExists",
    "CaptureMismatch",
    "Clocks",
    "Detail",
    "DiskLimits",
    "Divergence",
    "Ending",
    "Entry",
    "Filter",
    "Identical",
    "Incomplete",
    "RecordType",
    "LogLimits",
    "LogRecorder",
    "MachineKind",
    "NotACapture",
    "Origin",
    "ProcessLog",
    "Record",
    "Recorder",
    "RingRecorder",
    "ClockSkew",
    "StepPlace",
    "Tap",
    "ThreadTap",
    "Verdict",
    "capture_to_text",
    "describe",
    "dump_on_crash",
    "merged",
    "open_log",
    "origin_of",
    "register",
    "replay_log",
    "replay_process",
    "replay_stream",
    "skews",
    "text_to_capture",
]
