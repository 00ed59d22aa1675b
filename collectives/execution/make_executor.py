"""Which executor a group gets: by what its members' memory is reached through."""

from __future__ import annotations

from collections.abc import Mapping

from zbmd.collectives.execution.executor import Executor, MappedExecutor, require_members
from zbmd.collectives.execution.remote_executor import RemoteExecutor
from zbmd.transport.memory.segment import PeerMemory, PeerSegment, Segment


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
    group = {member: peers[member] for member in members if member != rank}
    mapped = {member: memory for member, memory in group.items() if isinstance(memory, PeerSegment)}
    if len(mapped) == len(group):
        return MappedExecutor(
            segment=segment, peers=mapped, members=members, rank=rank, epoch=epoch, channel=channel
        )
    return RemoteExecutor(
        segment=segment, peers=group, members=members, rank=rank, epoch=epoch, channel=channel
    )
