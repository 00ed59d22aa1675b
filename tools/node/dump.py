"""`zbmd-node dump`: has the ranks of this host write their flight recorders, and shows them."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from zbmd.collectives.group.flight_dump import SIGNAL, Dump, dump_path, flight_directory
from zbmd.tools.cli.options import add_command
from zbmd.tools.node import status
from zbmd.tools.runs.flights import add_options, read_dumps, show
from zbmd.transport.errors import UserError

WAIT_S_MAX: Final = 5.0
LOOK_S: Final = 0.02
_CAUGHT: Final = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


def listens(pid: int) -> bool:
    """Whether a process has a handler for the signal; without one it would be killed by it."""
    try:
        caught = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


async def collect(pids: Sequence[int], directory: Path) -> tuple[list[Dump], list[int]]:
    """Ask processes for their dumps; what they wrote, and who wrote nothing within `WAIT_S_MAX`."""
    asked_ns = time.monotonic_ns()
    waiting = {pid for pid in pids if listens(pid)}
    silent = sorted(set(pids) - waiting)
    for pid in waiting:
        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            silent.append(pid)
    waiting -= set(silent)
    dumps: list[Dump] = []
    while waiting and time.monotonic_ns() - asked_ns < WAIT_S_MAX * 1e9:
        await asyncio.sleep(LOOK_S)
        for pid in list(waiting):
            path = dump_path(directory, pid)
            if not path.exists():
                continue
            found = read_dumps([path])[0]
            if found.taken_ns >= asked_ns:
                dumps.append(found)
                waiting.remove(pid)
    return sorted(dumps, key=lambda dump: dump.name), sorted({*silent, *waiting})


async def _dump_host(directory: Path) -> tuple[list[Dump], list[int]]:
    nodes, _ = await status.collect()
    return await collect([rank.pid for node in nodes for rank in node.ranks if rank.pid > 0], directory)


def add_dump(commands: Any) -> None:
    """Add `zbmd-node dump`."""
    command = add_command(
        commands,
        "dump",
        "show the latest operations of the ranks' groups",
        description=__doc__,
        examples=("zbmd-node dump", "zbmd-node dump --trace flights.json"),
    )
    add_options(command)


def dump_command(arguments: argparse.Namespace) -> int:
    """`zbmd-node dump`. Raises `UserError` if there is nothing to show."""
    if arguments.last < 1:
        raise UserError(f"--last {arguments.last}: show one operation at least")
    directory = flight_directory()
    dumps, silent = uvloop.run(_dump_host(directory))
    for pid in silent:
        print(f"zbmd-node: process {pid} wrote nothing: it has no group, or is stopped", file=sys.stderr)
    if not dumps:
        raise UserError("no rank of this host has a group: there is nothing to dump")
    print(f"# written to {directory}")
    show(dumps, last=arguments.last, trace_to=arguments.trace)
    return 0
