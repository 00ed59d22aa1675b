"""Operations whose results differ by rank; argv: the operations that abort when a rank dies."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result

NAMES = ("reduce", "reduce_scatter", "gather", "scatter", "all_to_all", "all_gather")
UNTOUCHED = -1
ABORTED = {int(k) for k in sys.argv[1:]}


async def refused(call: Awaitable[Any]) -> None:
    try:
        await call
    except zbmd.UserError as error:
        assert "(3, 7)" in str(error) and "a row for each rank" in str(error), error
        return
    raise AssertionError("an out without a row for each rank was taken")


def rooms(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the input and an `out`, in which the input lies where it may."""
    match name:
        case "reduce":
            return x, x
        case "gather" | "all_gather":
            out = zbmd.from_array(np.full((3, *x.shape), UNTOUCHED))
            out[1] = x
            return out[1], out
        case "all_to_all":
            return x, np.asfortranarray(np.full(x.shape, UNTOUCHED))
        case _:
            return x, None


def rows_of(r: int, k: int, length: int) -> np.ndarray:
    """Return what rank r gives: row d holds 100^k' of r and d, so a row names its sender and its receiver."""
    return np.array([[(10 * r + d) * 100 + k] * length for d in range(3)], np.int64)


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    name = NAMES[(k - 1) % len(NAMES)]
    root = k % 3
    length = (7, 3000)[(k - 1) // len(NAMES) % 2]  # every other time what is long goes to an `out`
    x, out = zbmd.from_array(rows_of(rank, k, length)), None
    if length > 7:
        x, out = rooms(name, x)
    elif k == 5:  # harms nothing
        await refused(group.all_to_all(x, out=np.zeros((2, 7), np.int64)))
    before = None if out is None else out.copy()
    wanted: dict[str, Any] = {"timeout": 60} | ({} if name == "scatter" else MODE)
    if out is not None:
        wanted["out"] = out
    if k in ABORTED:
        wanted["on_loss"] = "abort"
    try:
        match name:
            case "reduce" | "gather":
                done = await getattr(group, name)(x, root, **wanted)
            case "scatter":
                place = None if rank == root else np.zeros(length, np.int64)
                done = await group.scatter(x if rank == root else None, root, out=place, **wanted)
            case _:
                done = await getattr(group, name)(x, **wanted)
    except zbmd.PeerLost:
        assert out is None or before is None or np.array_equal(out, before), (
            "an operation that failed has written"
        )
        raise
    rows = {r: rows_of(r, k, length) for r in range(3)}
    of = [rows[r] for r in done.contributors]
    expected = {
        "reduce": lambda: np.sum(of, axis=0) if rank == root else None,
        "reduce_scatter": lambda: np.sum(of, axis=0)[rank],
        "gather": lambda: np.stack(of) if rank == root else None,
        "scatter": lambda: rows[root][rank],
        "all_to_all": lambda: np.stack([row[rank] for row in of]),
        "all_gather": lambda: np.stack(of),
    }[name]()
    right = done.value is None if expected is None else np.array_equal(done.value, expected)
    if out is not None and before is not None:
        n = 0 if expected is None else len(expected)
        right &= np.array_equal(out[n:], before[n:]) and (n == 0 or np.shares_memory(done.value, out))
    return done, [name, bool(right)]


if __name__ == "__main__":
    run_operations(operate)
