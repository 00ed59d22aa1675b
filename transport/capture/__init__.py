"""Capture: what every machine and link of a process took in, written down so that it can be played again.

Writing. One recorder a process: `LogRecorder` writes a log that outlives the process, `RingRecorder` keeps
the last records in memory for `dump`. Both are used in the same way, from the event loop's thread:

    clocks = Clocks(hybrid=endpoint.clock)
    recorder = LogRecorder(Path("capture"), origin_of(identity), clocks)
    tap = Tap(recorder, MIRROR, "mirror", Mirror(**config), config)
    actions = tap.handle(event, now_ns=now_ns)
    ...
    recorder.close("finished")

where `MIRROR = register("mirror", 1, build, events=…, actions=…)` stands beside the machine.

Reading. `open_log` gives each process's records; `merged` puts those of several in causal order, `skews`
estimates how far their clocks are apart; `replay_log` plays every machine again and compares.
`capture_to_text` makes a capture a fixture that can be kept with a test's source.

`log` says what recording costs and may lose, `format` how the files are laid out.
"""

from __future__ import annotations

from zbmd.transport.capture.errors import CaptureDamaged as CaptureDamaged
from zbmd.transport.capture.errors import CaptureError as CaptureError
from zbmd.transport.capture.errors import CaptureExists as CaptureExists
from zbmd.transport.capture.errors import CaptureMismatch as CaptureMismatch
from zbmd.transport.capture.errors import NotACapture as NotACapture
from zbmd.transport.capture.files import DiskLimits as DiskLimits
from zbmd.transport.capture.files import capture_to_text as capture_to_text
from zbmd.transport.capture.files import text_to_capture as text_to_capture
from zbmd.transport.capture.format import Origin as Origin
from zbmd.transport.capture.log import LogLimits as LogLimits
from zbmd.transport.capture.log import LogRecorder as LogRecorder
from zbmd.transport.capture.log import RingRecorder as RingRecorder
from zbmd.transport.capture.log import dump_on_crash as dump_on_crash
from zbmd.transport.capture.reader import ClockSkew as ClockSkew
from zbmd.transport.capture.reader import Ending as Ending
from zbmd.transport.capture.reader import Entry as Entry
from zbmd.transport.capture.reader import Filter as Filter
from zbmd.transport.capture.reader import ProcessLog as ProcessLog
from zbmd.transport.capture.reader import StepPlace as StepPlace
from zbmd.transport.capture.reader import merged as merged
from zbmd.transport.capture.reader import open_log as open_log
from zbmd.transport.capture.reader import skews as skews
from zbmd.transport.capture.recorder import Clocks as Clocks
from zbmd.transport.capture.recorder import Detail as Detail
from zbmd.transport.capture.recorder import Recorder as Recorder
from zbmd.transport.capture.recorder import origin_of as origin_of
from zbmd.transport.capture.records import Record as Record
from zbmd.transport.capture.records import RecordType as RecordType
from zbmd.transport.capture.registry import MachineKind as MachineKind
from zbmd.transport.capture.registry import register as register
from zbmd.transport.capture.replay import Divergence as Divergence
from zbmd.transport.capture.replay import Identical as Identical
from zbmd.transport.capture.replay import Incomplete as Incomplete
from zbmd.transport.capture.replay import Verdict as Verdict
from zbmd.transport.capture.replay import describe as describe
from zbmd.transport.capture.replay import replay_log as replay_log
from zbmd.transport.capture.replay import replay_process as replay_process
from zbmd.transport.capture.replay import replay_stream as replay_stream
from zbmd.transport.capture.tap import Tap as Tap
from zbmd.transport.capture.tap import ThreadTap as ThreadTap
