"""A rank of the sweep of kills: its segment, watches and mappings, and the operation of each round.

What is here is what a rank of a job has: only who is in, and which round comes, is told by the process that
has forked it, over a socket (`pool`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.shard_tree import assign_shards, shard_tree_nodes
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import MembersLost
from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import Watch, now_ns
from zbmd.transport.shm.death_notice import LifeThread

MESSAGE_BYTES_MAX: Final = 4096
OPERATION_S_MAX: Final = 30.0
"""An operation takes less than a millisecond, and a notice not much more: only a hang reaches this."""
RIGHT: Final = "right"
SURVIVED: Final = "survived"
AUTO: Final = "auto"

Numbers = NDArray[np.int64]


def given_to(c: Communicator, count: int, k: int) -> list[Numbers]:
    """Every member's input in round `k`: other numbers in each, so nothing old passes for new."""
    return [np.arange(count * c.size, dtype=np.int64) * 10**place + k for place in range(c.size)]


def operate(c: Communicator, arena: Any, said: dict[str, Any], k: int) -> tuple[Any, Any]:
    """Run the operation; return what it gave here, and what it must give."""
    count, algorithm, root = said["count"], said["algorithm"], c.members[-1]
    given, me, end_ns = given_to(c, count, k), c.place, now_ns() + int(OPERATION_S_MAX * 1e9)
    mine, total = arena.from_array(given[me]), sum(given)
    at_root, last = c.rank == root, given[-1].reshape(c.size, count)
    match said["operation"]:
        case "ALL_REDUCE":
            return c.all_reduce(mine, algorithm=algorithm, deadline_ns=end_ns), total
        case "REDUCE":
            got = c.reduce(mine, root, algorithm=algorithm, deadline_ns=end_ns)
            return got, total if at_root else None
        case "BROADCAST":
            return c.broadcast(mine, root, algorithm=algorithm, deadline_ns=end_ns), given[-1]
        case "ALL_GATHER":
            out = arena.empty((c.size, count), np.int64)
            got = c.all_gather(mine[:count], out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x[:count] for x in given])
        case "GATHER":
            out = arena.empty((c.size, count), np.int64) if at_root else None
            got = c.gather(mine[:count], root, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x[:count] for x in given]) if at_root else None
        case "SCATTER":
            out = arena.empty(count, np.int64)
            rows = mine.reshape(c.size, count) if at_root else None
            return c.scatter(rows, root, out, algorithm=algorithm, deadline_ns=end_ns), last[me]
        case "REDUCE_SCATTER":
            out, rows = arena.empty(count, np.int64), mine.reshape(c.size, count)
            got = c.reduce_scatter(rows, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.asarray(total).reshape(c.size, count)[me]
        case "ALL_TO_ALL":
            out, rows = arena.empty((c.size, count), np.int64), mine.reshape(c.size, count)
            got = c.all_to_all(rows, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x.reshape(c.size, count)[me] for x in given])
        case "ALL_REDUCE_SHARDS":
            assignment = assign_shards(c.size, c.size)
            (node,) = shard_tree_nodes(c.size, *assignment[me])
            out = arena.empty(mine.shape, mine.dtype)
            c.all_reduce_shards({node: mine}, out, shards=c.size, assignment=assignment, deadline_ns=end_ns)
            return out, total
        case "BARRIER":
            c.barrier(deadline_ns=end_ns)
            return None, None
        case other:
            raise ValueError(f"there is no operation {other}")


def attempt(c: Communicator, arena: Any, said: dict[str, Any], k: int) -> str:
    """How the operation ends here: `RIGHT`, or what is to be said of it."""
    try:
        got, wanted = operate(c, arena, said, k)
    except MembersLost as lost:
        return f"MembersLost {sorted(lost.ranks)}"
    except ZbmdError as error:
        return type(error).__name__
    ran = c.flight[-1].algorithm
    if said["algorithm"] not in (AUTO, ran):
        return f"ran {ran}"
    if wanted is None:
        return RIGHT if got is None else "WRONG"
    return RIGHT if np.array_equal(got, wanted) else "WRONG"


class Rank:
    """One process of the pool."""

    def __init__(self, segment: Segment, line: socket.socket) -> None:
        self._segment = segment
        self._line = line
        self._life = LifeThread(segment)
        self._notices = os.eventfd(0)
        self._peers: dict[int, PeerSegment] = {}
        self._watches: dict[int, Watch] = {}
        self._group: Communicator | None = None

    def serve(self) -> None:
        """Do what is asked until the line ends."""
        self._say({"ready": True})
        while True:
            data, fds, _flags, _address = socket.recv_fds(self._line, MESSAGE_BYTES_MAX, 1)
            if not data:
                break
            said: dict[str, Any] = json.loads(data)
            if said["do"] == "attach":
                self._attach(said["rank"], fds[0])
            else:
                self._say(self._round(said))
        self._close_group()
        for watch in self._watches.values():
            watch.stop()
        self._life.goodbye()

    def _say(self, answer: dict[str, Any]) -> None:
        self._line.sendall(json.dumps(answer).encode())

    def _attach(self, rank: int, fd: int) -> None:
        """Map a member that has come; the one before it in its place is dead."""
        self._close_group()
        old = self._peers.pop(rank, None)
        if old is not None:
            self._await_notice(rank)
            self._watches.pop(rank).stop()
            self._segment.end_proven(rank)
            old.close()
        self._segment.clear_lost(rank)
        peer = PeerSegment.attach(fd, slot=rank)
        os.close(fd)
        self._peers[rank] = peer
        own = self._segment
        self._watches[rank] = Watch(own.mapping, own.slot, peer.mapping, rank, self._notices)
        self._say({"attached": rank, "fds": len(os.listdir("/proc/self/fd")), "threads": self._threads()})

    @staticmethod
    def _threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def _await_notice(self, rank: int) -> None:
        while not self._segment.lost_mask() >> rank & 1:
            os.eventfd_read(self._notices)

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _round(self, said: dict[str, Any]) -> dict[str, Any]:
        self._close_group()
        members: Sequence[int] = said["members"]
        for rank in self._peers:
            if rank not in members:
                self._await_notice(rank)
        self._group = c = Communicator(
            segment=self._segment,
            peers={rank: self._peers[rank] for rank in members if rank != self._segment.slot},
            members=tuple(members),
            rank=self._segment.slot,
            epoch=said["epoch"],
            channel=0,
            hosts=tuple(said["hosts"]),
        )
        arena, k = self._segment.arena, said["epoch"]
        for calm in range(1, said["run"]):
            end = attempt(c, arena, said, k * 10 + calm)
            if end != RIGHT:
                return {"end": f"before: {end}"}
        if self._segment.slot == said["victim"]:
            c.kill_at(c.sequence + 1, said["point"])
        return {"end": attempt(c, arena, said, k * 10)}
