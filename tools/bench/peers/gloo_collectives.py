"""One rank of gloo at collectives, through torch.distributed: `… --control NAME --rank R --ranks N --store
FILE`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from zbmd.tools.bench.peers.control import CPU, FOREIGN, elements, measured, serve


class Ranks:
    """This rank in the world."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self._rank, self._ranks = rank, ranks

    def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation."""
        operation = self._operation(what.removeprefix(CPU).removesuffix(FOREIGN), nbytes)
        self._dist.barrier()
        return measured(what, iterations, operation)

    def _operation(self, what: str, nbytes: int) -> Callable[[], object]:
        count, block = elements(nbytes, self._ranks)
        dist, zeros, root = self._dist, self._torch.zeros, self._rank == 0
        x, large, small = zeros(count), zeros(self._ranks, block), zeros(block)
        rows, flat, other = list(large.unbind()), large.view(-1), zeros(self._ranks, block)

        def keep() -> None:
            dist.all_reduce(x.clone())

        table: dict[str, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(x),
            "all-reduce-keep": keep,
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(small, flat),
            "all-gather": lambda: dist.all_gather_into_tensor(flat, small),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "gather": lambda: dist.gather(small, rows if root else None, 0),
            "scatter": lambda: dist.scatter(small, rows if root else None, 0),
            "all-to-all": lambda: dist.all_to_all_single(other, large),
        }
        return table[what]


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    ranks = Ranks(arguments.rank, arguments.ranks, arguments.store)
    serve(arguments.control, arguments.rank, ranks.measure)


if __name__ == "__main__":
    main()
