"""What a node records of itself: a log of its process, and one of each of its incarnations.

All nodes may record into one directory, which hosts may share: the log of a process is named after its
node, and that of an incarnation after the incarnation.
"""

from __future__ import annotations

from typing import Final

import structlog
from msgspec.structs import replace

from zbmd.actors.host.links import host_identity
from zbmd.actors.replay.process_capture import CaptureSettings, ProcessCapture
from zbmd.transport.capture.errors import CaptureError, CaptureExists
from zbmd.transport.capture.log import LogRecorder
from zbmd.transport.capture.recorder import Clocks, Recorder, origin_of
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.identity import Identity

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

STARTS_MAX: Final = 1024
"""Logs of one node in one directory, one for each time that it was started."""


def node_capture(name: str, clock: HybridClock, settings: CaptureSettings) -> ProcessCapture:
    """The recorder of the process of the node that people call `name`: `host-NAME`, by number of its start.

    Raises `CaptureError`.
    """
    identity = replace(host_identity(0), name=f"host-{name}")
    for start in range(1, STARTS_MAX):
        try:
            return ProcessCapture(replace(identity, incarnation=start), clock, settings)
        except CaptureExists:
            continue  # of an earlier start
    return ProcessCapture(replace(identity, incarnation=STARTS_MAX), clock, settings)


def incarnation_recorder(
    identity: Identity, clock: HybridClock, settings: CaptureSettings | None
) -> Recorder | None:
    """Return the recorder of one incarnation, for its thread; None if no log is wanted, or can be opened."""
    if settings is None or settings.directory is None:
        return None
    try:
        clocks = Clocks(hybrid=clock)
        return LogRecorder(settings.directory, origin_of(identity), clocks, bulk=settings.bulk)
    except CaptureError as error:
        log.warning("this incarnation is not recorded", reason=str(error))
        return None
