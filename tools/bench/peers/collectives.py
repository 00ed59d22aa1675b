"""One rank of a peer at collectives: `python -m zbmd.tools.bench.peers.collectives PEER --control NAME …`.

gloo takes its rank, the number of ranks and the file of its store; MPI gives its processes their ranks.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any, Final

from zbmd.tools.bench.peers.control import CPU, FOREIGN, Measure, elements, measured, serve


def written_zeros(*shape: int) -> Any:
    """Return an array of float32 zeros in memory of its own.

    Of np.zeros, an array that is only read is the kernel's one page of zeros over and over, which stays in
    the nearest cache: what is timed then is half a copy.
    """
    np: Any = importlib.import_module("numpy")
    made = np.empty(shape, "float32")
    made.fill(0)
    return made


Operations = Callable[[str, int], Callable[[], object]]
"""Makes the operation of a case, with buffers for so many bytes."""


def gloo(arguments: argparse.Namespace) -> tuple[int, Operations, Callable[[], object]]:
    """Through torch.distributed."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, ranks = arguments.rank, arguments.ranks
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=ranks)

    def operation(what: str, nbytes: int) -> Callable[[], object]:
        count, block = elements(nbytes, ranks)
        zeros, root = torch.zeros, rank == 0
        x, large, small = zeros(count), zeros(ranks, block), zeros(block)
        rows, flat, other = list(large.unbind()), large.view(-1), zeros(ranks, block)
        table: dict[str, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(x),
            "all-reduce-keep": lambda: dist.all_reduce(x.clone()),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(small, flat),
            "all-gather": lambda: dist.all_gather_into_tensor(flat, small),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "gather": lambda: dist.gather(small, rows if root else None, 0),
            "scatter": lambda: dist.scatter(small, rows if root else None, 0),
            "all-to-all": lambda: dist.all_to_all_single(other, large),
        }
        return table[what]

    return rank, operation, dist.barrier


def mpi(_: argparse.Namespace) -> tuple[int, Operations, Callable[[], object]]:
    """Through mpi4py, with numpy arrays in its fast form [buffer, count, datatype], made once a size."""
    importlib.import_module("mpi4py").rc.thread_level = "single"  # MPI's quickest mode
    mpi4py: Any = importlib.import_module("mpi4py.MPI")
    world = mpi4py.COMM_WORLD

    def buffer(n: int) -> list[Any]:
        return [written_zeros(n), n, mpi4py.FLOAT]

    def operation(what: str, nbytes: int) -> Callable[[], object]:
        count, block = elements(nbytes, world.size)
        root = world.rank == 0
        if what in ("all-reduce", "all-reduce-keep", "reduce", "broadcast"):
            x, out = buffer(count), buffer(0 if what in ("all-reduce", "broadcast") else count)
            of_one: dict[str, Callable[[], object]] = {
                "all-reduce": lambda: world.Allreduce(mpi4py.IN_PLACE, x),
                "all-reduce-keep": lambda: world.Allreduce(x, out),
                "reduce": lambda: world.Reduce(x, out if root else None, root=0),
                "broadcast": lambda: world.Bcast(x, root=0),
            }
            return of_one[what]
        large, small, other = (buffer(n) for n in (block * world.size, block, block * world.size))
        blocks = [large[0], block, mpi4py.FLOAT]
        table: dict[str, Callable[[], object]] = {
            "reduce-scatter": lambda: world.Reduce_scatter_block(blocks, small),
            "all-gather": lambda: world.Allgather(small, blocks),
            "gather": lambda: world.Gather(small, blocks if root else None, root=0),
            "scatter": lambda: world.Scatter(blocks if root else None, small, root=0),
            "all-to-all": lambda: world.Alltoall(blocks, [other[0], block, mpi4py.FLOAT]),
        }
        return table[what]

    return world.rank, operation, world.Barrier


PEERS: Final = {"gloo": gloo, "mpi4py": mpi}


def measurer(operation: Operations, barrier: Callable[[], object]) -> Measure:
    """Times an operation after a barrier; nanoseconds."""

    def measure(what: str, nbytes: int, iterations: int) -> list[float]:
        timed = operation(what.removeprefix(CPU).removesuffix(FOREIGN), nbytes)
        barrier()
        return measured(what, iterations, timed)

    return measure


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--store", default="")
    arguments = parser.parse_args()
    rank, operation, barrier = PEERS[arguments.peer](arguments)
    serve(arguments.control, rank, measurer(operation, barrier))


if __name__ == "__main__":
    main()
