"""The ranks of `lab.gpu`'s collectives: arrays of their GPUs, beside the same operations of numpy's arrays.

    zbmd-node run --nproc-per-node 2 zbmd/tools/lab/gpu/ranks.py compare|between|time

Rank r computes on GPU r modulo those that are visible; CUDA_VISIBLE_DEVICES=0 puts all on one. Rank 0 prints
what came of it as a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import numpy as np
import uvloop
from numpy.typing import NDArray

from zbmd.actors.rank.member import join
from zbmd.collectives.group.group import Group, group
from zbmd.collectives.programs.reductions import dtypes
from zbmd.training.autograd.array_module import nccl, to_host, xp_for

Array: TypeAlias = NDArray[Any]
Put: TypeAlias = Callable[[Array], Any]
Look: TypeAlias = Callable[[Any], Array]
COUNTS: Final = (1, 1_003, 3_000_017)
NCCL_ID_BYTES: Final = 128
"""Of an ncclUniqueId."""
TIMED_BYTES: Final = 64 << 20
ROUNDS: Final = 20


def _values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.kind in "fcV":
        return draw.standard_normal(count).astype(dtype)
    return draw.integers(0, 2 if dtype.kind == "b" else 100, count).astype(dtype)


async def operations(group: Group, count: int, dtype: np.dtype[Any], put: Put) -> AsyncIterator[Any]:
    """The result of every operation over arrays that `put` places; None where a rank has none."""
    n, rank, root = group.size, group.rank, group.size - 1
    x, rows = _values(rank, count, dtype), _values(rank, count * n, dtype).reshape(n, count)
    for op in ("sum", "avg") if dtype.kind in "fcV" else ("sum", "min", "bxor"):
        yield await group.all_reduce(put(x), op=op)
        yield await group.all_reduce(put(x), out=put(np.zeros_like(x)), op=op)
    yield await group.reduce(put(x), root)
    yield await group.broadcast(put(x), root)
    yield await group.all_gather(put(x))
    yield await group.gather(put(x), root)
    if group.rank == root:
        yield await group.scatter(put(rows), root)
    else:
        yield await group.scatter(None, root, out=put(np.zeros_like(x)))
    yield await group.reduce_scatter(put(rows))
    yield await group.all_to_all(put(rows))
    yield await group.all_gather_v(put(x[: 1 + rank]))
    for each in await group.all_reduce_many([put(x), put(x[:1])]):
        yield each


async def compare(group: Group, put: Put, look: Look, known: Callable[[np.dtype[Any]], bool]) -> str:
    """Every operation and dtype on the device beside the host; raises `ValueError` on other bits."""
    compared, left_out = 0, [dtype.name for dtype in dtypes() if not known(dtype)]
    for dtype in dtypes():
        if dtype.name in left_out:
            continue
        for count in COUNTS if dtype.name in ("float32", "float16") else COUNTS[:-1]:
            wanted = [found async for found in operations(group, count, dtype, np.copy)]
            index = 0
            async for found in operations(group, count, dtype, put):
                here, index = wanted[index], index + 1
                compared += 1
                if (found is None) != (here is None) or (
                    found is not None and look(found).tobytes() != here.tobytes()
                ):
                    raise ValueError(f"result {index} of {count} {dtype.name} is not the host's")
    told = f"{compared} results of {len(dtypes()) - len(left_out)} dtypes have the bits of the host's"
    return told + (f"; this cupy has no {', '.join(left_out)}" if left_out else "")


async def compare_on_gpu(group: Group, xp: Any) -> str:
    """`compare` with cupy, arrays that are not contiguous, and a stream that is not the current one."""

    def known(dtype: np.dtype[Any]) -> bool:
        try:
            xp.empty(1, dtype)
        except (TypeError, ValueError):
            return False
        return True

    told = await compare(group, xp.asarray, to_host, known)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    turned = xp.asarray(rows).T
    await group.all_reduce(turned)
    if not np.array_equal(to_host(turned), rows.T * group.size):
        raise ValueError("an array that is not contiguous has another result")
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        slow = xp.zeros((2048, 2048), xp.float32) + 1
        for _ in range(20):
            slow = xp.minimum(slow @ slow, 1)
    await group.all_reduce(slow, stream=stream)
    if not bool((to_host(slow) == group.size).all()):
        raise ValueError("the stream that was named was not waited for")
    return told


async def compare_between_gpus(group: Group, xp: Any) -> str:
    """`compare_on_gpu`, once the devices read each other's memory. Raises `ValueError` if they do not."""
    paths = await group.connect_devices(xp.zeros(1))
    if not paths.direct:
        raise ValueError(f"the devices do not read each other's memory: {paths.reason}")
    return f"{paths.reason}; {await compare_on_gpu(group, xp)}"


async def _time_us(call: Callable[[], Awaitable[Any]], group: Group) -> float:
    spans: list[float] = []
    for _ in range(ROUNDS):
        await group.barrier()
        begin_ns = time.monotonic_ns()
        await call()
        spans.append((time.monotonic_ns() - begin_ns) / 1e3)
    return statistics.median(spans)


async def timed(group: Group, xp: Any, gpus: int) -> str:
    """An all-reduce of 64 MiB on devices, the same on the host, and NCCL's where each rank has a GPU."""
    x = xp.ones(TIMED_BYTES // 4, xp.float32)
    host = np.ones(TIMED_BYTES // 4, np.float32)
    staged_us = await _time_us(lambda: group.all_reduce(x, op="max"), group)
    host_us = await _time_us(lambda: group.all_reduce(host, op="max"), group)
    paths = await group.connect_devices(x)
    ours_us = await _time_us(lambda: group.all_reduce(x, op="max"), group) if paths.direct else staged_us
    bus = 2 * (group.size - 1) / group.size * TIMED_BYTES / 1e3
    told = (
        f"{paths.reason}: {ours_us:.0f} us ({bus / ours_us:.2f} GB/s bus), through the host "
        f"{staged_us:.0f} us, arrays of the host {host_us:.0f} us"
    )
    library: Any = nccl()
    if gpus < group.size:
        return f"{told}; NCCL takes no two ranks on one GPU"
    if library is None:
        return f"{told}; NCCL is not installed (pip install nvidia-nccl-cu12)"
    name = np.zeros(NCCL_ID_BYTES, np.int16)
    if group.rank == 0:
        name[:] = library.get_unique_id()
    await group.broadcast(name, 0)
    place = group.rank
    peer = library.NcclCommunicator(group.size, tuple(int(part) for part in name), place)
    stream = xp.cuda.Stream(non_blocking=True)

    async def theirs() -> None:
        where = x.data.ptr
        peer.allReduce(where, where, x.size, library.NCCL_FLOAT32, library.NCCL_MAX, stream.ptr)
        stream.synchronize()

    try:
        nccl_us = await _time_us(theirs, group)
    finally:
        peer.destroy()
    return f"{told}, NCCL {nccl_us:.0f} us: {ours_us / nccl_us:.2f} times its time (medians of {ROUNDS})"


async def main(what: str) -> None:
    """One rank."""
    xp: Any = xp_for("cuda")
    gpus = int(xp.cuda.runtime.getDeviceCount())
    async with join() as worker:
        xp.cuda.Device(worker.rank % gpus).use()
        made = await group(worker)
        try:
            run = {"compare": compare_on_gpu, "between": compare_between_gpus}.get(what)
            told = await (timed(made, xp, gpus) if run is None else run(made, xp))
            await made.barrier()
        finally:
            await made.close()
        if worker.rank == 0:
            print(json.dumps({"told": told}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
