"""Every operation with tensors on a modelled device, beside the same operation with tensors of the host.

    zbmd-node run --nproc-per-node 3 tests/programs/torch/devices/on_devices.py NAME...

The device runs what it is asked late and in an order that is drawn, and raises where nothing orders two
accesses of the same bytes.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from support.devices.torch_model import DEVICES, get, install, put

from zbmd.collectives.device.staged_calls import SLOT_BYTES, DeviceLate, Gates
from zbmd.collectives.errors import OperationAborted
from zbmd.tools.lab.gpu.torch_operations import compare, mine
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import PeerLost, UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
ME, N = 0, 0
LARGE = SLOT_BYTES // 4 * 2 + 1_003
"""Elements of float32 that take several pieces, the last of them uneven."""


def operations() -> None:
    assert compare(put, get, LARGE) > 200
    group: Any = dist.group.WORLD._get_backend(torch.device(DEVICES.kind))
    ways = {record.algorithm for record in group._group.communicator.flight}
    assert ("devices" in ways) == (os.environ["ZBMD_DEVICE_PATHS"] != "0"), ways
    dist.barrier()


def messages() -> None:
    for count in (3, 40_000):
        x, out = put(mine(count)), put(torch.zeros(count))
        ops = [dist.P2POp(dist.isend, x, (ME + 1) % N), dist.P2POp(dist.irecv, out, (ME - 1) % N)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        expected = torch.arange(count) % 5 + (ME - 1) % N
        assert torch.equal(get(out), expected.float())
    if ME:
        for number in range(4):  # of one destination, in order
            dist.isend(put(torch.tensor([ME * 10 + number])), 0, tag=3)
    else:
        seen: dict[int, list[int]] = {}
        out = put(torch.zeros(1, dtype=torch.int64))
        for _ in range(4 * (N - 1)):
            source = dist.recv(out, tag=3)
            seen.setdefault(source, []).append(int(get(out)) - 10 * source)
        assert seen == {rank: [0, 1, 2, 3] for rank in range(1, N)}, seen
    turned = put(torch.zeros(4, 3).T)
    if ME == 0:
        dist.send(put(mine(3, 4)), 1)
    elif ME == 1:
        dist.recv(turned, 0)
        assert torch.equal(get(turned), mine(3, 4) - 1)
    dist.barrier()


def streams() -> None:
    """Work before the call comes first; streams wait for the end; nothing waits for work after the call."""
    process = DEVICES.process
    side, late = process.stream_create(), process.stream_create()
    # The tensor is made on a stream that is not the default one.
    with DEVICES.on_stream(0, side):
        x = put(torch.ones(1000))
        for _ in range(5):
            x.mul_(2)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
        work.wait()
        x.add_(1)
        assert future.wait() is x
        assert torch.equal(get(x), torch.full((1000,), 32.0 * N + 1))
    # A stream waits for the end, and its thread does not: the others come later.
    y = put(torch.ones(50_000))
    dist.barrier()
    if ME == 0:
        work = dist.all_reduce(y, async_op=True)
        work.block_current_stream()
        y.mul_(3)  # behind the all-reduce, which has not begun on the others
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1)
    else:
        if ME == 1:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.zeros(1), 2)
        else:
            dist.recv(torch.zeros(1), 1)
        dist.all_reduce(y, async_op=True).block_current_stream()
        y.mul_(3)
    assert torch.equal(get(y), torch.full((50_000,), 3.0 * N))
    # The stream of a call may wait for it: the call comes after what was asked before it alone.
    with DEVICES.on_stream(0, late):
        w = put(torch.ones(100))
        first = dist.all_reduce(w, async_op=True)
        first.block_current_stream()
        second = dist.all_reduce(w, async_op=True)
        second.block_current_stream()
        w.sub_(1)
    process.stream_synchronize(late)
    with DEVICES.on_stream(0, late):
        assert torch.equal(get(w), torch.full((100,), N * N - 1.0))
    dist.barrier()


def refused() -> None:
    def fails(call: Callable[[], object], *texts: str) -> None:
        try:
            call()
        except RuntimeError as error:
            assert isinstance(error.__cause__, UserError), repr(error.__cause__)
            assert all(text in str(error) for text in texts), str(error)
        else:
            raise AssertionError(f"{texts} was expected")

    out = torch.zeros(4 * N)
    fails(
        lambda: dist.all_gather_into_tensor(out, put(mine(4))), "one call has tensors in host memory and on"
    )
    fails(lambda: dist.all_reduce(torch.ones(3, device="meta")), "a tensor is on meta", ".cpu()")
    DEVICES.chosen = 3
    fails(lambda: dist.all_reduce(put(mine(4))), "the device of this rank is cudamodel:3", "set_device()")
    DEVICES.chosen = 0
    x = put(mine(4))
    dist.all_reduce(x)
    assert torch.equal(get(x), sum(torch.arange(4) + rank for rank in range(N)).float())


def lost() -> None:
    """A rank dies in an operation: `wait` raises, and a stream that waits goes on, with an error to come."""
    x, y = put(torch.ones(1000)), put(torch.ones(1000))
    dist.all_reduce(x)
    get(x)
    if ME == 2:
        for rank in range(2):
            dist.recv(torch.zeros(1), rank)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(1), 2)  # it is out of the operation
    work = dist.all_reduce(x, async_op=True)
    held = dist.all_reduce(y, async_op=True)
    held.block_current_stream()
    y.mul_(2)
    get(y)  # the stream goes on
    calls = [lambda: dist.all_reduce(x), lambda: dist.all_reduce(x)]
    for call in [*([] if os.environ["ZBMD_WAIT_ON_STREAM"] == "1" else [work.wait]), *calls]:
        try:
            call()
        except RuntimeError as error:
            assert isinstance(error.__cause__, PeerLost | OperationAborted), repr(error.__cause__)
        else:
            raise AssertionError("an operation with a lost rank has succeeded")
    assert work.exception() is not None and not work.is_success()


def late() -> None:
    """A device that does not come to a call in its time, and one that fails: all ranks hear of it."""

    def outcome(group: Any) -> BaseException | None:
        try:
            dist.all_reduce(put(torch.ones(5)), group=group)
        except RuntimeError as error:
            return error.__cause__
        raise AssertionError("a call without its tensor has succeeded")

    short, other = dist.new_group(), dist.new_group()
    for group in (short, other):
        dist.all_reduce(put(torch.ones(5)), group=group)
        dist.barrier(group)
    gate = Gates(DEVICES.process).take()
    assert gate is not None
    if ME == 1:
        short.set_timeout(timedelta(seconds=1))  # the others hear of it long before their own time is up
        gate.hold(DEVICES.process.default_stream)
    error = outcome(short)
    assert isinstance(error, DeviceLate if ME == 1 else OperationAborted), repr(error)
    assert "the device has not come to this call" in str(error), str(error)
    assert ME == 1 or "rank 1 " in str(error), str(error)
    gate.open()
    dist.destroy_process_group(short)
    dist.all_reduce(put(torch.ones(5)), group=other)  # the device goes on
    error = outcome_of_a_fault(other) if ME == 2 else outcome(other)
    assert isinstance(error, CudaFault if ME == 2 else OperationAborted), repr(error)
    assert "has fallen off the bus" in str(error), str(error)


def outcome_of_a_fault(group: Any) -> BaseException | None:
    """The device fails under a call that has begun."""
    x = put(torch.ones(5))
    begun = DEVICES.process.stream_wait_event

    def fails(stream: int, event: int) -> None:
        DEVICES.process.host.failed = CudaFault("the device has fallen off the bus")
        begun(stream, event)

    DEVICES.process.stream_wait_event = fails  # type: ignore[method-assign]
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError as error:
        return error.__cause__
    finally:
        del DEVICES.process.stream_wait_event
        DEVICES.process.host.failed = None
    raise AssertionError("a call on a device that fails has succeeded")


def main() -> None:
    global ME, N
    dist.init_process_group("zbmd", timeout=timedelta(minutes=2))
    ME, N = dist.get_rank(), dist.get_world_size()
    install(seed=ME + 1)
    for name in sys.argv[1:]:
        globals()[name]()
    DEVICES.process.host.drain()
    assert DEVICES.process.host.failed is None
    assert not DEVICES.process._held, "a stream waits for ever"
    print("good", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
