"""Our ranks at collectives: `python -m … --control NAME --ranks N --bytes-max B` forks them, with a segment
each.

The blocking call of a communicator is timed, on one thread per rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.operations import Blocking
from zbmd.tools.bench.peers.collectives import written_zeros
from zbmd.tools.bench.peers.control import CPU, FOREIGN, MODEL, elements, measured, serve
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.segment import PeerSegment, Segment

INBOX_BYTES = 16 << 20
SPARE_BYTES = 32 << 20
"""Of each arena, for what is staged."""

Array = NDArray[np.float32]


class Rank:
    """One rank, and arrays for one measurement after the other. c: a communicator, or what has its calls."""

    def __init__(self, c: Communicator | Blocking, arena: Arena, *, place: int, size: int) -> None:
        self._c = c
        self._arena = arena
        self._place = place
        self._size = size
        self._foreign = False

    def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation."""
        operation = self._operation(what.removeprefix(CPU), nbytes)
        self._c.barrier()
        return measured(what, iterations, operation)

    def _operation(self, what: str, nbytes: int) -> Callable[[], object]:
        c, size, root = self._c, self._size, self._place == 0
        count, block = elements(nbytes, size)
        self._foreign, what = what.endswith(FOREIGN), what.removesuffix(FOREIGN)
        if what.startswith("all-reduce") or what in ("broadcast", "reduce"):
            return self._of_one_array(what, self._zeros(count))
        large, small = self._zeros(size, block), self._zeros(block)
        if what == "all-to-all":
            other = self._zeros(size, block)
            return lambda: c.all_to_all(large, out=other)
        table: dict[str, Callable[[], object]] = {
            "reduce-scatter": lambda: c.reduce_scatter(large, out=small),
            "all-gather": lambda: c.all_gather(small, out=large),
            "gather": lambda: c.gather(small, 0, out=large if root else None),
            "scatter": lambda: c.scatter(large if root else None, 0, out=small),
        }
        return table[what]

    def _of_one_array(self, what: str, x: Array) -> Callable[[], object]:
        c = self._c
        if what == "broadcast":
            return lambda: c.broadcast(x, 0)
        if what == "all-reduce":
            return lambda: c.all_reduce(x)
        out = self._zeros(x.size)
        if what == "reduce":
            return lambda: c.reduce(x, 0, out=out)
        return lambda: c.all_reduce(x, out=out)

    def _zeros(self, *shape: int) -> Array:
        found: Array
        if self._foreign:
            found = written_zeros(*shape)
            return found
        found = self._arena.empty(shape, np.float32)
        found.fill(0)
        return found


def _communicator(segments: list[Segment], rank: int) -> Communicator:
    own = segments[rank]
    peers = {
        place: PeerSegment.attach(segment.fds, slot=place)
        for place, segment in enumerate(segments)
        if place != rank
    }
    communicator = Communicator(
        segment=own, peers=peers, members=tuple(range(len(segments))), rank=rank, epoch=1, channel=0
    )
    communicator.tune()
    return communicator


def _serve(segments: list[Segment], rank: int, control: str) -> None:
    end_with_parent(os.getppid())
    communicator = _communicator(segments, rank)
    ours, model = Rank(communicator, segments[rank].arena, place=rank, size=len(segments)), communicator.model

    def measure(what: str, nbytes: int, iterations: int) -> list[float]:
        if what == MODEL:
            return [model.alpha_ns, model.beta_ns_per_byte, model.gamma_ns_per_byte, float(model.cores)]
        return ours.measure(what, nbytes, iterations)

    serve(control, rank, measure)


def main() -> None:
    """Fork the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bytes-max", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    segments = [
        Segment.create(
            slot=rank,
            incarnation=1,
            arena_bytes=3 * arguments.bytes_max + SPARE_BYTES,
            inbox_bytes=INBOX_BYTES,
        )
        for rank in range(arguments.ranks)
    ]
    children: list[int] = []
    for rank in range(arguments.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _serve(segments, rank, arguments.control)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    raise SystemExit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
