"""The ranks of `lab.gpu`'s checks of PyTorch: the backend `zbmd` with CUDA tensors, and NCCL beside it.

    zbmd-node run --nproc-per-node 2 zbmd/tools/lab/gpu/torch_ranks.py WHAT

WHAT: operations, streams, kill, overlap, nccl, resilient or profile.

Rank r computes on GPU r modulo those that are visible. Rank 0 prints what came of it as a line of JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zbmd.torch
from zbmd.tools.lab.gpu.torch_operations import compare
from zbmd.training.ops.cuda.timing import Timer
from zbmd.training.profiler.lines import read_profiles
from zbmd.training.profiler.profiler import open_profiler
from zbmd.training.torch.durable.cuda_events import TorchEvents
from zbmd.training.torch.durable.operations import OpMode
from zbmd.transport.errors import PeerLost

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

LARGE: Final = 3_000_017
TIMED_BYTES: Final = 64 << 20
ROUNDS: Final = 10
WIDTH: Final = 4096
RESILIENT_STEPS: Final = 20
FIRST: Final = os.environ.get("ZBMD_INCARNATION", "1") == "1"


def device() -> Any:
    """Return this rank's device, which is current."""
    found = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def operations() -> str:
    """Compare every operation and dtype, strides, messages and sparse tensors with the host's."""
    dist.init_process_group("zbmd")
    there, me, n = device(), dist.get_rank(), dist.get_world_size()
    compared = compare(lambda x: x.to(there), lambda x: x.cpu(), LARGE)
    for count in (3, 1_000_003):
        x, out = torch.full((count,), float(me), device=there), torch.empty(count, device=there)
        ops = [dist.P2POp(dist.isend, x, (me + 1) % n), dist.P2POp(dist.irecv, out, (me - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        _require(bool((out == (me - 1) % n).all()), f"a message of {count} elements is another")
    sparse = torch.sparse_coo_tensor([[me, n]], [1.0, 2.0], (n + 1,), device=there)
    dist.all_reduce(sparse)
    _require(sparse.to_dense().tolist() == [1.0] * n + [2.0 * n], "a sparse tensor has another sum")
    refused = torch.empty(3, device="meta")
    try:
        dist.all_reduce(refused)
    except RuntimeError:
        return f"{compared} results have the bits of the host's; messages, sparse tensors"
    raise ValueError("a tensor of another device was taken")


def streams() -> str:
    """Check the order with streams: work before a call, a stream that waits, a call behind one that waits."""
    dist.init_process_group("zbmd")
    there, me, n = device(), dist.get_rank(), dist.get_world_size()
    side = torch.cuda.Stream(there)
    with torch.cuda.stream(side):
        slow = torch.ones(2048, 2048, device=there)
        for _ in range(20):
            slow = torch.clamp(slow @ slow, max=1)
        work = dist.all_reduce(slow, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        work.wait()
        slow.mul_(3)
        _require(bool((slow == 3 * n).all()), "the work before the call was not waited for")
        future.wait()
    torch.cuda.synchronize()
    dist.barrier()
    x, held = torch.ones(LARGE, device=there), False
    if me:  # it comes when rank 0 has asked its stream for what follows
        dist.recv(torch.zeros(1), 0)
    work = dist.all_reduce(x, async_op=True)
    work.block_current_stream()
    x.mul_(3)
    again = dist.all_reduce(x, async_op=True)
    again.block_current_stream()
    x.add_(1)
    if me == 0:
        held = not work.is_completed()
        for rank in range(1, n):
            dist.send(torch.zeros(1), rank)
    torch.cuda.synchronize()
    _require(bool((x == 3 * n * n + 1).all()), "a stream that waits went on too early")
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    _require(held or me != 0, "the thread waited")
    return f"streams wait for calls, their threads do not; {connections} hardware queues"


def kill() -> str:
    """Kill a rank in an all-reduce; the other gets an error at once, and both go on with the replacement."""
    there, began_ns, spans_ms = device(), 0, list[float]()
    while True:
        dist.init_process_group("zbmd")
        x = torch.ones(LARGE, device=there)
        try:
            dist.all_reduce(x)
            if dist.get_rank() == 1 and FIRST:
                dist.send(torch.zeros(1), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 0 and not spans_ms:
                dist.recv(torch.zeros(1), 1)
                began_ns = time.monotonic_ns()
            dist.all_reduce(x)
            _require(bool((x == dist.get_world_size() ** 2).all()), "another sum after a loss")
            first = f"{spans_ms[0]:.1f} ms" if spans_ms else "no error"
            return f"{first} from the kill to the error; the same sums with the replacement"
        except RuntimeError as error:
            if not isinstance(error.__cause__, PeerLost):
                raise
            spans_ms.append((time.monotonic_ns() - began_ns) / 1e6)
            dist.destroy_process_group()


def overlap() -> str:
    """Time an all-reduce and matrix products, alone and at once: how much of the shorter one is hidden."""
    dist.init_process_group("zbmd")
    there = device()
    x = torch.randn(TIMED_BYTES // 4, device=there)
    a = torch.randn(WIDTH, WIDTH, device=there, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(40):
            torch.mm(a, a)

    def reduce() -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)

    def both() -> None:
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
        products()
        work.wait()

    reduce_ms, products_ms, both_ms = (_median_ms(each) for each in (reduce, products, both))
    hidden = (reduce_ms + products_ms - both_ms) / min(reduce_ms, products_ms)
    bus = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * TIMED_BYTES / 1e6 / reduce_ms
    return (
        f"all-reduce of 64 MiB {reduce_ms:.1f} ms ({bus:.1f} GB/s bus), products {products_ms:.1f} ms, both "
        f"{both_ms:.1f} ms: {100 * hidden:.0f} % of the shorter is hidden"
    )


def nccl() -> str:
    """Check NCCL beside zbmd: its operations, and its communicators after a loss."""
    there, lost = device(), 0
    while True:
        dist.init_process_group("cpu:zbmd,cuda:nccl")
        me, n = dist.get_rank(), dist.get_world_size()
        x, here = torch.ones(LARGE, device=there), torch.ones(3)
        try:
            dist.all_reduce(x)
            dist.all_reduce(here)
            torch.cuda.synchronize()
            _require(bool((x == n).all()) and here[0] == n, "another sum")
            if n > 1 and me == 1 and FIRST:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(3):
                dist.all_reduce(x)
                torch.cuda.synchronize()  # NCCL waits here, until it is aborted
                dist.barrier()
            _require(bool((x == n**4).all()), "another sum after a loss")
        except RuntimeError:
            lost += 1
            if lost > 1:
                raise
            dist.destroy_process_group()
            continue
        group = dist.group.WORLD
        if n == 1:  # there is nobody to lose: as after a loss, by hand
            group.companions.lost(PeerLost("rank0", "as a check"))
            _require(_is_refused(x), "an aborted communicator has taken a tensor")
        dist.destroy_process_group()
        return f"{n} ranks, {lost} losses: NCCL was aborted and made again"


def resilient() -> str:
    """Train a resilient DDP loop, with ZBMD_FAULT as `checks.resilient` sets it; return what it ends with."""
    dist.init_process_group("zbmd")
    there = device()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(512, 512)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(there))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randn(RESILIENT_STEPS * 16, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    run = zbmd.torch.resilient(model, optimizer)
    for x in run.batches(torch.utils.data.DataLoader(rows, 16)):
        with run.step():
            optimizer.zero_grad()
            (model(x.to(there)) - 1).square().mean().backward()
            optimizer.step()
    state = [*model.parameters(), *(each["exp_avg_sq"] for each in optimizer.state.values())]
    found = hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in state))
    return f"{run.steps} steps end with {found.hexdigest()[:16]}"


def profile() -> str:
    """Compare the time of a product's row in a sampled step with that of PyTorch's own events around it."""
    x = torch.randn(WIDTH, WIDTH, device=device())
    (x @ x).sum().item()  # plans and memory are made
    timer = Timer(TorchEvents(), 0)
    with tempfile.TemporaryDirectory() as folder:
        profiler = open_profiler(Path(folder), None, sequences=1, ops_every=2, timer=timer, environ={})
        with profiler:
            profiler.begin_step(2)
            mode = OpMode(profiler.sampler)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            mode.watch(is_on=True)
            began.record()
            for _ in range(ROUNDS):
                torch.mm(x, x)
            ended.record()
            mode.watch(is_on=False)
            profiler.begin_step(3)
        (life,) = read_profiles(Path(folder))
    (row,) = [one for line in life.ops for one in line.ops if one.op == "aten::mm"]
    ended.synchronize()
    whole_ms, row_ms = began.elapsed_time(ended), row.execute_ns / 1e6
    _require(
        row.calls == ROUNDS and 0.8 * whole_ms <= row_ms <= 1.01 * whole_ms, f"{row_ms} of {whole_ms} ms"
    )
    return f"{ROUNDS} products of {WIDTH}: {row_ms:.2f} ms by their row, {whole_ms:.2f} ms together"


_WHAT: Final = (operations, streams, kill, overlap, nccl, resilient, profile)


def _is_refused(x: Any) -> bool:
    try:
        dist.all_reduce(x)
    except RuntimeError:
        return True
    return False


def _median_ms(call: Callable[[], None]) -> float:
    spans: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        began_ns = time.monotonic_ns()
        call()
        torch.cuda.synchronize()
        spans.append((time.monotonic_ns() - began_ns) / 1e6)
    return statistics.median(spans)


def _require(holds: bool, what: str) -> None:
    """Raise `ValueError` unless it holds."""
    if not holds:
        raise ValueError(what)


def main(what: str) -> None:
    """One rank."""
    rank = int(os.environ["RANK"])
    told = {each.__name__: each for each in _WHAT}[what]()
    if rank == 0:
        print(json.dumps({"told": told}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
