"""Two ranks of MPI, through mpi4py: `mpirun -n 2 python -m zbmd.tools.bench.peers.mpi4py_pair --control
NAME`.

Buffers are numpy arrays, given in mpi4py's fast form [buffer, count, datatype], and made once a size.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zbmd.tools.bench.peers.control import serve, timed, window_of, windows


class Ranks:
    """This rank and the other one."""

    def __init__(self) -> None:
        importlib.import_module("mpi4py").rc.thread_level = "single"  # MPI's quickest mode
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """`p2p`, `echo` or `put`; nanoseconds a message, on both ranks."""
        out, into = ([np.ones(nbytes, np.uint8), nbytes, self._mpi.BYTE] for _ in range(2))
        if what != "put":
            return timed(iterations, self._ping(into if what == "echo" else out, into), 2)
        return timed(
            windows(iterations, nbytes), self._window(out, into, window_of(nbytes)), window_of(nbytes)
        )

    def _ping(self, out: list[Any], into: list[Any]) -> Callable[[], None]:
        send, receive, other = self._world.Send, self._world.Recv, 1 - self.rank

        def first() -> None:
            send(out, other)
            receive(into, other)

        def second() -> None:
            receive(into, other)
            send(out, other)

        return second if self.rank else first

    def _window(self, out: list[Any], into: list[Any], window: int) -> Callable[[], None]:
        world, wait_all, other = self._world, self._mpi.Request.Waitall, 1 - self.rank
        answer = [np.ones(1, np.uint8), 1, self._mpi.BYTE]

        def sender() -> None:
            wait_all([world.Isend(out, other) for _ in range(window)])
            world.Recv(answer, other)

        def receiver() -> None:
            wait_all([world.Irecv(into, other) for _ in range(window)])
            world.Send(answer, other)

        return receiver if self.rank else sender


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    ranks = Ranks()
    serve(parser.parse_args().control, ranks.rank, ranks.measure)


if __name__ == "__main__":
    main()
