"""Ranks as threads of this process, each with a segment, a communicator and a device of one modelled host.

Ranks of a real job are processes; a model of devices that reach each other's memory is in one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from support.devices.cuda_model import Clock, ModelHost, ModelProcess
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import now_ns

ARENA_BYTES = 8 << 20
OPERATION_S = 120.0
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """A rank, its device and its memory."""

    rank: int
    n: int
    process: ModelProcess
    segment: Segment
    peers: dict[int, PeerSegment]
    told: dict[Any, Clock]
    """The clock of each rank's device as it came to an operation on the host."""
    all_done: threading.Barrier
    made: list[Communicator] = field(default_factory=list[Communicator])

    def communicator(self, *, epoch: int = 1, channel: int = 0) -> Communicator:
        made = Communicator(
            segment=self.segment,
            peers=self.peers,
            members=tuple(range(self.n)),
            rank=self.rank,
            epoch=epoch,
            channel=channel,
        )
        executor: Any = made._executor
        run = executor.run

        def telling(*arguments: Any, **named: Any) -> None:
            # As every operation of a device path is a barrier, all have told by its end.
            key = epoch, channel, executor.sequence
            self.told[*key, self.rank] = self.process.tells()
            run(*arguments, **named)
            for rank in range(self.n):
                self.process.learns(self.told.get((*key, rank), {}))

        executor.run = telling
        self.made.append(made)
        return made

    def close(self, *communicators: Communicator) -> None:
        """Close them once every rank is to: one that closes ends what others are still in."""
        self.all_done.wait()
        for each in communicators:
            each.close()

    def soon(self) -> int:
        """A deadline that only a hang reaches."""
        return now_ns() + int(OPERATION_S * 1e9)


def run_threads(host: ModelHost, n: int, body: Callable[[ThreadRank], ResultT]) -> list[ResultT]:
    """Run `body` on each of `n` ranks, on the host's devices in turn; return what it returned.

    A rank that fails ends the waits of the others. Raises what failed first.
    """
    with contextlib.ExitStack() as stack:
        segments = [
            Segment.create(slot=rank, incarnation=1, arena_bytes=ARENA_BYTES, inbox_bytes=1 << 20)
            for rank in range(n)
        ]
        for segment in segments:
            stack.callback(segment.close)
        ranks: list[ThreadRank] = []
        told: dict[Any, Clock] = {}
        all_done = threading.Barrier(n)
        for rank in range(n):
            peers = {q: PeerSegment.attach(segments[q].fds, slot=q) for q in range(n) if q != rank}
            for peer in peers.values():
                stack.callback(peer.close)
            process = host.process(rank % host.devices)
            ranks.append(ThreadRank(rank, n, process, segments[rank], peers, told, all_done))
        failures: list[BaseException] = []

        def run(rank: ThreadRank) -> ResultT:
            try:
                return body(rank)
            except BaseException as error:
                failures.append(error)
                all_done.abort()
                for communicator in rank.made:
                    communicator.give_up("its rank has failed")
                raise

        with ThreadPoolExecutor(n) as threads:
            running = [threads.submit(run, rank) for rank in ranks]
        if failures:
            raise failures[0]
        return [each.result() for each in running]
