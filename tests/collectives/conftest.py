"""Real processes for the collectives' tests: forked, with segments by inherited memfd; or on several hosts.

Ranks on different hosts have but TCP connections between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.links.remote_peers import Wiring

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.segment import PeerMemory, PeerSegment, Segment
from zbmd.transport.native._native import Watch, now_ns
from zbmd.transport.shm.death_notice import LifeThread

ARENA_BYTES = 8 << 20
INBOX_BYTES = 4 << 20
PATIENCE_S = 180.0
"""With ranks that do all they are to do, which may be thousands of operations on a busy machine."""
OPERATION_S = 120.0
PIDS_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Process:
    """The tools of a forked rank."""

    rank: int
    n: int
    segment: Segment
    peers: dict[int, PeerMemory]
    bulks: dict[int, BulkPeer]
    pids: list[int]
    event_fd: int

    def communicator(
        self,
        *,
        members: tuple[int, ...] | None = None,
        epoch: int = 1,
        channel: int = 0,
        hosts: tuple[int, ...] = (),
    ) -> Communicator:
        return Communicator(
            segment=self.segment,
            peers=self.peers,
            members=tuple(range(self.n)) if members is None else members,
            rank=self.rank,
            epoch=epoch,
            channel=channel,
            hosts=hosts,
        )

    def soon(self) -> int:
        """A deadline that only a hang reaches."""
        return now_ns() + int(OPERATION_S * 1e9)

    def await_death(self, rank: int) -> None:
        """Return once this process has noticed the end of `rank`."""
        assert rank != self.rank, "it was to die, and lives"
        if rank in self.bulks:
            with contextlib.suppress(ZbmdError):
                self.bulks[rank].ended.wait(self.soon())
        while not self.segment.lost_mask() >> rank & 1:
            os.eventfd_read(self.event_fd)


Body = Callable[[Process], Any]
RunRanks = Callable[..., list[Any]]


def _child(rank: int, segments: list[Segment], wiring: Wiring, line: socket.socket, body: Body) -> None:
    n = len(segments)
    wiring.close_all_but(rank)
    life = LifeThread(segments[rank])
    line.sendall(b"r")
    pids: list[int] = json.loads(line.recv(PIDS_BYTES_MAX))
    plane, bulks, remote = wiring.connect(rank)
    mapped = {
        q: PeerSegment.attach(segments[q].fds, slot=q) for q in range(n) if q != rank and q not in remote
    }
    event_fd = os.eventfd(0)
    own = segments[rank]
    watches = [Watch(own.mapping, rank, peer.mapping, peer.slot, event_fd) for peer in mapped.values()]
    try:
        answer = {"value": body(Process(rank, n, own, {**mapped, **remote}, bulks, pids, event_fd))}
    except BaseException:  # noqa: BLE001 -- the parent gets it, whatever it is
        answer = {"error": traceback.format_exc()}
    line.sendall(json.dumps(answer).encode() + b"\n")
    line.recv(1)  # nobody leaves before all are done
    for watch in watches:
        watch.stop()
    plane.close()
    life.goodbye()


def _run_ranks(
    n: int,
    body: Body,
    *,
    dies: frozenset[int] = frozenset(),
    arena_bytes: int = ARENA_BYTES,
    hosts: Sequence[int] | None = None,
    inbox_bytes: Sequence[int] = (),
) -> list[Any]:
    """Fork `n` ranks, run `body` in each; return what it returned (JSON), None for those in `dies`.

    hosts: of each rank, the number of its host; by default all are on one. inbox_bytes: of each rank.
    """
    inboxes = inbox_bytes or [INBOX_BYTES] * n
    segments = [
        Segment.create(slot=rank, incarnation=1, arena_bytes=arena_bytes, inbox_bytes=inboxes[rank])
        for rank in range(n)
    ]
    hosts = hosts or [0] * n
    wiring = Wiring(segments, hosts)
    lines: list[socket.socket] = []
    pids: list[int] = []
    for rank in range(n):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                for line in lines:
                    line.close()
                _child(rank, segments, wiring, theirs, body)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        ours.settimeout(PATIENCE_S)
        lines.append(ours)
        pids.append(pid)
    wiring.close_all_but(-1)
    try:
        for line in lines:
            assert line.recv(1) == b"r", "a rank ended before it began"
        for line in lines:
            line.sendall(json.dumps(pids).encode())
        answers = [line.makefile("rb").readline() for line in lines]
    except BaseException:  # who hangs does not come to its end by itself
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for line in lines:
            line.close()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for segment in segments:
            segment.close()
    results: list[Any] = []
    for rank, (answer, status) in enumerate(zip(answers, statuses, strict=True)):
        if rank in dies:
            assert not answer and status == -9, f"rank {rank} was to be killed: {status} {answer!r}"
            results.append(None)
            continue
        found = json.loads(answer) if answer else {"error": "it said nothing"}
        assert "error" not in found, f"rank {rank} (exit {status}):\n{found['error']}"
        assert status == 0
        results.append(found["value"])
    return results


@pytest.fixture
def run_ranks() -> RunRanks:
    return _run_ranks
