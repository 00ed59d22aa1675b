"""Collectives of arrays on (modelled) devices, against the same collectives of numpy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.devices.device_worlds import Strided, library, model_host, of_device, on_device

import zbmd
from zbmd.collectives.algorithms.shard_tree import shard_tree_nodes
from zbmd.collectives.device.arrays import KERNELS
from zbmd.collectives.device.host_copy import BLOCKS_MAX
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.programs.reductions import dtypes
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import UserError

RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
COUNTS = (1, 63, 1_003, 70_003)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """Before processes are forked."""
    library(KERNELS.source)


def values(rank: int, count: int, dtype: np.dtype[Any], shape: tuple[int, ...] = (-1,)) -> Array:
    draw = np.random.default_rng([rank, count])
    if dtype.kind in "fcV":
        return draw.standard_normal(count).astype(dtype).reshape(shape)
    return draw.integers(0, 2 if dtype.kind == "b" else 100, count).astype(dtype).reshape(shape)


def run_all(c: Any, n: int, count: int, dtype: np.dtype[Any], put: Any, look: Any, soon: Any) -> list[bytes]:
    """Every operation over arrays that `put` places, and what came of each."""
    found: list[bytes] = []

    def keep(array: Any) -> None:
        found.append(b"" if array is None else look(array, dtype).tobytes())

    rank, root = c.rank, n - 1
    x, rows = values(rank, count, dtype), values(rank, count * n, dtype, (n, count))
    for algorithm in ("auto", "direct", "ring"):
        given = put(x)
        assert c.all_reduce(given, algorithm=algorithm, deadline_ns=soon()) is given
        keep(given)
        out = put(np.zeros_like(x))
        keep(c.all_reduce(put(x), out, op="max" if dtype.kind not in "c" else "prod", algorithm=algorithm))
    if dtype.kind in "fVc":
        keep(c.all_reduce(put(x), op="avg"))
    keep(c.reduce(put(x), root))
    keep(c.broadcast(put(x), root))
    keep(c.all_gather(put(x)))
    keep(c.gather(put(x), root))
    keep(c.scatter(put(rows), root) if rank == root else c.scatter(None, root, put(np.zeros_like(x))))
    keep(c.reduce_scatter(put(rows)))
    keep(c.all_to_all(put(rows)))
    shares = [count - n + 1] + [1] * (n - 1)
    if count >= n:
        keep(c.reduce_scatter_v(put(x), shares))
    keep(c.all_gather_v(put(x[: 1 + rank])))
    keep(c.all_to_all_v(put(x[:1].repeat(n)), [1] * n, [1] * n))
    many = [put(x), put(x[:1]), put(x[: count // 2 + 1])]
    for each in c.all_reduce_many(many):
        keep(each)
    return found


@pytest.mark.parametrize(("n", "over_hosts"), [(1, False), (2, False), (3, False), (2, True)])
def test_operations_on_devices_have_the_bits_of_the_hosts(
    run_ranks: RunRanks, n: int, over_hosts: bool
) -> None:
    def body(p: Any) -> None:
        host = model_host(seed=p.rank)
        process = host.process()
        c = p.communicator()
        some = [each for each in dtypes() if each.name in ("float16", "bfloat16", "bool", "float32")]
        for count in COUNTS:
            for dtype in dtypes() if count == COUNTS[1] else some:
                wanted = run_all(c, n, count, dtype, np.copy, lambda x, _: x, p.soon)
                found = run_all(c, n, count, dtype, lambda x: on_device(process, x), of_device, p.soon)
                assert found == wanted, (count, dtype)
        c.close()
        assert not process.registered, "memory stays locked"
        host.drain()

    run_ranks(n, body, hosts=list(range(n)) if over_hosts else None)


@pytest.mark.parametrize("over_hosts", [False, True])
def test_logical_shards_on_devices_have_the_bits_of_the_hosts(run_ranks: RunRanks, over_hosts: bool) -> None:
    """One partial sum has strides, and one lies on the host."""

    def body(p: Any) -> None:
        process = model_host(seed=p.rank).process()
        c = p.communicator()
        shards, assignment = 23, ((0, 1), (1, 22), (22, 23))
        nodes = shard_tree_nodes(shards, *assignment[p.rank])
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            for count in (7, 70_004):
                host = {node: values(k + 100 * p.rank, count, dtype) for k, node in enumerate(nodes)}
                partials: dict[Any, Any] = {node: on_device(process, x) for node, x in host.items()}
                even = on_device(process, np.repeat(host[nodes[0]], 2))
                span = replace(even.span, shape=(count,), strides=(2 * dtype.itemsize,))
                partials[nodes[0]] = Strided(even, span)
                partials[nodes[-1]] = host[nodes[-1]] if p.rank == 1 else partials[nodes[-1]]
                wanted = c.all_reduce_shards(
                    host, np.zeros(count, dtype), shards=shards, assignment=assignment, deadline_ns=p.soon()
                )
                out = on_device(process, np.zeros(count, dtype))
                found = c.all_reduce_shards(
                    partials, out, shards=shards, assignment=assignment, deadline_ns=p.soon()
                )
                assert found is out and of_device(out, dtype).tobytes() == wanted.tobytes()
                assert len(process.registered) <= BLOCKS_MAX
        c.close()
        assert not process.registered, "memory stays locked"

    run_ranks(3, body, hosts=[0, 1, 2] if over_hosts else None)


def test_a_member_with_an_array_on_a_device_meets_one_with_an_array_of_the_host(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        process = model_host().process()
        c = p.communicator()
        x = values(p.rank, 70_003, np.dtype(np.float32))
        if p.rank == 1:
            there = on_device(process, x)
            c.all_reduce(there, deadline_ns=p.soon())
            return of_device(there, x.dtype).tobytes().hex()
        return c.all_reduce(x, deadline_ns=p.soon()).tobytes().hex()

    first, second = run_ranks(2, body)
    assert first == second


def test_arrays_with_strides_are_packed_and_unpacked(run_ranks: RunRanks) -> None:
    """A transposed one that is reduced in place, and every second element of one that is written."""

    def body(p: Any) -> None:
        process = model_host(seed=p.rank).process()
        c = p.communicator()
        inputs = [values(rank, 35, np.dtype(np.float32), (5, 7)) for rank in range(2)]
        base = on_device(process, inputs[p.rank])
        turned = Strided(base, replace(base.span, shape=(7, 5), strides=(4, 28)))
        c.all_reduce(turned, deadline_ns=p.soon())
        assert (of_device(base, inputs[0].dtype) == inputs[0] + inputs[1]).all()
        whole = on_device(process, np.zeros((2, 70), np.float32))
        second = Strided(
            whole,
            replace(whole.span, shape=(2, 35), strides=(280, -8), address=whole.span.address + 68 * 4),
        )
        c.all_gather(on_device(process, inputs[p.rank].reshape(-1)), second)
        found = of_device(whole, inputs[0].dtype)
        assert (found[:, 68::-2] == np.stack(inputs).reshape(2, 35)).all()
        assert (found[:, 1::2] == 0).all()

    run_ranks(2, body)


def test_a_device_that_fails_ends_the_operation_of_all(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        host = model_host()
        process = host.process()
        c = p.communicator()
        there = on_device(process, np.ones(1000, np.float32))
        c.all_reduce(there, deadline_ns=p.soon())
        if p.rank == 1:
            host.failed = CudaFault("the device has fallen off the bus")
        with pytest.raises((CudaFault, OperationAborted)) as caught:
            c.all_reduce(there, deadline_ns=p.soon())
        c.close()
        return type(caught.value).__name__

    assert run_ranks(2, body) == ["OperationAborted", "CudaFault"]


def test_a_member_that_dies_is_told_and_memory_is_unlocked(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        process = model_host().process()
        c = p.communicator()
        there = on_device(process, np.ones(100_000, np.float32))
        if p.rank == 1:
            c.kill_at(1, 2)
        with pytest.raises(MembersLost):
            c.all_reduce(there, deadline_ns=p.soon())
        c.close()
        assert not process.registered

    run_ranks(2, body, dies=frozenset((1,)))


def test_what_cannot_be_used_is_told(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        process = model_host().process()
        c = p.communicator()
        x = on_device(process, np.ones(8, np.float32))
        with pytest.raises(UserError, match="read-only"):
            c.all_reduce(Strided(x, replace(x.span, readonly=True)))
        with pytest.raises(UserError, match="stream"):
            c.all_reduce(Strided(x, replace(x.span, stream=2)))
        with pytest.raises(UserError, match="must have 8 elements"):
            c.all_reduce(x, on_device(process, np.ones(7, np.float32)))
        with pytest.raises(UserError, match="overlap"):
            c.all_reduce(x, Strided(x, x.span))
        assert of_device(c.all_reduce(x), np.dtype(np.float32)).tolist() == [1.0] * 8

    run_ranks(1, body)


async def test_a_group_takes_an_array_as_it_is_when_it_is_called() -> None:
    """Work queued on the stream after the call is not in the result; results lie on the device, too."""
    process = model_host().process()
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        x = on_device(process, np.arange(6, dtype=np.float32))
        stream, event = process.stream_create(), process.event_create()
        process.event_record(event, process.default_stream)
        process.stream_wait_event(stream, event)
        assert await group.all_reduce(x, stream=SimpleNamespace(ptr=stream)) is x
        gathered = await group.all_gather(x)
        assert of_device(gathered, np.dtype(np.float32)).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
        assert (await group.all_reduce_many([x]))[0] is x
        assert group.blocking.all_reduce(x) is x and group.blocking.broadcast(x, 0) is x
        with pytest.raises(UserError, match="SimpleNamespace"):
            await group.all_reduce(x, stream=SimpleNamespace())
        await group.close()
        assert not process.registered
