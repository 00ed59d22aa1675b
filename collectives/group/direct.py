"""Open the direct messages of a sub-group whose members share a host; see `p2p.direct`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.execution.executor import a_core_each
from zbmd.collectives.group.group import Group, Home
from zbmd.collectives.native._messages import MEMBER_BYTES, STAGE_BYTES, MessageSlots
from zbmd.collectives.p2p.direct import DirectMessages
from zbmd.transport.errors import ArenaFull, RemoteProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import address_of

PATIENCE_NS: Final = 20_000
"""Looking for a message before a wait parks, at most: about the time of an answer."""
INBOX_PARTS: Final = 3
"""One of so many parts of the inbox is for slots of messages; the others are for collectives."""
STAGE_PARTS: Final = 8
"""A group may take one of so many parts of what is free in the arena for messages on their way."""


async def open_direct(made: Group, *, timeout: float | None = None) -> None:
    """Set `made.direct`, if its members can read each other's memory and have room for it.

    All members call this. Raises as their operations do.
    """
    home, pids, end_ns = made.home, made.communicator.reading.pids, made.deadline_ns(timeout)
    if home is None or not pids:
        return
    segment = home.worker.segment
    block = _slots_in(segment, made.size * MEMBER_BYTES)
    mine = np.array([0 if block is None else address_of(block) - segment.base], np.uint64)
    rows = await made.run(lambda c: c.all_gather(mine, deadline_ns=end_ns))
    if block is None or not rows.all():
        return
    home.subgroups.keep(made.communicator.channel, block)
    made.direct = _opened(made, home, [int(row) for row in rows.reshape(-1)])


def _slots_in(segment: Segment, nbytes: int) -> NDArray[Any] | None:
    """Return memory for the slots of all members; None if there is too little for collectives beside it."""
    inbox = segment.inbox
    if inbox.used_bytes + nbytes > inbox.capacity_bytes // INBOX_PARTS:
        return None
    try:
        return inbox.zeros((nbytes,), np.uint8)
    except ArenaFull:
        return None


def stage_in(segment: Segment) -> NDArray[Any] | None:
    """Return memory for messages on their way; None if it would take much of the arena."""
    arena = segment.arena
    if (arena.capacity_bytes - arena.used_bytes) // STAGE_PARTS < STAGE_BYTES:
        return None
    try:
        return arena.empty(STAGE_BYTES, np.uint8)
    except ArenaFull:
        return None


def _opened(made: Group, home: Home, offsets: list[int]) -> DirectMessages:
    worker, nbytes = home.worker, made.size * MEMBER_BYTES
    pids = made.communicator.reading.pids
    members: list[tuple[int, int, int, int, int]] = []
    mappings: list[object] = [worker.segment.mapping]
    for member, at in zip(made.members, offsets, strict=True):
        if member == worker.rank:
            members.append(
                (worker.segment.base, worker.segment.slot, pids[member], at, worker.segment.nbytes)
            )
            continue
        peer = worker.peers[member].memory
        if not isinstance(peer, PeerSegment) or not peer.inbox_offset <= at <= peer.arena_offset - nbytes:
            raise RemoteProtocolError(f"rank {member} has no slots for messages at {at} in its inbox")
        members.append((peer.base, peer.slot, pids[member], at, peer.nbytes))
        mappings.append(peer.mapping)
    slots = MessageSlots(
        members,
        rank=made.rank,
        channel=made.communicator.channel,
        epoch=made.communicator.epoch,
        patience_ns=PATIENCE_NS if a_core_each(made.size) else 0,
        mappings=mappings,
        stage=partial(stage_in, worker.segment),
    )
    return DirectMessages(slots, made.messages(), made.members, made.give_up)
