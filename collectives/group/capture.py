"""Records the operations of a group's data plane: what runs, since when, and the digest of what came out.

The data plane calls from its own thread, and hands each event over to the event loop, whose recorder it is.
That costs some microseconds an operation, so it is done for a log only, never for the ring in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import xxhash
from numpy.typing import NDArray

from zbmd.actors.rank.member import Worker
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.flight.recorder import FlightRecord, FlightState
from zbmd.collectives.group.operation_log import (
    OPERATIONS,
    OperationBegan,
    OperationEnded,
    OperationEvent,
    OperationLog,
)
from zbmd.transport.capture.recorder import BULK_WHOLE_BYTES_MAX, Detail, Recorder
from zbmd.transport.capture.tap import Tap


def record_operations(worker: Worker, communicator: Communicator) -> None:
    """Record all operations of `communicator` from now on, if this process writes a log."""
    recorder = worker.capture.whole
    if recorder is not None:
        whole = worker.capture.bulk is Detail.WHOLE
        communicator.on_flight = _OperationRecorder(recorder, communicator, worker.system.loop, whole=whole)


class _OperationRecorder:
    def __init__(
        self, recorder: Recorder, communicator: Communicator, loop: asyncio.AbstractEventLoop, *, whole: bool
    ) -> None:
        config: dict[str, Any] = {
            "rank": communicator.rank,
            "members": communicator.members,
            "epoch": communicator.epoch,
            "channel": communicator.channel,
        }
        name = f"group{communicator.channel}/{communicator.epoch}"
        self._recorder = recorder
        self._tap = Tap(recorder, OPERATIONS, name, OperationLog(**config), config)
        self._loop = loop
        self._whole = whole

    def __call__(self, record: FlightRecord, results: Sequence[NDArray[Any]]) -> None:
        """An operation began or ended; on the thread that performs it, its results not yet handed out."""
        if record.state is FlightState.RUNNING:
            began = OperationBegan(
                sequence=record.sequence,
                operation=record.operation,
                algorithm=record.algorithm,
                nbytes=record.nbytes,
                began_ns=record.start_ns,
            )
            self._hand_over(began, b"")
            return
        digest = xxhash.xxh3_128()
        for result in results:
            digest.update(result.data)
        ended = OperationEnded(
            sequence=record.sequence,
            ended_ns=record.end_ns,
            digest=digest.digest() if results and not record.error else b"",
            error=record.error,
        )
        keep = self._whole and sum(result.nbytes for result in results) <= BULK_WHOLE_BYTES_MAX
        self._hand_over(ended, b"".join(result.tobytes() for result in results) if keep else b"")

    def _hand_over(self, event: OperationEvent, data: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its recorder with it
            self._loop.call_soon_threadsafe(self._take, event, data)

    def _take(self, event: OperationEvent, data: bytes) -> None:
        at_ns = event.began_ns if isinstance(event, OperationBegan) else event.ended_ns
        self._tap.handle(event, now_ns=at_ns)
        if data:
            self._recorder.bulk(self._tap.stream, f"result of operation {event.sequence}", data)
