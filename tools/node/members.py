"""`zbmd-node members` and `zbmd-node down`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select

import msgspec
import rich.console
import rich.table

from zbmd.actors.cluster.node.client import ASK_S, connect_admin
from zbmd.actors.cluster.node.contracts import (
    LeaveRequest,
    Leaving,
    MemberInfo,
    MembersReply,
    MembersRequest,
)
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import DeadlineExceeded, LinkClosed

SKEW_TOLD_MS = 1000
"""A clock that differs by less is not worth a word."""
LEAVE_S = 60.0


async def members(at: str | None) -> MembersReply:
    """A node's view of its cluster."""
    async with connect_admin(at) as admin:
        return await admin.actor.ask(MembersRequest(), reply=MembersReply, timeout=ASK_S)


def as_json(reply: MembersReply) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    found = {
        **msgspec.structs.asdict(reply),
        "members": [msgspec.structs.asdict(member) for member in reply.members],
    }
    return msgspec.json.encode(found).decode()


def show(reply: MembersReply, screen: rich.console.Console) -> None:
    """Print the table of members, and what they should know."""
    title = (
        f"view {reply.known}, {reply.state}, {len(reply.members)} members  recovery budget "
        f"{format_duration(reply.recovery_budget_ns)}  asked {reply.answered_by}"
    )
    table = rich.table.Table(title=title, title_justify="left")
    for column in ("name", "life", "address", "state", "heard", "suspect", "links", "clock"):
        table.add_column(column, justify="right" if column in ("life", "heard", "suspect") else "left")
    for member in reply.members:
        table.add_row(*_row(member))
    screen.print(table)
    for line in remarks(reply):
        screen.print(line, soft_wrap=True)


def _row(member: MemberInfo) -> tuple[str, ...]:
    node = member.node
    observed = member.heard_ms >= 0
    links = f"{member.links_dialed} out {member.links_accepted} in"
    return (
        node.name or str(node.key),
        str(node.key.incarnation),
        node.address,
        member.state,
        f"{member.heard_ms} ms" if observed else "-",
        f"{member.limit_ms} ms" if observed else "-",
        "-" if member.state == "this node" else links,
        _clock(member.skew_ms),
    )


def _clock(skew_ms: int) -> str:
    if abs(skew_ms) < SKEW_TOLD_MS:
        return "same"
    return f"{format_duration(abs(skew_ms) * 1_000_000)} {'ahead' if skew_ms > 0 else 'behind'}"


def remarks(reply: MembersReply) -> list[str]:
    """Describe what is unusual."""
    said = [f"{m.node}: no link: {m.why}" for m in reply.members if m.why]
    if reply.entered != reply.known:
        said.append(
            f"view {reply.known} is agreed on; it is acted on once all of its members know it (now: view "
            f"{reply.entered})"
        )
    skewed = [m.node.name or str(m.node.key) for m in reply.members if abs(m.skew_ms) >= SKEW_TOLD_MS]
    if skewed:
        said.append(
            f"the clocks of {', '.join(skewed)} differ from that of the node asked. Nothing waits by them, "
            "but the times in logs do not fit together: set them by NTP."
        )
    releases = {m.release for m in reply.members if m.release}
    if len(releases) > 1:
        said.append(f"releases differ: {', '.join(sorted(releases))}")
    return said


async def down(at: str | None) -> str:
    """Have a node leave in order, and wait until it has; what to tell."""
    async with connect_admin(at) as admin:
        answer = await admin.actor.ask(LeaveRequest(), reply=Leaving, timeout=ASK_S)
        closed = admin.system.monitor(admin.actor)
        with contextlib.suppress(LinkClosed):
            async with asyncio.timeout(LEAVE_S):
                await closed.down()
    if at is None:
        await _until_gone(answer.pid)
    return f"{answer.node} has left the cluster"


async def _until_gone(pid: int) -> None:
    """Wait for the end of a process of this host."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(fd, gone.set)
        try:
            async with asyncio.timeout(LEAVE_S):
                await gone.wait()
        except TimeoutError:
            if not select.select([fd], [], [], 0)[0]:
                raise DeadlineExceeded(
                    f"the node (pid {pid}) has left, but its process has not ended in {LEAVE_S:g} s"
                ) from None
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)
