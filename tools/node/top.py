"""`zbmd-node top` and `tree`: the actors of a cluster, and of all ranks here, at work and as a tree."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import rich.console
import rich.live
import rich.table
import rich.tree

from zbmd.actors.cluster.node.client import open_session
from zbmd.actors.cluster.node.persistent_state import read_running, state_path
from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.ref import MARK, scope_of, scope_of_job
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, ActorRow, InsideReply, InsideRequest
from zbmd.actors.rank.host_contracts import HOST_ACTOR, NODE_NAME, NodeStatus, StatusRequest
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import rank_name
from zbmd.tools.cli.options import add_at, add_command, add_json
from zbmd.tools.node.status import find_nodes
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint, dial

# Snapshots of all processes of a cluster, requested from one of its nodes.

# Snapshots of processes, from one host or from a cluster.

ASK_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshots:
    """One look: what each process of a host told, and which did not answer. at_s: monotonic."""

    address: str
    target: str
    replies: tuple[InsideReply, ...]
    silent: tuple[str, ...]
    at_s: float


class Source(Protocol):
    """A source of looks."""

    async def looks(self, *, busiest: bool) -> list[ProcessSnapshots]:
        """One look at each host. Raises `ZbmdError` if nobody can be asked."""
        ...

    async def close(self) -> None:
        """Give the line back."""
        ...


ASKED_AT_ONCE: Final = 32
"""Processes; each has `ASK_S` to be reached and to answer."""


class ClusterLine:
    """A line to a cluster: a `Source`. Made by `open_cluster`."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def close(self) -> None:
        """See `Source`."""
        await self._system.stop()

    async def jobs(self) -> frozenset[str]:
        """The jobs that ranks are up of, as their scopes. Raises `ZbmdError`."""
        return frozenset(scope_of(process) for process, _, _ in await self._system.processes()) - {""}

    async def looks(self, *, busiest: bool) -> list[ProcessSnapshots]:
        """See `Source`: a look at each node, and the ranks on it; who does not answer in time is named."""
        processes = await self._system.processes()
        replies = await asyncio.gather(*(self._ask(process, busiest) for process, _, _ in processes))
        nodes: dict[str, tuple[list[InsideReply], list[str]]] = {}
        for (process, _, node), reply in zip(processes, replies, strict=True):
            answers, silent = nodes.setdefault(node, ([], []))
            if reply is None:
                silent.append(process)
            else:
                answers.append(reply)
        return [
            ProcessSnapshots(
                address=node,
                target=node,
                replies=tuple(answers),
                silent=tuple(silent),
                at_s=time.monotonic(),
            )
            for node, (answers, silent) in nodes.items()
        ]

    async def _ask(self, process: str, busiest: bool) -> InsideReply | None:
        name = process.partition(MARK)[0]
        async with self._places:
            try:
                inside = self._system.ref(f"{process}/{INSIDE_ACTOR}")
                reply = await inside.ask(InsideRequest(name, busiest), reply=InsideReply, timeout=ASK_S)
            except ZbmdError:
                return None
        return _abroad(reply, process)


def _abroad(reply: InsideReply, process: str) -> InsideReply:
    """With the process's name for all, which tells ranks of two jobs apart."""
    own = f"{reply.process}/"
    rows = tuple(
        msgspec.structs.replace(row, parent=f"{process}/{row.parent.removeprefix(own)}")
        if row.parent.startswith(own)
        else row
        for row in reply.rows
    )
    return msgspec.structs.replace(reply, process=process, rows=rows)


async def open_cluster(at: str | None) -> ClusterLine:
    """A line by the node at HOST:PORT, or that of this host. Raises `UserError`, and as `tcp.dial`."""
    async with asyncio.timeout(3 * ASK_S):
        return ClusterLine(await open_session(at))


INTERVAL_S: Final = 1.0
INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 3600.0
LINES_MAX: Final = 40
"""As many actors are shown by `top`."""


class Host:
    """A line to one host."""

    def __init__(self, address: str) -> None:
        identity = Identity(
            name=f"tool-{os.getpid()}-{address[-16:]}",
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=1,
            contracts=fingerprints(),
        )
        self._endpoint = Endpoint(identity=identity, cookie=load_or_create_cookie())
        self._address = address
        self._system = ActorSystem(identity.name)

    async def open(self) -> None:
        """Reach it. Raises `ZbmdError`, `TimeoutError`."""
        async with asyncio.timeout(ASK_S):
            self._system.attach(await dial(self._address, self._endpoint))

    async def close(self) -> None:
        """Give the line back."""
        await self._system.stop()

    async def looks(self, *, busiest: bool) -> list[ProcessSnapshots]:
        """See `Source`: what its processes tell."""
        host = self._system.ref(f"{NODE_NAME}/{HOST_ACTOR}")
        status = await host.ask(StatusRequest(), reply=NodeStatus, timeout=ASK_S)
        names = [NODE_NAME, *(rank_name(rank.rank) for rank in status.ranks if rank.state == "joined")]
        # One after the other: the host's `inside` is one actor, and a rank that is busy is soon given up.
        replies, silent = list[InsideReply](), list[str]()
        for name in names:
            try:
                replies.append(await self._ask(name, busiest))
            except ZbmdError:
                silent.append(name)
        seen = ProcessSnapshots(
            address=self._address,
            target=status.target,
            replies=tuple(replies),
            silent=tuple(silent),
            at_s=time.monotonic(),
        )
        return [seen]

    async def _ask(self, process: str, busiest: bool) -> InsideReply:
        inside = self._system.ref(f"{NODE_NAME}/{INSIDE_ACTOR}")
        return await inside.ask(InsideRequest(process, busiest), reply=InsideReply, timeout=ASK_S)


async def open_sources(*, here: bool, at: str | None) -> list[Source]:
    """Lines to the cluster of this host's node, or of the node at `at`, and to what else runs on this host.

    here: to the hosts of this user on this machine alone. Raises `UserError` if there is none.
    """
    cluster = None if here or (at is None and read_running(state_path()) is None) else await open_cluster(at)
    if cluster is not None and at is not None:
        return [cluster]
    try:
        jobs = frozenset[str]() if cluster is None else await cluster.jobs()
        found = await asyncio.gather(*(_opened(a) for a in find_nodes() if _job_of(a) not in jobs))
    except BaseException:
        if cluster is not None:
            await cluster.close()
        raise
    sources: list[Source] = [] if cluster is None else [cluster]
    sources += [host for host in found if host is not None]
    if not sources:
        raise UserError("no node of this user runs here. Start one with `zbmd-node run SCRIPT`.")
    return sources


def _job_of(address: str) -> str:
    """The scope of the job that a host's address names (`zbmd.actors.cluster.jobs.host_links`)."""
    return scope_of_job(int(address.split("-")[3], 16))


async def _opened(address: str) -> Host | None:
    host = Host(address)
    try:
        await host.open()
    except (ZbmdError, TimeoutError):
        await host.close()  # it has ended, or does not answer
        return None
    return host


async def look(sources: Sequence[Source], *, busiest: bool) -> list[ProcessSnapshots]:
    """One look at all of them; those that have ended are left out."""
    found = await asyncio.gather(*(_seen(source, busiest) for source in sources))
    return [one for looks in found for one in looks]


async def _seen(source: Source, busiest: bool) -> list[ProcessSnapshots]:
    try:
        return await source.looks(busiest=busiest)
    except ZbmdError:
        return []


# What is shown by `top`.


@dataclass(slots=True)
class Rates:
    """Difference between one look and the next. restarts: by process and actor."""

    before: dict[tuple[str, str, str, int], tuple[int, int]] = field(
        default_factory=dict[tuple[str, str, str, int], tuple[int, int]]
    )
    at_s: dict[str, float] = field(default_factory=dict[str, float])

    def take(self, seen: ProcessSnapshots) -> list[tuple[str, ActorRow, float, float, int]]:
        """(process, actor, messages a second, turns a second, restarts), the busiest first."""
        since_s = seen.at_s - self.at_s.get(seen.address, seen.at_s)
        self.at_s[seen.address] = seen.at_s
        lines: list[tuple[str, ActorRow, float, float, int]] = []
        now: dict[tuple[str, str, str, int], tuple[int, int]] = {}
        for reply in seen.replies:
            starts = {c: n for one in reply.supervisors for c, _, n in one.children}
            for row in reply.rows:
                key = (seen.address, reply.process, row.name, row.incarnation)
                handled, turns = self.before.get(key, (row.handled, row.turns))
                now[key] = (row.handled, row.turns)
                rate = (row.handled - handled) / since_s if since_s > 0 else 0.0
                turning = (row.turns - turns) / since_s if since_s > 0 else 0.0
                restarts = max(0, starts.get(row.name, 1) - 1) if row.parent else 0
                lines.append((reply.process, row, rate, turning, restarts))
        kept = {key: value for key, value in self.before.items() if key[0] != seen.address}
        self.before = kept | now
        return sorted(lines, key=lambda line: (line[2], line[1].waiting, line[1].handled), reverse=True)


def top_table(seen: ProcessSnapshots, rates: Rates) -> rich.table.Table:
    """The busiest actors of one host."""
    actors = sum(reply.actors for reply in seen.replies)
    held = sum(reply.held for reply in seen.replies)
    waits = sum(reply.nbytes for reply in seen.replies)
    silent = f"  no answer: {', '.join(seen.silent)}" if seen.silent else ""
    table = rich.table.Table(
        title=f"{seen.target}  {actors} actors  {waits:,} B wait  loop held {held} times{silent}",
        title_justify="left",
    )
    for column in ("process", "actor", "class", "state", "at"):
        table.add_column(column, overflow="fold")
    for column in ("waiting", "bytes", "msg/s", "handled", "turns/s", "restarts", "dropped"):
        table.add_column(column, justify="right")
    for process, row, rate, turning, restarts in rates.take(seen)[:LINES_MAX]:
        kind = row.kind if row.version == 1 else f"{row.kind} v{row.version}"
        numbers = (row.waiting, row.nbytes, round(rate), row.handled, round(turning), restarts, row.dropped)
        shown = (process, row.name, kind, row.state, row.handles or "-")
        table.add_row(*shown, *(f"{number:,}" for number in numbers))
    return table


async def top(
    screen: rich.console.Console, *, interval_s: float, times: int | None, here: bool, at: str | None
) -> None:
    """Show the table again and again, in place on a terminal. times: how often; None until interrupted."""
    hosts = await open_sources(here=here, at=at)
    rates = Rates()
    try:
        for one in await look(hosts, busiest=True):
            rates.take(one)  # so that the first table has rates
        with rich.live.Live(console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
            while times is None or times > 0:
                await asyncio.sleep(interval_s)
                seen = await look(hosts, busiest=True)
                if not seen:
                    break
                live.update(rich.console.Group(*(top_table(one, rates) for one in seen)), refresh=True)
                times = None if times is None else times - 1
    finally:
        for host in hosts:
            await host.close()


# The tree.


def tree_of(seen: ProcessSnapshots) -> rich.tree.Tree:
    """Processes, their supervisors and the actors below these; what is down is shown as well."""
    root = rich.tree.Tree(seen.target)
    for reply in seen.replies:
        branch = root.add(f"{reply.process}#{reply.incarnation}  {reply.actors} actors")
        rows = {row.name: row for row in reply.rows}
        children = {one.name: one.children for one in reply.supervisors}
        here = {f"{reply.process}/{row.name}" for row in reply.rows}
        for row in reply.rows:
            if row.parent not in here:
                _grow(branch, row, rows, children, set())
        if reply.actors > len(reply.rows):
            branch.add(f"and {reply.actors - len(reply.rows)} more")
    for name in seen.silent:
        root.add(f"{name}  does not answer")
    return root


def _grow(
    branch: rich.tree.Tree,
    row: ActorRow,
    rows: dict[str, ActorRow],
    children: dict[str, list[tuple[str, str, int]]],
    above: set[str],
    starts: int = 1,
) -> None:
    version = "" if row.version == 1 else f" v{row.version}"
    again = f", restarted {starts - 1} times" if starts > 1 else ""
    waits = f", {row.waiting} waiting" if row.waiting else ""
    words = f"{row.name}#{row.incarnation}  {row.kind}{version}, {row.state}{waits}{again}"
    mine = branch.add(words, highlight=False)
    for name, state, count in children.get(row.name, ()):
        child = rows.get(name)
        if child is not None and name not in above:
            _grow(mine, child, rows, children, above | {row.name}, count)
        else:
            mine.add(f"{name}  {state}, started {count} times", highlight=False)


async def once(*, busiest: bool, here: bool = False, at: str | None = None) -> list[ProcessSnapshots]:
    """One look at all hosts."""
    hosts = await open_sources(here=here, at=at)
    try:
        return await look(hosts, busiest=busiest)
    finally:
        for host in hosts:
            await host.close()


def as_json(seen: Sequence[ProcessSnapshots]) -> str:
    """One JSON object, by the fields' names."""
    hosts: list[dict[str, Any]] = []
    for one in seen:
        processes = [
            {
                **msgspec.structs.asdict(reply),
                "rows": [msgspec.structs.asdict(row) for row in reply.rows],
                "supervisors": [msgspec.structs.asdict(row) for row in reply.supervisors],
            }
            for reply in one.replies
        ]
        hosts.append({"target": one.target, "processes": processes, "silent": one.silent})
    return msgspec.json.encode({"hosts": hosts}).decode()


# The command line.


def add_commands(commands: Any) -> None:
    """`top` and `tree`."""
    live = add_command(
        commands,
        "top",
        "show the busiest actors of the cluster, or of all ranks here, live",
        examples=("zbmd-node top", "zbmd-node top --times 1 --json"),
    )
    live.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="S",
        help="seconds between tables (default: %(default)s)",
    )
    live.add_argument("--times", type=int, metavar="N", help="end after this many tables")
    tree = add_command(
        commands,
        "tree",
        "show the supervision tree of the cluster, or of all ranks here",
        examples=("zbmd-node tree", "zbmd-node tree --here --json"),
    )
    for command in (live, tree):
        command.add_argument("--here", action="store_true", help="show only ranks of this host")
        add_at(command)
        add_json(command)
        command.set_defaults(run_command=main)


def main(arguments: argparse.Namespace) -> int:
    """Show it. Raises `UserError`."""
    screen = rich.console.Console()
    here, at = arguments.here, arguments.at
    if arguments.json:
        print(as_json(asyncio.run(once(busiest=arguments.command == "top", here=here, at=at))))
    elif arguments.command == "tree":
        for one in asyncio.run(once(busiest=False, here=here, at=at)):
            screen.print(tree_of(one), soft_wrap=True)
    else:
        if not INTERVAL_S_MIN <= arguments.interval <= INTERVAL_S_MAX:
            raise UserError(
                f"--interval {arguments.interval:g}: give {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g} seconds."
            )
        asyncio.run(top(screen, interval_s=arguments.interval, times=arguments.times, here=here, at=at))
    return 0
