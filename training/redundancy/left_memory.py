"""The memory of ranks that have ended, of a state that is recut: of the own predecessor, and of others.

A rank's own predecessor has left it in the arena that this rank has now. The memory of others, which are not
replaced, is held by the snapshot process of the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from functools import partial
from typing import Any, Final

import structlog

from zbmd.actors.rank.member import Worker
from zbmd.actors.snapshots.client import HolderLine, find_holders
from zbmd.actors.snapshots.messages import Look, Refused
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.stamped import (
    NAME,
    STATE_BLOCKS,
    FoundState,
    StateName,
    damage_logged,
    digest_of,
)
from zbmd.transport.errors import PeerLost, RemoteProtocolError
from zbmd.transport.memory.kept import KeptMemory, block_of, exclusively

log: Final = structlog.stdlib.get_logger("zbmd.redundancy")


class LeftMemory(FoundState):
    """The slots that a rank has left, of which those count whose digests are right, from version `known`."""

    def __init__(self, memory: Any, name: StateName, known: int) -> None:
        super().__init__(memory, name)
        self._versions = [self._verified(slot, known) for slot in range(SLOTS)]

    def _verified(self, slot: int, known: int) -> int | None:
        version = super().version_in(slot)
        self.name_damage(slot)
        if version is None or version < known:
            return None
        found, stamped = digest_of(self.slots[slot]), self.digest_in(slot)
        if found != stamped:
            damage_logged(version, found, stamped)
            return None
        return version

    def version_in(self, slot: int) -> int | None:
        """See `StampedSlots`."""
        return self._versions[slot]


def left_by_predecessor(worker: Worker, known: int) -> list[FoundState]:
    """Return what the process before this one has left in its arena, and this one has not taken over."""
    kept = worker.segment.kept
    return [] if kept is None else left_in(kept, worker.job, known)


def left_in(kept: KeptMemory, run: int, known: int) -> list[FoundState]:
    """Return the states of a run that a process has left in its memory, from version `known`."""
    found = list[FoundState]()
    for block in STATE_BLOCKS:
        nbytes = kept.left(block)
        if not nbytes:
            continue
        header = kept.peek(block, NAME.size)
        name = StateName.decoded(header)
        if name is None and any(header):
            log.warning("a header in memory is damaged: nothing of its block is used", block=block)
        if name is None or name.run != run or name.nbytes != nbytes:
            kept.release(block)  # of no use
            continue
        memory, _ = kept.block(block, nbytes)
        kept.ready(memory)
        left = LeftMemory(memory, name, known)
        left.release = partial(kept.release, block)
        found.append(left)
    return [one for one in found if one.made]


def left_by_dead(worker: Worker, living: Collection[int], known: int) -> list[FoundState]:
    """Return what ranks that are not `living` have left on this host, if a process there holds it.

    That of a process that is still ending is waited for.
    """
    found = list[FoundState]()
    for address in find_holders(job=worker.job) or find_holders():  # on several hosts it has its own number
        with contextlib.suppress(PeerLost, RemoteProtocolError, OSError):
            line = HolderLine(address.name)
            try:
                held = line.snapshots(Look())
            finally:
                line.close()
            if isinstance(held, Refused):
                continue
            with contextlib.closing(held):
                for rank, memory in sorted(held.memory.items()):
                    if rank not in living:
                        found += _left_in(memory, worker.job, known)
    return found


def _left_in(memory: int, job: int, known: int) -> list[FoundState]:
    found = list[FoundState]()
    with exclusively(os.dup(memory)) as ended:
        if ended is None:
            return found
        try:
            for block in STATE_BLOCKS:
                view = block_of(ended, block)
                name = None if view is None else StateName.decoded(bytes(view[: NAME.size]))
                if view is not None and name is not None and name.run == job and name.nbytes == len(view):
                    found.append(LeftMemory(view, name, known))
        finally:
            os.close(ended)
    return [one for one in found if one.made]
