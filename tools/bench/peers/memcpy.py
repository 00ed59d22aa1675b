"""The floor of every copy: numpy copying between two arrays of one process.

`python -m zbmd.tools.bench.peers.memcpy --control NAME [--shared]`
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from zbmd.tools.bench.peers.control import serve, timed
from zbmd.transport.memory.segment import Segment


def measure(what: str, nbytes: int, iterations: int) -> list[float]:
    """Nanoseconds a copy between numpy's own arrays, whatever it stands beside."""
    return _copies(np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8), iterations)


def measure_shared(what: str, nbytes: int, iterations: int) -> list[float]:
    """The same from the arena to the inbox of a segment: memory with the pages that ranks share."""
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=nbytes, inbox_bytes=nbytes)
    into, src = segment.inbox.empty(nbytes, np.uint8), segment.arena.empty(nbytes, np.uint8)
    into.fill(0)
    src.fill(1)
    samples = _copies(into, src, iterations)
    segment.close()
    return samples


def _copies(into: NDArray[np.uint8], src: NDArray[np.uint8], iterations: int) -> list[float]:
    return timed(iterations, lambda: np.copyto(into, src), 1)


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--shared", action="store_true", help="between two parts of a segment")
    arguments = parser.parse_args()
    serve(arguments.control, 0, measure_shared if arguments.shared else measure)


if __name__ == "__main__":
    main()
