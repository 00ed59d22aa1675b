"""A rank's reports to its host about a run, and the recording of its machines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from zbmd.actors.rank.member import Worker
from zbmd.training.run.ledger import CommitRecord, loss_of
from zbmd.transport.capture.registry import ActionT, EventT, MachineKind
from zbmd.transport.capture.tap import ThreadTap
from zbmd.transport.machine import Machine
from zbmd.transport.shm.death_notice import DeathNotice


def captured_machine(
    worker: Worker,
    kind: MachineKind[EventT, ActionT],
    name: str,
    machine: Machine[EventT, ActionT],
    config: Mapping[str, Any],
) -> ThreadTap[EventT, ActionT]:
    """Return `machine`, for the thread that trains, recorded if the process of `worker` writes a log.

    Like the operations of a group, it is too expensive for the ring in memory that is always on.
    """
    loop = worker.system.loop
    return ThreadTap(worker.capture.whole, kind, name, machine, config, post=loop.call_soon_threadsafe)


def report_result(worker: Worker, result: Any) -> None:
    """Print `result`, a struct or dataclass, as a line of JSON, and report it; return once the host has it.

    Called on the training thread while all ranks are still present: if this rank is killed before it returns,
    the other ranks notice, and its replacement reports the same result.
    """
    print(msgspec.json.encode(result).decode(), flush=True)
    worker.report({"kind": "result", **msgspec.to_builtins(result)})
    asyncio.run_coroutine_threadsafe(worker.reported(), worker.system.loop).result()


def report_losses(
    worker: Worker, also: Callable[[int, int, int], None] = lambda *_: None
) -> Callable[[], None]:
    """Report each rank that is lost; call the result to stop.

    also: called with its rank, its incarnation, and when that was noticed, in ns of CLOCK_MONOTONIC.
    """

    def report(rank: int, incarnation: int, notice: DeathNotice) -> None:
        if not notice.clean:
            worker.report({"kind": "lost", "peer": rank, "incarnation": incarnation, "at_ns": notice.at_ns})
            also(rank, incarnation, notice.at_ns)

    return worker.on_peer_lost(report)


Report = dict[str, Any]


def step_report(record: CommitRecord, grad_norm: float) -> Report:
    """Return the report to the host about a logged step."""
    return {
        "kind": "step",
        "version": record.version,
        "epoch": record.epoch,
        "members": list(record.members),
        "loss": loss_of(record),
        "grad_norm": grad_norm,
        "held_out_loss": record.held_out_loss,
        "at_ns": record.at_ns,
    }


def adopted_report(version: int, epoch: int) -> Report:
    """Return the report to the host that a rank has caught up with `version`."""
    return {"kind": "adopted", "version": version, "epoch": epoch, "at_ns": time.monotonic_ns()}
