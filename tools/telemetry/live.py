"""Snapshots of live processes: all of a cluster, and of this user's hosts here, with their actors and links.

`LiveView` asks all; a `Source` is a line to one host or cluster. `zbmd-node top` and the dashboard show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from zbmd.actors.cluster.jobs.host_links import find_hosts
from zbmd.actors.cluster.node.client import open_session
from zbmd.actors.cluster.node.persistent_state import read_running, state_path
from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.ref import MARK, scope_of, scope_of_job
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, ActorRow, InsideReply, InsideRequest
from zbmd.actors.rank.host_contracts import HOST_ACTOR, NODE_NAME, NodeStatus, StatusRequest
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import rank_name
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint, dial

ASK_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshots:
    """One look: what each process of a host told, and which did not answer. at_s: monotonic.

    status: of the host of a job; None for a node of a cluster.
    """

    address: str
    target: str
    replies: tuple[InsideReply, ...]
    silent: tuple[str, ...]
    at_s: float
    status: NodeStatus | None = None


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
            status=status,
        )
        return [seen]

    async def _ask(self, process: str, busiest: bool) -> InsideReply:
        inside = self._system.ref(f"{NODE_NAME}/{INSIDE_ACTOR}")
        return await inside.ask(InsideRequest(process, busiest), reply=InsideReply, timeout=ASK_S)


class LiveView:
    """Lines to the cluster of this host's node, or of the node at `at`, and to what else runs on this host.

    They are kept from one look to the next, and opened to what has begun meanwhile. here: only to the hosts
    of this user on this machine.
    """

    def __init__(self, *, here: bool = False, at: str | None = None) -> None:
        self._here, self._at = here, at
        self._cluster: ClusterLine | None = None
        self._hosts: dict[str, Host] = {}

    async def __aenter__(self) -> LiveView:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give all lines back."""
        hosts, self._hosts = self._hosts, {}
        cluster, self._cluster = self._cluster, None
        for source in (*hosts.values(), *(() if cluster is None else (cluster,))):
            await source.close()

    async def look(self, *, busiest: bool) -> list[ProcessSnapshots]:
        """Return one look at all of them; those that have ended are left out.

        Raises `ZbmdError` or `TimeoutError` if the cluster that is there cannot be asked, and nothing else
        runs.
        """
        problem = await self._open_cluster()
        if self._at is None:
            await self._open_hosts()
        sources: list[Source] = [*self._hosts.values()]
        sources += [] if self._cluster is None else [self._cluster]
        if problem is not None and not sources:
            raise problem
        found = await asyncio.gather(*(self._seen(source, busiest) for source in sources))
        return [one for looks in found for one in looks]

    async def _open_cluster(self) -> Exception | None:
        """Reach the cluster, if there is one; what hinders that."""
        if self._cluster is not None or self._here:
            return None
        if self._at is None and read_running(state_path()) is None:
            return None
        try:
            self._cluster = await open_cluster(self._at)
        except (ZbmdError, TimeoutError) as error:
            if self._at is not None:
                raise
            return error
        return None

    async def _open_hosts(self) -> None:
        jobs = frozenset[str]()
        if self._cluster is not None:
            with contextlib.suppress(ZbmdError):
                jobs = await self._cluster.jobs()
        wanted = {address for address in find_nodes() if _job_of(address) not in jobs}
        for address in self._hosts.keys() - wanted:
            await self._hosts.pop(address).close()
        new = wanted - self._hosts.keys()
        for address, host in zip(new, await asyncio.gather(*map(_opened, new)), strict=True):
            if host is not None:
                self._hosts[address] = host

    async def _seen(self, source: Source, busiest: bool) -> list[ProcessSnapshots]:
        try:
            return await source.looks(busiest=busiest)
        except ZbmdError:  # it has ended, or restarts: the next look opens another line
            if source is self._cluster:
                self._cluster = None
            self._hosts = {address: host for address, host in self._hosts.items() if host is not source}
            await source.close()
            return []


def find_nodes() -> list[str]:
    """Return the addresses of this user's hosts, those of a cluster's jobs as well. Raises `CookieError`."""
    return find_hosts(load_or_create_cookie())


async def _opened(address: str) -> Host | None:
    host = Host(address)
    try:
        await host.open()
    except (ZbmdError, TimeoutError):
        await host.close()  # it has ended, or does not answer
        return None
    return host


async def once(*, busiest: bool, here: bool = False, at: str | None = None) -> list[ProcessSnapshots]:
    """Return one look at all that is live. Raises `UserError` if nothing is."""
    async with LiveView(here=here, at=at) as view:
        seen = await view.look(busiest=busiest)
    if not seen:
        raise nothing_runs()
    return seen


def nothing_runs() -> UserError:
    """Return what is raised where there is nothing to look at."""
    return UserError("no node of this user runs here. Start one with `zbmd-node run SCRIPT`.")


def _job_of(address: str) -> str:
    """The scope of the job that a host's address names (`zbmd.actors.cluster.jobs.host_links`)."""
    return scope_of_job(int(address.split("-")[3], 16))


ActorRate = tuple[str, ActorRow, float, float, int]
"""(process, actor, messages a second, turns a second, restarts)"""


@dataclass(slots=True)
class Rates:
    """Difference between one look and the next. restarts: by process and actor."""

    before: dict[tuple[str, str, str, int], tuple[int, int]] = field(
        default_factory=dict[tuple[str, str, str, int], tuple[int, int]]
    )
    at_s: dict[str, float] = field(default_factory=dict[str, float])

    def take(self, seen: ProcessSnapshots) -> list[ActorRate]:
        """Return the actors with their rates, the busiest first."""
        since_s = seen.at_s - self.at_s.get(seen.address, seen.at_s)
        self.at_s[seen.address] = seen.at_s
        lines: list[ActorRate] = []
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
