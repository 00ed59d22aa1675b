"""Arrays of (modelled) devices in elastic groups and tagged messages, under real kills in every mode."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.devices.device_worlds import Strided, library, model_host, of_device, on_device
from support.jobs.elastic_job import LINES_MAX, ElasticJob
from support.jobs.elastic_rank import Kill

import zbmd
from zbmd.actors.view import Outcome
from zbmd.collectives.device.arrays import KERNELS, taken
from zbmd.collectives.device.host_copy import Landings
from zbmd.collectives.errors import OperationAborted
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import UserError
from zbmd.transport.memory.segment import Segment

F4, F8 = np.dtype("f4"), np.dtype("f8")


@pytest.fixture(autouse=True)
def _cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    library(KERNELS.source)  # before processes are forked


MODES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "preserve": ({"inputs": "preserve"}, {""}),
    "recompute": ({"inputs": "recompute"}, {"", "InputsOverwritten"}),
    "adopt": ({"inputs": "adopt"}, {""}),
    "wait": ({"inputs": "adopt", "on_loss": "wait_for_replacement"}, {""}),
    "abort": ({"inputs": "preserve", "on_loss": "abort"}, {"", "MembersLost"}),
}
POINTS: tuple[tuple[int, int], ...] = ((1, 0), (1, 3), (2, 1), (1, 6), (1, 9), (2, 3))


@pytest.mark.parametrize("mode", MODES)
async def test_reductions_of_arrays_on_devices_under_kills(tmp_path: Path, mode: str) -> None:
    arguments, errors = MODES[mode]
    kills: list[Kill] = [(k % 3, run, point) for k, (run, point) in enumerate(POINTS)]
    kills.append(None)
    job = ElasticJob(tmp_path, "device_sum.py", kills, {"algorithm": "direct", **arguments})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    deaths, ended = set[int](), set[str]()
    for k in range(1, len(kills) + 1):
        of, error = job.end_of(k)
        ended.add(error)
        deaths |= {k} if job.died_in(k) else set()
        total = k * sum(10.0**rank for rank in of)
        for found in job.told[k].values():
            assert error or found["value"][:3] == [total, total, True], found
            assert error or found["value"][3] <= 2, "page-locked memory of operations that are over"
        if mode in ("adopt", "wait") and not deaths & {k - 1}:
            assert of == (0, 1, 2), (k, of)
    assert len(deaths) > 3 and ended == errors, (deaths, ended, job.lines[-LINES_MAX:])


@pytest.mark.parametrize("inputs", ["preserve", "adopt"])
async def test_every_operation_takes_arrays_of_devices_and_gives_them(tmp_path: Path, inputs: str) -> None:
    kills: list[Kill] = [(k % 3, 1, (2, 5, 3)[k % 3]) for k in range(11)]
    job = ElasticJob(tmp_path, "device_rows.py", kills, {"inputs": inputs})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    deaths, names = set[int](), set[str]()
    for k in range(1, len(kills) + 1):
        of, error = job.end_of(k)
        deaths |= {k} if job.died_in(k) else set()
        if error:  # its root has died in it, or just behind the operation before
            assert error == "MembersLost" and deaths & {k - 1, k}, job.told[k]
            continue
        for found in job.told[k].values():
            assert found["value"][1:] == [True, True], (k, of, found)
            names.add(found["value"][0])
    assert len(deaths) > 5 and len(names) > 8, (deaths, names)


async def test_what_streams_were_asked_and_strides_and_threads() -> None:
    """Of a job of one: the order of streams, arrays that are not contiguous, calls of threads, the end."""
    process = model_host(seed=3).process()
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker)
        x = on_device(process, np.arange(6, dtype=np.float32))
        stream, event = process.stream_create(), process.event_create()
        process.event_record(event, process.default_stream)
        process.stream_wait_event(stream, event)
        assert (await group.all_reduce(x, stream=SimpleNamespace(ptr=stream))).value is x
        gathered = (await group.all_gather(x)).value
        assert of_device(gathered, F4).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
        turned = Strided(x, replace(x.span, shape=(3, 2), strides=(4, 12)))
        assert (await group.all_reduce(turned, op="sum")).value is turned
        assert of_device((await group.all_reduce(turned, inputs="preserve")).value, F4).tolist() == [
            [0.0, 3.0],
            [1.0, 4.0],
            [2.0, 5.0],
        ]
        nothing = on_device(process, np.zeros((0, 4), np.float32))
        assert (await group.all_reduce(nothing)).value is nothing
        (many,) = (await group.all_reduce_many([x])).value
        assert many is x
        blocking = group.blocking
        (many,) = (await asyncio.to_thread(blocking.all_reduce_many, [x])).value
        assert many is x
        assert (await asyncio.to_thread(blocking.broadcast, x, 0)).value is x
        with pytest.raises(UserError, match="read-only"):
            await group.all_reduce(Strided(x, replace(x.span, readonly=True)))
        with pytest.raises(UserError, match="SimpleNamespace"):
            await group.all_reduce(x, stream=SimpleNamespace())
        with pytest.raises(UserError, match="must have 6 elements"):
            await group.all_reduce(x, out=on_device(process, np.ones(5, np.float32)))
        assert of_device((await group.all_reduce(x)).value, F4)[5] == 5.0 and process.registered
        await group.close()
        assert not process.registered, "memory stays locked"


async def test_messages_take_arrays_of_devices_and_keep_their_order() -> None:
    process = model_host(seed=5).process()
    async with zbmd.join() as worker:
        for group in (await zbmd.elastic_group(worker), await zbmd.group(worker, channel=1)):
            sends = [
                asyncio.ensure_future(
                    group.send(on_device(process, np.full(n, k + 0.0)) if k % 2 else np.full(n, k + 0.0), 0)
                )
                for k, n in enumerate((3, 5, 20_000, 20_001, 4))
            ]
            for k, n in enumerate((3, 5, 20_000, 20_001, 4)):
                out = on_device(process, np.zeros(n)) if k < 4 else None
                got = await group.recv(0, out=out)
                assert out is None or got.array is out
                found = got.array if out is None else of_device(out, F8)
                assert found.tolist() == [k] * n
            await asyncio.gather(*sends)
            await asyncio.to_thread(group.blocking.send, on_device(process, np.ones(2)), 0, tag=4)
            small = on_device(process, np.zeros(1))
            with pytest.raises(UserError, match="must have"):
                await asyncio.to_thread(group.blocking.recv, out=small, tag=4)
            assert (await group.recv(tag=4)).array.tolist() == [1.0, 1.0]
            await group.close()
            with pytest.raises(OperationAborted):
                await group.send(small, 0)
            assert not process.registered


async def test_a_device_that_fails_ends_the_group_with_its_own_error() -> None:
    host = model_host()
    x = on_device(host.process(), np.ones(1000))
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker)
        await group.all_reduce(x)
        host.failed = CudaFault("the device has fallen off the bus")
        with pytest.raises(CudaFault, match="bus"):
            await group.all_reduce(x)
        with pytest.raises(OperationAborted, match="bus"):
            await group.barrier()
        await group.close()


def test_what_does_not_fit_the_arena_lands_beside_it() -> None:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=1 << 20, inbox_bytes=1 << 20)
    process = model_host().process()
    landings = Landings(segment)
    try:
        for n in (1000, 1 << 20, 1000):
            landing = landings.of(taken(on_device(process, np.ones(n))))
            assert landing is not None
            host, none = landing.land()
            assert none is None and host.sum() == n and len(process.registered) <= 3
            landing.end()
            del host
    finally:
        landings.close()
        segment.close()
    assert not process.registered


async def test_what_a_cancelled_call_was_given_is_not_written_any_more(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, "device_cancel.py", [None] * 4, world_size=2)
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    found = [by["value"] for told in job.told.values() for by in told.values()]
    assert len(found) == 4 and all(found), job.told
