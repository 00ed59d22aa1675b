"""Requests of processes to the nodes of a cluster: the routes to other processes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.contracts import Contract

ROUTES_ACTOR: Final = "ways"
"""The actor that answers, in every process that knows the cluster's view or has external clients."""
REASON_CHARACTERS_MAX: Final = 1000
PROCESSES_MAX: Final = 4096

Process = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
IncarnationNumber = Annotated[int, msgspec.Meta(ge=0)]
Address = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)]


class RouteRequest(Contract, id="zbmd.way.request"):
    """Request the address of a process, by its global name (`zbmd.actors.core.ref`)."""

    process: Process


class Route(Contract, id="zbmd.way"):
    """The addresses of one incarnation of a process. host: its memory domain; near: the abstract socket for
    processes of that domain; far: HOST:PORT of TCP. Either address may be empty.
    """

    process: Process
    incarnation: IncarnationNumber
    host: Text
    near: Address
    far: Address


class NoRoute(Contract, id="zbmd.way.none"):
    """There is no such process, or it does not listen yet."""

    reason: Text


class Enrol(Contract, id="zbmd.way.enrol"):
    """Ask the owner (`zbmd.actors.core.ref`) to give this process's addresses to others while they are
    linked. The link identifies the sender.
    """

    host: Text
    near: Address
    far: Address


class Enrolled(Contract, id="zbmd.way.enrolled"):
    """The process is registered: others find it from now on."""


class UntilGone(Contract, id="zbmd.way.until_gone"):
    """Request a reply once this incarnation of the process has left the cluster."""

    process: Process
    incarnation: IncarnationNumber


class Gone(Contract, id="zbmd.way.gone"):
    """The incarnation has left the cluster."""

    reason: Text


class ProcessesRequest(Contract, id="zbmd.way.processes_request"):
    """Request the processes of the cluster whose actors can be reached."""


class ProcessesReply(Contract, id="zbmd.way.processes"):
    """Processes as (name, incarnation, name of its node), nodes first; `more`: how many are left out."""

    processes: Annotated[
        tuple[tuple[Process, IncarnationNumber, Text], ...], msgspec.Meta(max_length=PROCESSES_MAX)
    ]
    more: int = 0


def external_address(address: str) -> str:
    """Return the address for external links of a rank whose siblings link at `address`."""
    return f"{address}-g"
