"""Whether the clock of a peer that `zbmd-node doctor` was given agrees with ours: its node is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from zbmd.actors.cluster.node.client import admin_over
from zbmd.actors.cluster.node.clocks import clocks_apart, wall_ns
from zbmd.actors.cluster.node.contracts import ClockReply, ClockRequest
from zbmd.actors.cluster.node.join import client_endpoint
from zbmd.actors.errors import ActorError
from zbmd.tools.doctor.report import Finding, Section, State
from zbmd.transport.clock.deadlines import derive, format_duration
from zbmd.transport.errors import DeadlineExceeded, UserError, ZbmdError
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, tcp_settings

CLOCK_S: Final = 2.0
"""For a node to answer: who listens there may be no node."""
_MILLISECOND_NS: Final = 1_000_000


async def compare_clocks(
    address: TcpAddress, here: str, *, clock_ns: Callable[[], int] = wall_ns, timeout_s: float = CLOCK_S
) -> Finding:
    """How far the clock of the node at `address` is from ours. here: what people call this host."""
    try:
        async with asyncio.timeout(timeout_s):
            reply, ahead_ns = await _ask(address, clock_ns)
    except (ZbmdError, ActorError, OSError, TimeoutError) as error:
        return _not_compared(address, error)
    there = f"{reply.node.name or reply.node.key} ({address})"
    text = clocks_apart(there, here, ahead_ns)
    if text is not None:
        what, _, advice = text.partition(". ")
        return _finding(address, State.NOTE, what, advice)
    apart = format_duration(abs(ahead_ns) // _MILLISECOND_NS * _MILLISECOND_NS)
    return _finding(address, State.OK, f"the clock of {there} agrees with ours to {apart}")


async def _ask(address: TcpAddress, clock_ns: Callable[[], int]) -> tuple[ClockReply, int]:
    """The answer, and how far that clock is ahead: it was read half a round trip ago."""
    if not cookie_path().exists():
        raise UserError("there is no cookie here to ask with (`zbmd-node token` there prints how to get it)")
    endpoint = client_endpoint(load_or_create_cookie(), derive())
    link = await tcp.dial(address, endpoint, settings=tcp_settings())
    async with admin_over(link, endpoint) as admin:
        asked_ns = clock_ns()
        reply = await admin.actor.ask(ClockRequest(), reply=ClockReply, timeout=CLOCK_S)
        return reply, reply.wall_ns - (asked_ns + clock_ns()) // 2


def _not_compared(address: TcpAddress, error: Exception) -> Finding:
    silent = isinstance(error, TimeoutError | DeadlineExceeded)
    why = "who listens there does not answer as a node" if silent else str(error)
    return _finding(address, State.NOTE, f"not compared: {why}")


def _finding(address: TcpAddress, state: State, detail: str, advice: str = "") -> Finding:
    name = f"clock of {address}"
    return Finding(section=Section.LINKS, name=name, state=state, detail=detail, advice=advice)
