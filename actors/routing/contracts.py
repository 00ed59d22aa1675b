"""What processes ask a node of the cluster about the ways to others."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from zbmd.actors.contracts import Contract

WAYS_ACTOR: Final = "ways"
"""Answers in every process that knows the cluster's view, in the host of each job, and in who has guests."""
REASON_CHARACTERS_MAX: Final = 1000
PROCESSES_TOLD_MAX: Final = 4096

Process = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Life = Annotated[int, msgspec.Meta(ge=0)]
Address = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)]


class WayRequest(Contract, id="zbmd.way.request"):
    """Where does a process listen? By its name everywhere (`zbmd.actors.core.scopes`)."""

    process: Process


class Way(Contract, id="zbmd.way"):
    """Where a process listens, and which life of it. host: its memory domain; near: the abstract socket for
    processes of that domain, far: TCP's HOST:PORT; either may be empty.
    """

    process: Process
    life: Life
    host: Text
    near: Address
    far: Address


class NoWay(Contract, id="zbmd.way.none"):
    """There is no such process, or it does not listen (yet)."""

    reason: Text


class Enrol(Contract, id="zbmd.way.enrol"):
    """A process asks its owner (`zbmd.actors.core.scopes`) to tell others where it listens, while it is
    linked. Of whose link it comes is known.
    """

    host: Text
    near: Address
    far: Address


class Enrolled(Contract, id="zbmd.way.enrolled"):
    """From now on others find it."""


class UntilGone(Contract, id="zbmd.way.until_gone"):
    """Answer once this life of the process is out of the cluster."""

    process: Process
    life: Life


class Gone(Contract, id="zbmd.way.gone"):
    """It is."""

    reason: Text


class ProcessesRequest(Contract, id="zbmd.way.processes_request"):
    """Which processes of the cluster have actors that can be reached?"""


class ProcessesReply(Contract, id="zbmd.way.processes"):
    """(process, its life, the node that it runs on as people call it), nodes first; others are counted."""

    processes: Annotated[tuple[tuple[Process, Life, Text], ...], msgspec.Meta(max_length=PROCESSES_TOLD_MAX)]
    more: int = 0


def guests_address(address: str) -> str:
    """Return the address for external links of a rank whose siblings link at `address`."""
    return f"{address}-g"
