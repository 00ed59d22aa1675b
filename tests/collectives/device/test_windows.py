"""Devices that read each other's memory: every operation, the same bits as the host's, and no race."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.devices.cuda_model import DeviceRace
from support.devices.cuda_model_timing import BYTES_PER_NS, KERNEL_NS
from support.devices.device_threads import ThreadRank, run_threads
from support.devices.device_worlds import model_host, of_device, on_device
from support.reductions import reductions_of

from zbmd.collectives.device import windows
from zbmd.collectives.device.folds import fold_kernels, fold_name
from zbmd.collectives.device.staged_calls import DeviceLate
from zbmd.collectives.device.windows import DevicePaths, WindowOffer, decode_offer, encode_offer
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.programs.reductions import dtype_code, dtypes, reduction_code
from zbmd.training.ops.cuda.compiler import Compiler
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.native._native import now_ns

Array = NDArray[Any]
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "POOL", windows.WindowPool())
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 20)


def values(rank: int, count: int, dtype: np.dtype[Any], rows: int = 0) -> Array:
    draw = np.random.default_rng([rank, count])
    size = count * max(1, rows)
    if dtype.kind in "fcV":
        found = draw.standard_normal(size).astype(dtype)
        if dtype.kind == "f" and count > 8:
            found[rank], found[5], found[6] = np.nan, np.inf, 0.0
    else:
        found = draw.integers(0, 2 if dtype.kind == "b" else 100, size).astype(dtype)
    return found.reshape((rows, count) if rows else -1)


def every_operation(
    c: Any, count: int, dtype: np.dtype[Any], put: Any, look: Any, end_ns: int
) -> list[bytes]:
    """The result of each, by the host's algorithm that folds the ranks in their order."""
    found: list[bytes] = []

    def keep(array: Any) -> None:
        found.append(b"" if array is None else look(array, dtype).tobytes())

    root = c.size - 1
    x, rows = values(c.rank, count, dtype), values(c.rank, count, dtype, c.size)
    for op in reductions_of(dtype):
        how: dict[str, Any] = {"op": op, "algorithm": "direct", "deadline_ns": end_ns}
        keep(c.all_reduce(put(x), **how))
        keep(c.reduce_scatter(put(rows), **how))
    keep(c.all_reduce(put(x), put(np.zeros_like(x)), algorithm="direct", deadline_ns=end_ns))
    keep(c.reduce(put(x), root, algorithm="direct", deadline_ns=end_ns))
    keep(c.broadcast(put(x), root, deadline_ns=end_ns))
    keep(c.all_gather(put(x), deadline_ns=end_ns))
    keep(c.gather(put(x), root, deadline_ns=end_ns))
    out = put(np.zeros_like(x))
    keep(c.scatter(put(rows) if c.place == root else None, root, out, deadline_ns=end_ns))
    keep(c.all_to_all(put(rows), deadline_ns=end_ns))
    keep(c.all_gather_v(put(x[: 1 + c.rank]), deadline_ns=end_ns))
    for each in c.all_reduce_many([put(x), put(x[:1])], deadline_ns=end_ns):
        keep(each)
    return found


def connected(p: ThreadRank, **named: int) -> Any:
    c = p.communicator(**named)
    paths = c.connect_devices(on_device(p.process, np.zeros(1)), deadline_ns=p.soon())
    assert paths.direct, paths.reason
    return c


@pytest.mark.parametrize(("n", "devices"), [(2, 1), (3, 3), (4, 2)])
def test_operations_between_devices_have_the_bits_of_the_host(n: int, devices: int) -> None:
    host = model_host(devices=devices, seed=n)

    def body(p: ThreadRank) -> set[str]:
        c = connected(p)
        for count in (1, 63):
            for dtype in dtypes() if count == 63 and n == 3 else [FLOAT32, np.dtype(np.float16)]:
                wanted = every_operation(c, count, dtype, np.copy, lambda x, _: x, p.soon())
                put: Callable[[Array], Any] = lambda x: on_device(p.process, x)  # noqa: E731
                assert every_operation(c, count, dtype, put, of_device, p.soon()) == wanted, (count, dtype)
        ways = {record.algorithm for record in c.flight}
        p.close(c)
        return ways

    with np.errstate(all="ignore"):
        for ways in run_threads(host, n, body):
            assert "devices" in ways
    host.drain()


@pytest.mark.parametrize("kinds", ["reduce", "move"])
def test_a_large_operation_goes_by_pieces(monkeypatch: pytest.MonkeyPatch, kinds: str) -> None:
    """Each half of a window is loaded many times, in one operation after the other, without a race."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 13)
    host, n, count = model_host(devices=3, seed=1), 3, 2_003

    def body(p: ThreadRank) -> None:
        c = connected(p)
        given, rows = values(p.rank, count, FLOAT32), values(p.rank, count, FLOAT32, n)
        all_x = [values(rank, count, FLOAT32) for rank in range(n)]
        all_rows = [values(rank, count, FLOAT32, n) for rank in range(n)]
        for _ in range(3):
            x, y = on_device(p.process, given), on_device(p.process, rows)
            if kinds == "reduce":
                summed = (all_x[0] + all_x[1]) + all_x[2]
                found = of_device(c.all_reduce(x, deadline_ns=p.soon()), FLOAT32)
                assert found.tobytes() == summed.tobytes()
                whole = (all_rows[0] + all_rows[1]) + all_rows[2]
                found = of_device(c.reduce_scatter(y, deadline_ns=p.soon()), FLOAT32)
                assert found.tobytes() == whole[p.rank].tobytes()
            else:
                found = of_device(c.all_gather(x, deadline_ns=p.soon()), FLOAT32)
                assert found.tobytes() == np.stack(all_x).tobytes()
                found = of_device(c.all_to_all(y, deadline_ns=p.soon()), FLOAT32)
                assert found.tobytes() == np.stack([each[p.rank] for each in all_rows]).tobytes()
        p.close(c)

    run_threads(host, n, body)
    host.drain()


def test_a_rank_that_does_not_wait_for_its_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait before a meeting the model finds a race."""
    monkeypatch.setattr(windows, "wait_for_event", lambda *_, **__: None)
    host = model_host(devices=2, seed=2)

    def body(p: ThreadRank) -> Any:
        c = connected(p)
        x = on_device(p.process, values(p.rank, 1_003, FLOAT32))
        c.all_reduce(x, deadline_ns=p.soon())
        return c, x

    with pytest.raises(DeviceRace):
        _kept = run_threads(host, 2, body)
        host.drain()


def staged(p: ThreadRank, x: Any) -> DevicePaths:
    """Connect a group whose devices do not reach each other: its operations are the host's."""
    c = p.communicator()
    paths = c.connect_devices(x, deadline_ns=p.soon())
    total = c.all_reduce(on_device(p.process, np.full(5, p.rank + 1.0)), deadline_ns=p.soon())
    assert of_device(total, np.dtype(np.float64)).tolist() == [3.0] * 5
    assert "devices" not in {record.algorithm for record in c.flight}
    p.close(c)
    return paths


def test_devices_that_do_not_reach_each_other_stay_with_the_host() -> None:
    host = model_host(devices=2)
    host.peer_access = False
    found = run_threads(host, 2, lambda p: staged(p, on_device(p.process, np.zeros(1))))
    assert len(set(found)) == 1 and not found[0].direct
    assert (
        "rank 0: rank 1 is out of its reach: 0000:01:00.0 does not reach 0000:02:00.0 by itself"
        in found[0].reason
    )


def test_a_member_without_a_device_keeps_all_with_the_host() -> None:
    host = model_host(devices=2)
    found = run_threads(
        host, 2, lambda p: staged(p, np.zeros(1) if p.rank else on_device(p.process, np.zeros(1)))
    )
    assert found[0] == found[1] == DevicePaths(False, "rank 1: it has passed an array of the host")


def test_windows_that_cannot_be_had_keep_all_with_the_host() -> None:
    """And those that could are taken by the next group that can."""
    host = model_host(devices=2)

    def body(p: ThreadRank) -> tuple[bool, str]:
        x = on_device(p.process, np.zeros(1))
        first, second = p.communicator(), p.communicator(channel=1)
        if p.rank == 1:
            host.memory_bytes = 0
        found = first.connect_devices(x, deadline_ns=p.soon())
        host.memory_bytes = 1 << 34
        second.barrier()
        again = second.connect_devices(x, deadline_ns=p.soon())
        p.close(first, second)
        return found.direct or not again.direct, found.reason

    for wrong, reason in run_threads(host, 2, body):
        assert not wrong and "its window cannot be offered: out of memory" in reason


def test_a_later_group_takes_the_windows_of_a_closed_one() -> None:
    host = model_host(devices=2)

    def body(p: ThreadRank) -> int:
        for epoch in range(1, 5):
            c = connected(p, epoch=epoch)
            c.all_reduce(on_device(p.process, np.ones(9)), deadline_ns=p.soon())
            p.close(c)
        return sum(each.data.nbytes == windows.WINDOW_BYTES for each in host.allocations.values())

    assert run_threads(host, 2, body) == [2, 2]


@pytest.mark.parametrize("other", ["host", "operation", "size"])
def test_other_calls_of_other_members_are_told(other: str) -> None:
    host = model_host(devices=2)

    def body(p: ThreadRank) -> str:
        c = connected(p)
        x: Any = on_device(p.process, np.ones(70_000 + (p.rank if other == "size" else 0)))
        try:
            if p.rank and other == "host":
                c.all_reduce(np.ones(70_000), deadline_ns=p.soon())
            elif p.rank and other == "operation":
                c.broadcast(x, 0, deadline_ns=p.soon())
            else:
                c.all_reduce(x, deadline_ns=p.soon())
        except Desynchronised as error:
            return str(error)
        finally:
            c.close()
        return ""

    for told in run_threads(host, 2, body):
        assert "every rank must make the same calls" in told and "all_reduce(float64[70000]" in told


def test_a_member_that_gives_up_ends_the_operation_of_the_others() -> None:
    host = model_host(devices=2)

    def body(p: ThreadRank) -> None:
        c = connected(p)
        if p.rank:
            c.give_up("it has had enough")
        else:
            with pytest.raises(OperationAborted):
                c.all_reduce(on_device(p.process, np.ones(9)), deadline_ns=p.soon())
        c.close()

    run_threads(host, 2, body)
    host.drain()


def test_a_device_that_does_not_come_in_time_ends_the_operation() -> None:
    host, released = model_host(devices=2), threading.Barrier(2)

    def body(p: ThreadRank) -> None:
        c, x = connected(p), on_device(p.process, np.ones(9))
        if p.rank:
            event = p.process.event_create()
            never = p.process.stream_create()
            gate = np.zeros(1, np.uint32)
            p.process.stream_wait_value(never, gate.ctypes.data, 1)
            p.process.event_record(event, never)
            p.process.stream_wait_event(p.process.default_stream, event)
            with pytest.raises(DeviceLate):
                c.all_reduce(x, deadline_ns=now_ns() + 20_000_000)
            gate[0] = 1
        else:
            with pytest.raises(OperationAborted):
                c.all_reduce(x, deadline_ns=p.soon())
        released.wait()
        c.close()

    run_threads(host, 2, body)


@given(st.binary(max_size=300))
def test_a_malformed_offer_is_refused(data: bytes) -> None:
    try:
        found = decode_offer(data)
    except RemoteProtocolError:
        return
    assert decode_offer(encode_offer(found).tobytes()) == found


def test_offers_come_back_whole() -> None:
    offer = WindowOffer(uuid=b"u" * 16, name="é" * 160, pci="ü" * 160, memory=b"m" * 64)
    assert decode_offer(encode_offer(offer).tobytes()) == offer


def test_folds_are_compiled_for_gpus(tmp_path: Any) -> None:
    """By NVRTC, for every dtype and reduction; none spills registers."""
    compiler = Compiler(cache=tmp_path)
    for dtype in dtypes():
        kernels = fold_kernels(dtype_code(dtype))
        found = compiler.compile(kernels.source, architecture="sm_90a", options=list(kernels.options))
        for op in reductions_of(dtype):
            report = found.kernels[fold_name(dtype_code(dtype), reduction_code(op, dtype))]
            assert report.spill_bytes == 0 and report.registers <= 64, (dtype, op, report)


def test_operations_have_the_times_of_the_device_while_somebody_wants_them() -> None:
    """The modelled device takes known times for a load, a fold of a half and a fetch of each half."""
    host, count = model_host(devices=2), 8_000

    def body(p: ThreadRank) -> dict[int, int]:
        c = connected(p)
        x = on_device(p.process, values(p.rank, count, FLOAT32))
        c.all_reduce(x, deadline_ns=p.soon())
        clock = c.flight.devices
        clock.start()
        first = c.flight.ring.begun
        c.all_reduce(x, deadline_ns=p.soon())
        c.broadcast(x, 0, deadline_ns=p.soon())
        found = clock.stop()
        c.all_reduce(x, deadline_ns=p.soon())
        assert not found.copies and len(clock.stop().of_operations) == 2, "nothing is timed unless asked for"
        p.close(c)
        return {number - first: ns for number, ns in found.of_operations.items()}

    whole_ns = count * 4 // BYTES_PER_NS
    found = run_threads(host, 2, body)
    assert [each[0] for each in found] == [whole_ns + KERNEL_NS + whole_ns] * 2
    assert [each[1] for each in found] == [whole_ns] * 2, "the root loads, the other one fetches"
    host.drain()


def test_copies_of_staged_operations_have_the_times_of_the_device() -> None:
    host, count = model_host(devices=2), 8_000

    def body(p: ThreadRank) -> Any:
        c = p.communicator()
        x = on_device(p.process, values(p.rank, count, FLOAT32))
        c.flight.devices.start()
        c.all_reduce(x, deadline_ns=p.soon())
        found = c.flight.devices.stop()
        p.close(c)
        return found

    whole = count * 4
    for found in run_threads(host, 2, body):
        assert not found.of_operations, "it ran on the host"
        assert found.copies == {
            ("device_to_host", whole): (1, whole // BYTES_PER_NS),
            ("host_to_device", whole): (1, whole // BYTES_PER_NS),
        }
    host.drain()
