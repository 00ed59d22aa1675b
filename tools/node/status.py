"""`zbmd-node status` and `dump`: find the hosts of this user that run here, ask them, show their answers."""

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

import msgspec
import rich.console
import rich.table
import uvloop

from zbmd.actors.contracts import fingerprints
from zbmd.actors.rank.host_contracts import HOST_ACTOR, NODE_NAME, NodeStatus, RankStatus, StatusRequest
from zbmd.actors.system import ActorSystem
from zbmd.collectives.group.flight_dump import SIGNAL, Dump, dump_path, flight_directory
from zbmd.tools.cli.options import add_command, by_names
from zbmd.tools.runs import flights
from zbmd.tools.telemetry.live import find_nodes
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint, dial

ASK_S = 2.0
ACTORS_SHOWN_MAX = 6


async def ask_node(address: str, index: int) -> NodeStatus | None:
    """One host's status; None if it ended meanwhile or does not answer within `ASK_S`."""
    identity = Identity(
        name=f"tool-{os.getpid()}-{index}",
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=1,
        contracts=fingerprints(),
    )
    system = ActorSystem(identity.name)
    try:
        async with asyncio.timeout(ASK_S):
            system.attach(await dial(address, Endpoint(identity=identity, cookie=load_or_create_cookie())))
        host = system.ref(f"{NODE_NAME}/{HOST_ACTOR}")
        return await host.ask(StatusRequest(), reply=NodeStatus, timeout=ASK_S)
    except (ZbmdError, TimeoutError):
        return None
    finally:
        await system.stop()


async def collect() -> tuple[list[NodeStatus], list[str]]:
    """All hosts that answer, and the addresses of those that do not."""
    addresses = find_nodes()
    answers = await asyncio.gather(*(ask_node(address, i) for i, address in enumerate(addresses)))
    silent = [address for address, answer in zip(addresses, answers, strict=True) if answer is None]
    return [answer for answer in answers if answer is not None], silent


def as_json(nodes: list[NodeStatus], silent: list[str]) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    found = [by_names(node, "ranks", "spares") for node in nodes]
    return msgspec.json.encode({"nodes": found, "silent": silent}).decode()


def show(nodes: list[NodeStatus], silent: list[str], screen: rich.console.Console) -> None:
    """Print one table a host."""
    for node in nodes:
        table = rich.table.Table(title=_title(node), title_justify="left")
        for column in ("rank", "pid", "incarnation", "state", "restarts", "memory", "actors"):
            table.add_column(column, justify="left" if column in ("state", "actors") else "right")
        for rank in node.ranks:
            table.add_row(*_row(rank))
        for spare in node.spares:
            memory = f"{spare.memory_bytes / (1 << 20):,.0f} MiB"
            table.add_row("spare", str(spare.pid), "-", spare.state, "-", memory, "-")
        screen.print(table)
        for words in node.hangs:
            screen.print(f"no progress: {words}", soft_wrap=True, markup=False, highlight=False)
    for address in silent:
        screen.print(f"{address}: does not answer", soft_wrap=True)
    if not nodes and not silent:
        screen.print("no node of this user runs here; start one with: zbmd-node run SCRIPT")


def _title(node: NodeStatus) -> str:
    return (
        f"{node.target}  epoch {node.epoch}  on-loss {node.on_loss}  restarts {node.restarts}  "
        f"up {node.uptime_s:.0f} s  node pid {node.pid}  template pid {node.template_pid}"
    )


def _row(rank: RankStatus) -> tuple[str, ...]:
    names = rank.actors
    if names is None:
        actors = "busy" if rank.state == "joined" else "-"
    else:
        more = len(names) - ACTORS_SHOWN_MAX
        actors = ", ".join(names[:ACTORS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    memory = f"{rank.memory_bytes / (1 << 20):,.0f} MiB"
    return (
        str(rank.rank),
        str(rank.pid),
        str(rank.incarnation),
        rank.state,
        str(rank.restarts),
        memory,
        actors,
    )


# ---- `zbmd-node dump`

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


async def collect_dumps(pids: Sequence[int], directory: Path) -> tuple[list[Dump], list[int]]:
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
            found = flights.read_dumps([path])[0]
            if found.taken_ns >= asked_ns:
                dumps.append(found)
                waiting.remove(pid)
    return sorted(dumps, key=lambda dump: dump.name), sorted({*silent, *waiting})


async def _dump_host(directory: Path) -> tuple[list[Dump], list[int]]:
    nodes, _ = await collect()
    return await collect_dumps([rank.pid for node in nodes for rank in node.ranks if rank.pid > 0], directory)


def add_dump(commands: Any) -> None:
    """Add `zbmd-node dump`."""
    command = add_command(
        commands,
        "dump",
        "show the latest operations of the ranks' groups",
        description="Has the ranks of this host write their flight recorders, and shows them.",
        examples=("zbmd-node dump", "zbmd-node dump --trace flights.json"),
    )
    flights.add_options(command)
    command.set_defaults(run_command=dump_command)


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
    flights.show(dumps, last=arguments.last, trace_to=arguments.trace)
    return 0
