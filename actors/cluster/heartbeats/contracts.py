"""Messages by which two nodes set up an RDMA route for heartbeats beside their TCP connection.

The node that dialed the connection offers, the other answers, the first confirms. Each may decline instead,
with a reason.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.transport.rdma.setup import QueuePairAt
from zbmd.transport.secure.protection import SESSION_ID_BYTES

WHY_MAX: Final = 400
"""Length of a reason."""

LaneId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
"""The session id of a heartbeat connection (stripe)."""
_Why = Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


class BeatsAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a node receives heartbeats over RDMA: its queue pair, and the memory they are written to."""

    at: QueuePairAt
    address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BeatsOffer(Contract, id="zbmd.cluster.beats_offer"):
    """Heartbeats may be written to `at`; None declines, with the reason in `why`."""

    lane: LaneId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsAnswer(Contract, id="zbmd.cluster.beats_answer"):
    """The other side's answer. It receives at once, and sends its own once the first side is ready."""

    lane: LaneId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsReady(Contract, id="zbmd.cluster.beats_ready"):
    """The offering side receives heartbeats now; a non-empty `why` declines after all."""

    lane: LaneId
    why: _Why = ""


BeatsSaid: TypeAlias = BeatsOffer | BeatsAnswer | BeatsReady
