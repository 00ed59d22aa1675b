"""Which executor a group gets: by what its members' memory is reached through."""

from __future__ import annotations

from collections.abc import Mapping

from zbmd.collectives.executor import Executor, MappedExecutor, require_members
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.peer_memory import PeerMemory
from zbmd.transport.segment import PeerSegment, Segment


def make_executor(
    *,
    segment: Segment,
    peers: Mapping[int, PeerMemory],
    members: tuple[int, ...],
    rank: int,
    epoch: int,
    channel: int,
) -> Executor:
    """This rank's executor for `members` at `epoch` on `channel`; `peers` may hold more than these.

    Raises `LocalProtocolError` if members and peers do not fit, or the channel has been used in this epoch.
    """
    require_members(members, rank, peers)
    mapped: dict[int, PeerSegment] = {}
    for member in members:
        if member != rank:
            memory = peers[member]
            if not isinstance(memory, PeerSegment):
                raise LocalProtocolError(f"no executor for memory such as {memory!r} of rank {member}")
            mapped[member] = memory
    return MappedExecutor(
        segment=segment, peers=mapped, members=members, rank=rank, epoch=epoch, channel=channel
    )
