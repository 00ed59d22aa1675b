"""Ranks that are all this process, and their ends of the messages among them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from zbmd.collectives.group.direct import STAGE_PARTS, stage_in
from zbmd.collectives.native._messages import MEMBER_BYTES, STAGE_BYTES, MessageSlots, Request
from zbmd.transport.memory.memfd import PAGE_BYTES
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native

EPOCH = 2
CHANNEL = 5
LONG_NS = 60_000_000_000
ARENA_BYTES = 2 * STAGE_PARTS * STAGE_BYTES


@dataclass
class World:
    """Ranks 0, 1, … of a group, their segments, and their ends of its messages."""

    segments: list[Segment]
    staged: bool = False
    ends: list[MessageSlots] = field(default_factory=list[MessageSlots])

    @classmethod
    def of(cls, ranks: int, *, staged: bool = False) -> World:
        """staged: messages of up to 1 MiB go through blocks in their sender's arena."""
        arena_bytes, inbox_bytes = ARENA_BYTES if staged else PAGE_BYTES, ranks * MEMBER_BYTES
        return cls(
            [
                Segment.create(slot=rank, incarnation=1, arena_bytes=arena_bytes, inbox_bytes=inbox_bytes)
                for rank in range(ranks)
            ],
            staged,
        )

    def __post_init__(self) -> None:
        attached = [PeerSegment.attach(made.fds, slot=rank) for rank, made in enumerate(self.segments)]
        for rank, own in enumerate(self.segments):
            bases = [own.base if peer.slot == rank else peer.base for peer in attached]
            at, end = _native.OFF_END, own.nbytes
            made = MessageSlots(
                [(base, slot, os.getpid(), at, end) for slot, base in enumerate(bases)],
                rank=rank,
                channel=CHANNEL,
                epoch=EPOCH,
                patience_ns=0,
                mappings=(attached, own.mapping),
                stage=partial(stage_in, own) if self.staged else None,
            )
            self.ends.append(made)

    def close(self) -> None:
        for made in self.segments:
            made.close()

    def end_channel(self, rank: int) -> None:
        """Have a rank say that nothing more comes of it."""
        for made in self.segments:
            if made.slot != rank:
                peer = PeerSegment.attach(made.fds, slot=made.slot)
                peer.notify(rank, CHANNEL, EPOCH << 32 | 0xFFFFFFFF)
                peer.close()


def label(x: np.ndarray) -> bytes:
    return f"{x.dtype}[{x.size}]".encode()


def send(end: MessageSlots, x: np.ndarray, to: int, tag: int = 0) -> Request:
    return end.send(x, to, tag, label(x), LONG_NS)


def receive(end: MessageSlots, out: np.ndarray, source: int, tag: int = 0) -> Request:
    return end.receive(out, source, tag, label(out), LONG_NS)


def over(request: Request, failure: int = 0) -> bool:
    return request.is_over and request.failure == failure
