"""Record the machines of a training thread, and report the result of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.actors.rank.member import Worker
from zbmd.transport.capture.registry import ActionT, EventT, MachineKind
from zbmd.transport.capture.tap import ThreadTap
from zbmd.transport.machine import Machine


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
