"""`zbmd-node jobs` and `zbmd-node stop`; how an order is given and what has become of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import msgspec
import rich.console
import rich.table

from zbmd.actors.cluster.node.client import ASK_S, AdminConnection, connect_admin
from zbmd.actors.cluster.node.contracts import (
    JobInfo,
    JobsReply,
    JobsRequest,
    OrderReply,
    OrderRequest,
)
from zbmd.actors.cluster.state.job_table import Stop, Submit
from zbmd.transport.errors import DeadlineExceeded, UserError

LOOK_S: Final = 0.05
"""From one look at what has become of an order to the next."""
LOOKS_MAX: Final = 600


def job_name(job: int) -> str:
    """How people write a job's id."""
    return f"{job:x}"


async def ask_jobs(admin: AdminConnection, *, job: int = 0, number: int = 0) -> JobsReply:
    """The jobs as the node has them."""
    return await admin.actor.ask(JobsRequest(job=job, number=number), reply=JobsReply, timeout=ASK_S)


async def give_order(admin: AdminConnection, order: Submit | Stop) -> None:
    """Have the cluster agree on an order. Raises `UserError` if it is refused, `DeadlineExceeded`."""
    given = await admin.actor.ask(OrderRequest(order=order), reply=OrderReply, timeout=ASK_S)
    if given.refused:
        raise UserError(f"the cluster does not take this order: {given.refused}.")
    for _ in range(LOOKS_MAX):
        found = await ask_jobs(admin, number=given.number)
        if found.refused:
            raise UserError(f"the cluster does not take this order: {found.refused}.")
        if found.applied:
            return
        await asyncio.sleep(LOOK_S)
    raise DeadlineExceeded(
        f"the members have not agreed on the order within {LOOKS_MAX * LOOK_S:g} s: `zbmd-node members` "
        "shows how the cluster stands"
    )


def find_job(found: JobsReply, name: str) -> JobInfo:
    """The job whose name begins so. Raises `UserError` unless there is exactly one."""
    fitting = [job for job in found.jobs if job_name(job.job).startswith(name.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(job_name(job.job) for job in found.jobs) or "none"
    what = "more than one job" if fitting else "no job"
    raise UserError(f"{what} begins with {name!r}. There are: {known}.")


async def stop(at: str | None, name: str, *, kill: bool) -> str:
    """Stop a job; what to tell."""
    async with connect_admin(at) as admin:
        job = find_job(await ask_jobs(admin), name)
        await give_order(admin, Stop(job=job.job, reason="zbmd-node stop", kill=kill))
    return f"job {job_name(job.job)} is being stopped"


async def jobs(at: str | None) -> JobsReply:
    """All jobs, as a node has them."""
    async with connect_admin(at) as admin:
        return await ask_jobs(admin)


def as_json(reply: JobsReply) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    found = [
        {
            **msgspec.structs.asdict(job),
            "job": job_name(job.job),
            "ranks": [msgspec.structs.asdict(rank) for rank in job.ranks],
        }
        for job in reply.jobs
    ]
    return msgspec.json.encode({"view": reply.view, "jobs": found}).decode()


def show(reply: JobsReply, screen: rich.console.Console) -> None:
    """Print the table of jobs."""
    if not reply.jobs:
        screen.print("no job; give one with: zbmd-node submit SCRIPT")
        return
    table = rich.table.Table(title=f"jobs in view {reply.view}", title_justify="left")
    for column in ("job", "target", "phase", "nodes", "ranks", "restarts", "from"):
        table.add_column(column, justify="right" if column == "restarts" else "left")
    for job in reply.jobs:
        table.add_row(*_row(job))
    screen.print(table)
    for job in reply.jobs:
        if job.reason:
            screen.print(f"{job_name(job.job)}: {job.reason}", soft_wrap=True)


def _row(job: JobInfo) -> tuple[str, ...]:
    counts = Counter(rank.state for rank in job.ranks)
    holders = sorted({rank.node for rank in job.ranks if rank.node and rank.state in ("up", "starting")})
    phase = f"{job.phase}: {job.outcome}" if job.outcome else job.phase
    wanted = f"{job.nodes_min}" if job.nodes_min == job.nodes_max else f"{job.nodes_min}:{job.nodes_max}"
    return (
        job_name(job.job),
        job.target,
        phase,
        f"{', '.join(holders) or 'none'} (of {wanted})",
        ", ".join(f"{count} {state}" for state, count in sorted(counts.items())),
        str(job.restarts),
        job.submitter,
    )
