"""Fetch the records of a cluster's job from the nodes that ran its ranks, over their authenticated links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from zbmd.actors.cluster.local_deaths import boot_id, started
from zbmd.actors.cluster.node.client import ASK_S, AdminConnection, connect_admin
from zbmd.actors.cluster.node.contracts import (
    JobInfo,
    JobsReply,
    JobsRequest,
    MembersReply,
    MembersRequest,
    RecordInfo,
    RecordReply,
    RecordRequest,
    RecordsReply,
    RecordsRequest,
)
from zbmd.actors.cluster.node.persistent_state import StateError, read_running, state_path
from zbmd.actors.cluster.state.node_id import Node
from zbmd.tools.runs.launches import (
    FILE_BYTES_MAX,
    LINE_BYTES_MAX,
    Launch,
    decode_launch,
    read_launches,
)
from zbmd.transport.errors import UserError, ZbmdError

ASKED_AT_ONCE: Final = 16
"""Nodes that are asked at the same time."""
RECORDS_OF_JOB_MAX: Final = 8
"""Of one node: it begins another one for each of its processes that ran the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFound:
    """The records of a job. sources: what was read, and which nodes did not answer."""

    launches: tuple[Launch, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The records of a node. ahead_ns: its wall clock beside ours, within `within_ns`."""

    node: Node
    records: tuple[RecordInfo, ...]
    boot_id: str
    ahead_ns: int
    within_ns: int


def find_job(name: str | None, at: str | None) -> JobFound | None:
    """Return the records of the job whose name begins so, or that was submitted as this script.

    at: a node of the cluster; None: that of this host, and without one, what its state directory holds. None
    if no node knows such a job. Raises `UserError` if several are meant, or the node cannot be asked.
    """
    if at is None:
        try:
            directory = state_path()
        except StateError:  # no home
            return None
        running = read_running(directory)
        if running is None or not started(running.pid):
            return _kept_in(directory, name)
    return uvloop.run(_find_job(name, at))


def _kept_in(directory: Path, name: str | None) -> JobFound | None:
    """Return what a node's state directory holds of a job, if no node runs that could be asked."""
    ours = [one for one in read_launches(directory) if one.began.job]
    known = [_Known(one.began.job, one.began.command, one.began.unix_ns) for one in ours]
    job = pick_job(name, known)
    found = tuple(replace(one, is_live=False) for one in ours if one.began.job == job)
    source = f"{directory}: job {job} (no node runs here: those of other hosts are not read)"
    return JobFound(launches=found, sources=(source,)) if found else None


@dataclass(frozen=True, slots=True)
class _Known:
    """A job of which there is a record."""

    name: str
    command: tuple[str, ...]
    began_ns: int


def pick_job(name: str | None, known: Iterable[_Known]) -> str | None:
    """Return the job that is meant: the latest of a script, the latest of all; None if there is none.

    Raises `UserError` if `name` begins the names of several.
    """
    latest = sorted(known, key=lambda one: one.began_ns)
    fitting = [one for one in latest if name is None or name in one.command]
    if not fitting and name is not None:
        fitting = [one for one in latest if one.name.startswith(name.lower())]
        if len(names := sorted({one.name for one in fitting})) > 1:
            raise UserError(f"several jobs begin with {name!r}: {', '.join(names)}. Give more of its name.")
    return fitting[-1].name if fitting else None


async def _find_job(name: str | None, at: str | None) -> JobFound | None:
    async with connect_admin(at) as admin:
        members = await admin.actor.ask(MembersRequest(), reply=MembersReply, timeout=ASK_S)
        table = await admin.actor.ask(JobsRequest(), reply=JobsReply, timeout=ASK_S)
    limit = asyncio.Semaphore(ASKED_AT_ONCE)
    answers = await asyncio.gather(*(_list(member.node, limit) for member in members.members))
    listed = [one for one in answers if isinstance(one, _Listed)]
    silent = [one for one in answers if isinstance(one, str)]
    recorded = [_Known(f"{r.job:x}", r.words, r.began_ns) for one in listed for r in one.records]
    in_table = [_Known(f"{job.job:x}", (job.target,), 0) for job in table.jobs]
    job = pick_job(name, [*in_table, *recorded])
    if job is None:
        return None
    ahead = _clocks(listed)
    pages = await asyncio.gather(*(_records(one, job, ahead[one.boot_id], limit) for one in listed))
    launches = tuple(launch for found in pages for launch in found[0])
    known = [one for one in table.jobs if f"{one.job:x}" == job]
    gone = {rank.node for one in known for rank in one.ranks if rank.node and not rank.address}
    silent += [f"not read: {node} (it is in the cluster no more)" for node in sorted(gone)]
    sources = (*(text for found in pages for text in found[1]), *silent)
    if not launches:
        raise UserError(_nothing(job, known, silent))
    return JobFound(launches=launches, sources=sources)


def _nothing(job: str, known: Sequence[JobInfo], silent: Sequence[str]) -> str:
    state = f"it is {known[0].phase}{f' ({known[0].reason})' if known[0].reason else ''}" if known else ""
    return "; ".join(filter(None, (f"no node that answers has a record of job {job}", state, *silent))) + "."


def _clocks(listed: Sequence[_Listed]) -> dict[str, int]:
    """Return by how much the clock of each kernel is ahead of ours: the quickest answer knows best.

    A difference that the time of the answer may explain is none.
    """
    best: dict[str, _Listed] = {}
    for one in listed:
        if one.boot_id not in best or one.within_ns < best[one.boot_id].within_ns:
            best[one.boot_id] = one
    ahead = {boot: one.ahead_ns if abs(one.ahead_ns) > one.within_ns else 0 for boot, one in best.items()}
    return ahead | {boot_id(): 0}


async def _ask(admin: AdminConnection) -> tuple[RecordsReply, int, int]:
    """Return a node's answer, and our clock before and after it."""
    before_ns = time.time_ns()
    reply = await admin.actor.ask(RecordsRequest(), reply=RecordsReply, timeout=ASK_S)
    return reply, before_ns, time.time_ns()


async def _list(node: Node, limit: asyncio.Semaphore) -> _Listed | str:
    """Return what a node has, or why it does not say."""
    try:
        async with limit, connect_admin(node.address) as admin:
            reply, before_ns, after_ns = await _ask(admin)
    except (ZbmdError, TimeoutError, OSError) as error:
        return f"not read: {_name(node)} ({error or 'no answer in time'})"
    return _Listed(
        node=node,
        records=reply.records,
        boot_id=reply.boot_id,
        ahead_ns=reply.wall_ns - (before_ns + after_ns) // 2,
        within_ns=after_ns - before_ns,
    )


async def _records(
    listed: _Listed, job: str, ahead_ns: int, limit: asyncio.Semaphore
) -> tuple[list[Launch], list[str]]:
    """Return the records of a job that a node has, and what was read."""
    wanted = [one for one in listed.records if f"{one.job:x}" == job][-RECORDS_OF_JOB_MAX:]
    name = _name(listed.node)
    if not wanted:
        return [], []
    found: list[Launch] = []
    try:
        async with limit, connect_admin(listed.node.address) as admin:
            for one in wanted:
                data = await _read(admin, one.began_ns)
                launch = decode_launch(data, f"the record of job {job} from {name}")
                if launch is None:
                    continue
                began = msgspec.structs.replace(launch.began, unix_ns=max(0, launch.began.unix_ns - ahead_ns))
                found.append(Launch(began, launch.lines, is_live=one.is_open))
    except (ZbmdError, TimeoutError, OSError) as error:
        return found, [f"not read to its end: {name} ({error or 'no answer in time'})"]
    return found, [f"{name}: job {job}"]


async def _read(admin: AdminConnection, began_ns: int) -> bytes:
    """Read a record in pages, no more than any record has."""
    data = bytearray()
    while len(data) <= FILE_BYTES_MAX + LINE_BYTES_MAX:
        request = RecordRequest(began_ns=began_ns, offset=len(data))
        reply = await admin.actor.ask(request, reply=RecordReply, timeout=ASK_S)
        if not reply.data:
            break
        data += reply.data
    return bytes(data)


def _name(node: Node) -> str:
    return node.name or str(node.key)
