"""What others want to hear of a membership: callbacks, bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.shm.death_notice import DeathNotice

CallbackT = TypeVar("CallbackT")

OnPeerLost = Callable[[int, int, DeathNotice], None]
"""Takes the rank, the incarnation and the notice."""
OnLinkEnded = Callable[[int, int], None]
"""Takes the rank and the incarnation."""
OnLeave = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Callbacks:
    """Those of one process. Each is for a method of `zbmd.actors.rank.member.Worker`, which says what it is
    told."""

    peer_lost: list[OnPeerLost] = field(default_factory=list[OnPeerLost])
    link_ended: list[OnLinkEnded] = field(default_factory=list[OnLinkEnded])
    leaving: list[OnLeave] = field(default_factory=list[OnLeave])


def register(callbacks: list[CallbackT], callback: CallbackT, most: int) -> Callable[[], None]:
    """Keep `callback` with the others; returns what undoes it. Raises `LocalProtocolError` beyond `most`."""
    if len(callbacks) >= most:
        raise LocalProtocolError(
            f"{most} callbacks of a kind are registered with this node already: close groups that are over"
        )
    callbacks.append(callback)

    def undo() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return undo
