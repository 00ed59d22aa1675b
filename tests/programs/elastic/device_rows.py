"""Each operation on arrays of a modelled device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from support.devices.cuda_model import ModelArray
from support.devices.device_rank import device, look
from support.devices.device_worlds import on_device
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result

NAMES = (
    *("reduce", "gather", "all_gather", "all_to_all", "reduce_scatter", "scatter", "broadcast", "many"),
    *("all_gather_v", "reduce_scatter_v", "all_to_all_v"),
)
CUTS = ((0, 2), (2, 2), (2, 3))
"""Of reduce_scatter_v, by rank."""


def rows_of(r: int, k: int) -> np.ndarray:
    return np.array([[(10 * r + d) * 100 + k] * 700 for d in range(3)], np.int64)


def put(values: np.ndarray) -> ModelArray:
    return on_device(device(), values)


def read(x: Any) -> np.ndarray:
    return look(x, np.int64)


def expected_of(name: str, of: list[np.ndarray], rank: int, root: int, k: int) -> np.ndarray | None:
    """Return the result of the contributors' rows at `rank`."""
    match name:
        case "reduce":
            return np.sum(of, axis=0) if rank == root else None
        case "gather":
            return np.stack(of) if rank == root else None
        case "all_gather":
            return np.stack(of)
        case "all_to_all" | "all_to_all_v":
            return np.stack([row[rank] for row in of])
        case "reduce_scatter":
            return np.sum(of, axis=0)[rank]
        case "scatter":
            return rows_of(root, k)[rank]
        case "broadcast":
            return rows_of(root, k)
        case "many":
            return np.sum(of, axis=0)
        case "all_gather_v":
            return np.concatenate(of)
        case _:
            begin, end = CUTS[rank]
            return np.sum(of, axis=0)[begin:end]


async def many(group: zbmd.ElasticGroup, x: ModelArray, k: int, mode: dict[str, Any]) -> Result:
    given = [x, rows_of(group.rank, k)[1], put(rows_of(group.rank, k)[0])]
    done = await group.all_reduce_many(given, **mode)
    assert isinstance(done.value[1], np.ndarray) and isinstance(done.value[2], ModelArray)
    assert np.array_equal(read(x), rows_of(group.rank, k))
    done, rest = replace(done, value=done.value[0]), done.value[1:]
    sums = np.sum([rows_of(r, k) for r in done.contributors], axis=0)
    assert np.array_equal(rest[0], sums[1]) and np.array_equal(read(rest[1]), sums[0])
    return done


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    name, root = NAMES[(k - 1) % len(NAMES)], k % 3
    x = put(rows_of(rank, k))
    mode: dict[str, Any] = {"timeout": 60} | MODE
    match name:
        case "reduce":
            done = await group.reduce(x, root, out=x, **mode)
            assert done.value is (x if rank == root else None)
        case "gather":
            done = await group.gather(x, root, **mode)
        case "all_gather":
            out = put(np.full((3, 3, 700), -1))
            done = await group.all_gather(x, out=out, **mode)
            n = len(done.contributors)
            assert (read(out)[n:] == -1).all() and np.array_equal(read(out)[:n], read(done.value))
        case "all_to_all":
            done = await group.all_to_all(x, **mode)
        case "reduce_scatter":
            out = put(np.zeros(700, np.int64)) if rank else None
            done = await group.reduce_scatter(x, out=out, **mode)
            assert out is None or done.value is out
        case "scatter":
            out = None if rank == root else put(np.zeros(700, np.int64))
            done = await group.scatter(x if rank == root else None, root, out=out, timeout=60)
        case "broadcast":
            done = await group.broadcast(x, root, timeout=60)
            assert done.value is x
        case "many":
            done = await many(group, x, k, mode)
        case "all_gather_v":
            done = await group.all_gather_v(x, **mode)
        case "reduce_scatter_v":
            done = await group.reduce_scatter_v(x, [2, 0, 1], **mode)
        case _:
            done = await group.all_to_all_v(x, [1, 1, 1], [1, 1, 1], **mode)
    expected = expected_of(name, [rows_of(r, k) for r in done.contributors], rank, root, k)
    on_it = done.value is None or hasattr(done.value, "span")
    right = (done.value is None) if expected is None else np.array_equal(read(done.value), expected)
    return done, [name, bool(right), on_it]


if __name__ == "__main__":
    run_operations(operate)
