"""The meeting of the guards of several hosts in torchrun's store, in a process of its own beside each.

A guard imports no PyTorch, and the store is PyTorch's. The process writes the cookie of the job to its guard.
Beside the first host's it reads the address of that host's node, for the others; beside these it writes it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from datetime import timedelta
from typing import Any, Final

from zbmd.collectives.torch.attach import Meeting
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent

dist: Any = importlib.import_module("torch.distributed")

ADDRESS_CHARACTERS_MAX: Final = 512


def main() -> None:
    """Meet, beside the guard that has started this process.

    Arguments: its process id; host and port of the store; the attempt; the number of this host, and of all
    hosts; seconds to wait for the others.
    """
    guard, host, port, attempt, number, count, seconds = sys.argv[1:]
    end_with_parent(int(guard))
    try:
        limit_s = float(seconds)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=limit_s))
        meet(store, attempt, int(number), int(count), limit_s)
    except (ZbmdError, RuntimeError) as error:
        print(f"zbmd.torch.run: the hosts did not meet in torchrun's store: {error}", file=sys.stderr)
        sys.exit(1)


def meet(store: Any, attempt: str, number: int, count: int, limit_s: float) -> None:
    """Meet as host `number` of `count`, over standard input and output. Raises what `Meeting` raises."""
    prefix = f"zbmd/guards/{attempt}"
    meeting = Meeting(store, prefix, rank=number, size=count, timeout_s=limit_s, host=f"host {number}")
    plan = meeting.plan()
    _say(plan.cookie)
    if number:
        _say(",".join(meeting.founder(plan)))
    elif address := sys.stdin.readline(ADDRESS_CHARACTERS_MAX).strip():
        meeting.founder(plan, given=address)


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())
