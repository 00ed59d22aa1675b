"""What collectives are timed at, alike for everyone: float32, sums, and a barrier before each measurement.

The size of a case is the bytes of a rank's largest array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zbmd.tools.bench.peers.patterns import busy, timed

ITEM_BYTES: Final = 4
CASES: Final = {
    "all-reduce": "all-reduce in place",
    "all-reduce-keep": "all-reduce that keeps its inputs",
    "all-reduce-foreign": "all-reduce in place, of ordinary arrays",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "broadcast": "broadcast in place",
    "reduce": "reduce to rank 0",
    "gather": "gather to rank 0",
    "scatter": "scatter from rank 0",
    "all-to-all": "all-to-all",
}
"""The cases and what they are; only ours tells arrays in shared memory from ordinary ones."""
FOREIGN: Final = "-foreign"
"""Behind a case: of ordinary arrays."""
CASES_FOREIGN: Final = {
    f"{case}{FOREIGN}": f"{text}, of ordinary arrays"
    for case, text in CASES.items()
    if not case.startswith("all-reduce")
}
"""More cases, which run when they are asked for."""


MODEL: Final = "model"
"""No case: what the group has measured of its link as it was made."""
CPU: Final = "cpu-"
"""Before a case: not its time but the CPU that it takes a rank."""


def measured(what: str, iterations: int, operation: Callable[[], object]) -> list[float]:
    """Nanoseconds of `operation`, of CPU if `what` says so."""
    return busy(iterations, operation) if what.startswith(CPU) else timed(iterations, operation, 1)


def bus_factor(case: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it (its PERFORMANCE.md)."""
    if case.startswith("all-reduce"):
        return 2 * (ranks - 1) / ranks
    if case.removesuffix(FOREIGN) in ("broadcast", "reduce"):
        return 1.0
    return (ranks - 1) / ranks


def elements(nbytes: int, ranks: int) -> tuple[int, int]:
    """(of the largest array, of a block of it); at least one a block."""
    block = max(1, nbytes // ITEM_BYTES // ranks)
    return max(1, nbytes // ITEM_BYTES), block
