"""The commands of `zbmd-node` that are about a cluster: nodes, and the jobs that they run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
import rich.console
import rich.table
import uvloop

from zbmd.actors.cluster.node.client import ASK_S, connect_admin
from zbmd.actors.cluster.node.contracts import (
    LeaveRequest,
    Leaving,
    MemberInfo,
    MembersReply,
    MembersRequest,
)
from zbmd.tools.cli.console import screen_for_tables
from zbmd.tools.cli.options import add_at, add_command, add_json, by_names
from zbmd.tools.node import jobs as node_jobs
from zbmd.tools.node import jobs as node_submit
from zbmd.tools.node import up as node_up
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import DeadlineExceeded, LinkClosed


def add_commands(commands: Any) -> None:
    """Add `up`, `submit` and the requests to a running node."""
    up = add_command(
        commands,
        "up",
        "run this host's node of a cluster",
        description="Run the node of this host in the foreground, until it is asked to leave.",
        epilog=node_up.EXAMPLES,
    )
    node_up.add_arguments(up)
    up.set_defaults(run_command=node_up.main)
    submit = add_command(
        commands,
        "submit",
        "run a script or module on the cluster",
        description="Give a job to the cluster. Its files must be the same, in the same place, on all hosts.",
        epilog=node_submit.EXAMPLES,
    )
    node_submit.add_arguments(submit)
    submit.set_defaults(run_command=lambda arguments: uvloop.run(node_submit.submit(arguments)))
    for name, (text, run, examples) in REQUESTS.items():
        asked = add_command(commands, name, text, examples=examples)
        add_at(asked)
        if name in ("members", "jobs"):
            add_json(asked)
        if name == "stop":
            asked.add_argument("job", metavar="JOB", help="name of the job, or a prefix of it")
            asked.add_argument("--kill", action="store_true", help="send SIGKILL instead of SIGTERM")
        asked.set_defaults(run_command=_request(run))


def _request(run: Callable[[argparse.Namespace], Coroutine[Any, Any, None]]) -> Callable[..., int]:
    def request(arguments: argparse.Namespace) -> int:
        uvloop.run(run(arguments))
        return 0

    return request


async def _members(arguments: argparse.Namespace) -> None:
    found = await members(arguments.at)
    print(as_json(found)) if arguments.json else show(found, screen_for_tables())


async def _jobs(arguments: argparse.Namespace) -> None:
    found = await node_jobs.jobs(arguments.at)
    print(node_jobs.as_json(found)) if arguments.json else node_jobs.show(found, screen_for_tables())


async def _stop(arguments: argparse.Namespace) -> None:
    _say(await node_jobs.stop(arguments.at, arguments.job, kill=arguments.kill))


async def _down(arguments: argparse.Namespace) -> None:
    _say(await down(arguments.at))


REQUESTS: Final = {
    "token": (
        "print the line to paste on the next host; it holds the cookie",
        lambda arguments: node_up.print_token(arguments.at),
        ("zbmd-node token",),
    ),
    "members": (
        "show the members of the cluster, as one node sees them",
        _members,
        ("zbmd-node members", "zbmd-node members --at node0:29400 --json"),
    ),
    "down": ("make a node leave the cluster in an orderly way", _down, ("zbmd-node down",)),
    "jobs": ("show the jobs of the cluster and the hosts they run on", _jobs, ("zbmd-node jobs --json",)),
    "stop": (
        "end a job of the cluster",
        _stop,
        ("zbmd-node stop job-1", "zbmd-node stop job-1 --kill"),
    ),
}


def _say(text: str) -> None:
    print(f"zbmd-node: {text}", file=sys.stderr)


# ---- `zbmd-node members` and `down`

SKEW_TOLD_MS = 1000
"""A clock that differs by less is not worth a word."""
LEAVE_S = 60.0


async def members(at: str | None) -> MembersReply:
    """A node's view of its cluster."""
    async with connect_admin(at) as admin:
        return await admin.actor.ask(MembersRequest(), reply=MembersReply, timeout=ASK_S)


def as_json(reply: MembersReply) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    return msgspec.json.encode(by_names(reply, "members")).decode()


def show(reply: MembersReply, screen: rich.console.Console) -> None:
    """Print the table of members, and what they should know."""
    title = (
        f"view {reply.known}, {reply.state}, {len(reply.members)} members  recovery budget "
        f"{format_duration(reply.recovery_budget_ns)}  asked {reply.answered_by}"
    )
    table = rich.table.Table(title=title, title_justify="left")
    columns = "name, domain, life, address, state, heard, suspect, links, clock, spares"
    for column in columns.split(", "):
        is_number = column in ("life", "heard", "suspect", "spares")
        table.add_column(column, justify="right" if is_number else "left")
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
        node.domain or "-",
        str(node.key.incarnation),
        node.address,
        member.state,
        f"{member.heard_ms} ms" if observed else "-",
        f"{member.limit_ms} ms" if observed else "-",
        "-" if member.state == "this node" else links,
        _clock(member.skew_ms),
        str(member.spares) if member.spares else "-",
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
