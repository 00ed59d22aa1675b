"""Ranks of MPI at collectives, through mpi4py: `mpirun -n N python -m … --control NAME`.

Buffers are numpy arrays, given in mpi4py's fast form [buffer, count, datatype], and made once a size.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zbmd.tools.bench.peers.control import FOREIGN, elements, serve, timed


class Ranks:
    """This rank in the world."""

    def __init__(self) -> None:
        importlib.import_module("mpi4py").rc.thread_level = "single"  # MPI's quickest mode
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation."""
        operation = self._operation(what.removesuffix(FOREIGN), nbytes)
        self._world.Barrier()
        return timed(iterations, operation, 1)

    def _operation(self, what: str, nbytes: int) -> Callable[[], object]:
        count, block = elements(nbytes, self._world.size)
        mpi, world, whole = self._mpi, self._world, block * self._world.size

        def buffer(n: int) -> list[Any]:
            return [np.zeros(n, np.float32), n, mpi.FLOAT]

        root = self.rank == 0
        if what == "all-reduce":
            x = buffer(count)
            return lambda: world.Allreduce(mpi.IN_PLACE, x)
        if what in ("all-reduce-keep", "reduce"):
            x, out = buffer(count), buffer(count)
            if what == "reduce":
                return lambda: world.Reduce(x, out if root else None, root=0)
            return lambda: world.Allreduce(x, out)
        if what == "broadcast":
            x = buffer(count)
            return lambda: world.Bcast(x, root=0)
        large, small, other = buffer(whole), buffer(block), buffer(whole)
        blocks = [large[0], block, mpi.FLOAT]
        table: dict[str, Callable[[], object]] = {
            "reduce-scatter": lambda: world.Reduce_scatter_block(blocks, small),
            "all-gather": lambda: world.Allgather(small, blocks),
            "gather": lambda: world.Gather(small, blocks if root else None, root=0),
            "scatter": lambda: world.Scatter(blocks if root else None, small, root=0),
            "all-to-all": lambda: world.Alltoall(blocks, [other[0], block, mpi.FLOAT]),
        }
        return table[what]


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    arguments = parser.parse_args()
    ranks = Ranks()
    serve(arguments.control, ranks.rank, ranks.measure)


if __name__ == "__main__":
    main()
