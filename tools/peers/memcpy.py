"""The floor of every copy: numpy copying between two arrays of one process.

`python -m zbmd.tools.peers.memcpy --control NAME`
"""

from __future__ import annotations

import argparse

import numpy as np

from zbmd.tools.peers.control import serve
from zbmd.tools.peers.patterns import timed


def measure(what: str, nbytes: int, iterations: int) -> list[float]:
    """Nanoseconds a copy, whatever it stands beside."""
    into, src = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return timed(iterations, lambda: np.copyto(into, src), 1)


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    serve(parser.parse_args().control, 0, measure)


if __name__ == "__main__":
    main()
