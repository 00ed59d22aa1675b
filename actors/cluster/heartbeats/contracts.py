"""How two nodes set up a way for heartbeats beside a lane: what they say over the link that the lane has.

Who has dialed the lane offers, the other answers, the first is ready. Either may say instead why not.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.transport.rdma.setup import QueuePairAt
from zbmd.transport.secure.session_keys import SESSION_ID_BYTES

WHY_MAX: Final = 400
"""Characters of a reason."""

LaneId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
"""The session id of a lane."""
_Why = Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


class BeatsAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a node takes heartbeats over RDMA: its queue pair, and the memory that they are written to."""

    at: QueuePairAt
    address: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    key: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BeatsOffer(Contract, id="zbmd.cluster.beats_offer"):
    """Beats may be written here. at: None if they cannot, `why` then says why not."""

    lane: LaneId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsAnswer(Contract, id="zbmd.cluster.beats_answer"):
    """The same of the other side, which takes beats at once; it sends its own once the first is ready."""

    lane: LaneId
    at: BeatsAt | None = None
    why: _Why = ""


class BeatsReady(Contract, id="zbmd.cluster.beats_ready"):
    """The side that has offered takes beats now. why: not empty if it does not, after all."""

    lane: LaneId
    why: _Why = ""


BeatsSaid: TypeAlias = BeatsOffer | BeatsAnswer | BeatsReady
