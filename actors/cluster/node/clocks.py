"""Wall clocks of hosts that are far apart: found by what nodes say of theirs, and told in words.

Nothing waits by a wall clock, so it is people who must know: they read logs of several hosts side by side.
"""

from __future__ import annotations

import time
from typing import Final

from zbmd.actors.cluster.state.node_id import Node
from zbmd.transport.clock.deadlines import format_duration

CLOCKS_APART_NS_MAX: Final = 120_000_000_000
"""More than this between two clocks is told. Hosts that keep time are within a second of each other; what a
clock says on its way, and a host that was just resumed, are far within the bound."""
CLOCKS_TOLD_MAX: Final = 64
"""Nodes that one incarnation warns of: when so many clocks differ, it is ours."""
_SECOND_NS: Final = 1_000_000_000


def wall_ns() -> int:
    """This host's wall clock, ns since 1970."""
    return time.time_ns()


def clocks_apart(theirs: str, ours: str, ahead_ns: int) -> str | None:
    """What to tell people if a host's clock is `ahead_ns` ahead of ours; None if that is within the bound.

    theirs, ours: what people call the two hosts.
    """
    if abs(ahead_ns) <= CLOCKS_APART_NS_MAX:
        return None
    apart = format_duration(abs(ahead_ns) // _SECOND_NS * _SECOND_NS)
    where = "ahead of" if ahead_ns > 0 else "behind"
    return (
        f"the clock of {theirs} is {apart} {where} that of {ours}. Set both: `timedatectl` says whether a "
        "host keeps time, `timedatectl set-ntp true` has it do so. Views, jobs and deadlines take no harm, "
        "for nothing waits by these clocks; times in logs of the two do not fit together, and with TLS a "
        "certificate may be taken for expired, or not valid yet"
    )


class ClockWatch:
    """Of the clocks that one incarnation has heard of, whose has been told of already."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def heard(self, me: Node, node: Node, ahead_ns: int) -> str | None:
        """What to tell people of a node's clock, the first time that it is far from ours."""
        if node.key.id in self._told or len(self._told) >= CLOCKS_TOLD_MAX:
            return None
        text = clocks_apart(_called(node), _called(me), ahead_ns)
        if text is not None:
            self._told.add(node.key.id)
        return text


def _called(node: Node) -> str:
    return f"{node.name or node.key} ({node.address})"
