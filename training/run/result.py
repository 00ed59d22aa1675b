"""What came of a run: told by one rank while all of them are still there."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from zbmd.actors.rank.member import Worker


def tell_result(worker: Worker, result: Any) -> None:
    """Print `result`, a struct or dataclass, as a line of JSON, and report it; return once the host has it.

    For the thread that trains, before the ranks part. If this rank is killed until then, the others miss it:
    its replacement tells the same again. Later nobody would be there of whom it could learn anything.
    """
    print(msgspec.json.encode(result).decode(), flush=True)
    worker.report({"kind": "result", **msgspec.to_builtins(result)})
    asyncio.run_coroutine_threadsafe(worker.reported(), worker.system.loop).result()
