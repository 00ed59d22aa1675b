"""PyTorch over the backend `zbmd`: every operation, DDP and FSDP2 beside gloo, and the death of a rank.

The ranks are real processes of `zbmd-node run`'s host; the losses are compared with those that gloo gives in
the same processes: they differ by the order of a sum of two at most, so not at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome
from zbmd.tools.cli.launch import free_port

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

HEAD = """
import os, signal, threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import zbmd.torch
from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError

torch.set_num_threads(1)
"""

OPERATIONS = """
dist.init_process_group("zbmd")
me, n = dist.get_rank(), dist.get_world_size()
dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def mine(*shape, dtype=torch.float32, rank=me):
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 + 10 * rank).to(dtype)


def all_of(*shape, dtype=torch.float32):
    return [mine(*shape, dtype=dtype, rank=rank) for rank in range(n)]


def same(a, b):
    assert a.dtype == b.dtype and torch.equal(a, b), (a, b)


for dtype in dtypes:
    for count in (0, 3, 30_000):
        x = mine(count, dtype=dtype)
        dist.all_reduce(x)
        same(x, sum(all_of(count, dtype=dtype)))
        x = mine(count, dtype=dtype)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        same(x, mine(count, dtype=dtype, rank=n - 1))
        x = mine(count, dtype=dtype)
        dist.broadcast(x, 1)
        same(x, mine(count, dtype=dtype, rank=1))
        x, out = mine(count, dtype=dtype), torch.empty(n * count, dtype=dtype)
        dist.all_gather_into_tensor(out, x)
        same(out, torch.cat(all_of(count, dtype=dtype)))
        x, out = mine(n * count, dtype=dtype), torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, x)
        same(out, sum(all_of(n * count, dtype=dtype))[me * count : (me + 1) * count])

x = mine(6, 5).T  # not contiguous
dist.all_reduce(x, op=dist.ReduceOp.AVG)
torch.testing.assert_close(x, sum(all_of(6, 5)).T / n)
outs = [torch.empty(4, 3).T for _ in range(n)]
dist.all_gather(outs, mine(3, 4))
for out, expected in zip(outs, all_of(3, 4)):
    same(out, expected)
outs = [torch.empty(5) for _ in range(n)] if me == 2 else None
dist.gather(mine(5), outs, dst=2)
if me == 2:
    same(torch.stack(outs), torch.stack(all_of(5)))
out = torch.empty(4)
dist.scatter(out, [mine(4) + rank for rank in range(n)] if me == 0 else None, src=0)
same(out, mine(4, rank=0) + me)
x = mine(9)
dist.reduce(x, dst=1)
same(x, sum(all_of(9)) if me == 1 else mine(9))
out = torch.empty(3)
dist.reduce_scatter(out, [mine(3) + rank for rank in range(n)])
same(out, sum(all_of(3)) + n * me)
out, rows = torch.empty(sum(rank + 1 for rank in range(n)), 2), [me + 1] * n
dist.all_to_all_single(out, mine(n * (me + 1), 2), [rank + 1 for rank in range(n)], rows)
same(out, torch.cat([mine(n * (r + 1), 2, rank=r)[me * (r + 1) : (me + 1) * (r + 1)] for r in range(n)]))
out = torch.empty(2 * n)
dist.all_to_all_single(out, mine(2 * n))
same(out, torch.cat([x[2 * me : 2 * me + 2] for x in all_of(2 * n)]))
outs = [torch.empty(rank + 1) for rank in range(n)]
dist.all_to_all(outs, [mine(me + 1) for _ in range(n)])
for rank, out in enumerate(outs):
    same(out, mine(rank + 1, rank=rank))
objects = [None] * n
dist.all_gather_object(objects, {"rank": me})
assert [found["rank"] for found in objects] == list(range(n))
with dist._coalescing_manager():
    parts = [mine(3), mine(50, 2)]
    for part in parts:
        dist.all_reduce(part)
same(parts[0], sum(all_of(3)))
same(parts[1], sum(all_of(50, 2)))

# Point to point, many at once, and from any source.
x, out = mine(40_000), torch.empty(40_000)
there = [dist.P2POp(dist.isend, x, (me + 1) % n), dist.P2POp(dist.irecv, out, (me - 1) % n)]
works = dist.batch_isend_irecv(there)
for work in works:
    work.wait()
same(out, mine(40_000, rank=(me - 1) % n))
if me:
    dist.send(torch.tensor([me]), 0, tag=3)
else:
    x, sources = torch.zeros(1, dtype=torch.int64), set()
    for _ in range(n - 1):
        source = dist.recv(x, tag=3)
        assert source == x.item(), (source, x)
        sources.add(source)
    assert sources == set(range(1, n))

# Works, futures, foreign threads; several operations in flight.
xs = [mine(1000) + k for k in range(20)]
works = [dist.all_reduce(x, async_op=True) for x in xs]
future = works[-1].get_future().then(lambda done: done.value()[0].sum())
for k, (x, work) in enumerate(zip(xs, works)):
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    same(x, sum(all_of(1000)) + n * k)
assert future.wait() == xs[-1].sum() and torch.equal(works[0].result()[0], xs[0])
groups = [dist.new_group() for _ in range(3)]
totals = [torch.ones(100) for _ in groups]
threads = [
    threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": g}) for x, g in zip(totals, groups)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert all((x == n).all() for x in totals)

# Sub-groups, and meshes of them.
pair = dist.new_group([0, 2])
if me != 1:
    x = mine(4)
    dist.broadcast(x, 2, group=pair)
    same(x, mine(4, rank=2))
    dist.destroy_process_group(pair)
mesh = dist.device_mesh.init_device_mesh("cpu", (1, n), mesh_dim_names=("a", "b"))
x = torch.ones(2)
dist.all_reduce(x, group=mesh.get_group("b"))
assert x[0] == n

# Errors: of the call, of who does not come.
for wrong in (lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()), lambda: dist.send(torch.ones(1), n + 5)):
    try:
        wrong()
    except (dist.DistBackendError, ValueError) as error:
        assert not isinstance(error, dist.DistBackendError) or isinstance(error.__cause__, UserError), error
    else:
        raise AssertionError("nothing was raised")
dist.barrier()
soon = dist.new_group(timeout=timedelta(seconds=1))
late = dist.new_group()
if me == 0:
    try:
        dist.all_reduce(torch.ones(3), group=soon)
    except dist.DistBackendError as error:
        assert isinstance(error.__cause__, DeadlineExceeded), error
    else:
        raise AssertionError("nobody came")
dist.barrier(group=late)
print("good")
if me:  # rank 0 leaves without a word
    dist.destroy_process_group()
"""

LARGE = """
dist.init_process_group("zbmd", timeout=timedelta(minutes=2))
me, other, mib = dist.get_rank(), 1 - dist.get_rank(), 1 << 20  # the arena has 48 MiB
x, out = torch.arange(8 * mib), torch.zeros(8 * mib, dtype=torch.int64)
works = [dist.isend(x + me, other), dist.irecv(out, other)]
for work in works:
    work.wait()
assert torch.equal(out, x + other)
outs = [torch.full((14 * mib,), k + 10 * me, dtype=torch.uint8) for k in range(6)]
ins = [torch.zeros(14 * mib, dtype=torch.uint8) for _ in range(6)]
there = [dist.P2POp(dist.isend, out, other, tag=k) for k, out in enumerate(outs)]
back = [dist.P2POp(dist.irecv, ins[k], other, tag=k) for k in reversed(range(6))]
for work in dist.batch_isend_irecv(there + back):
    work.wait()
assert all((each == k + 10 * other).all() for k, each in enumerate(ins))

# Every collective, of tensors that the arena could not hold; many of them in flight.
x = torch.full((15 * mib,), 1.0 + me)
dist.all_reduce(x)
assert (x == 3).all()
dist.broadcast(x, 1)
outs = [torch.empty(15 * mib) for _ in range(2)]
dist.all_gather(outs, x + me)
assert (outs[1] == 4).all()
dist.gather(x, outs if me == 0 else None)
dist.scatter(x, outs if me == 0 else None)
dist.reduce(x, 1)
out = torch.empty(15 * mib)
dist.reduce_scatter(out, [x, x])
dist.all_to_all(outs, [x, x])
dist.all_to_all_single(torch.empty(30 * mib), torch.ones(30 * mib))
dist.all_gather_into_tensor(torch.empty(30 * mib), x)
objects = [bytes(60 * mib)] if me == 0 else [None]
dist.broadcast_object_list(objects)
assert len(objects[0]) == 60 * mib
works = [dist.all_reduce(torch.ones(15 * mib), async_op=True) for _ in range(3)]
works += [dist.isend(x, other), dist.irecv(torch.empty_like(x), other)]
for work in works:
    work.wait()
print("good")
dist.destroy_process_group()
"""

COUNTS = """
dist.init_process_group("zbmd")
me, groups = dist.get_rank(), []
for number in range(64):
    groups.append(dist.new_group())
    x = torch.full((3,), float(number + me))
    dist.all_reduce(x, group=groups[-1])
    assert (x == 2 * number + 1).all(), x
given = [torch.full((2,), float(k)) for k in range(4096)]
works = [dist.all_reduce(x, group=groups[k % 64], async_op=True) for k, x in enumerate(given)]
works += [dist.isend(x, 1 - me, tag=k) for k, x in enumerate(given[:100])]
outs = [torch.empty(2) for _ in range(100)]
works += [dist.irecv(out, 1 - me, tag=k) for k, out in reversed([*enumerate(outs)])]
for work in works:
    work.wait()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
given = [torch.full((2,), float(k)) for k in range(4096)]
works = [dist.all_reduce(x, async_op=True) for k, x in enumerate(given)]
assert torch.futures.wait_all([work.get_future() for work in works[::2]])
dist.barrier()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
for group in groups:
    dist.destroy_process_group(group)
dist.all_reduce(x, group=dist.new_group())
print("good")
dist.destroy_process_group()
"""

LOSSES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


# The end of a gloo group joins a thread with the GIL, for which that thread may wait (PyTorch 2.13): none is
# ended before it has had the GIL, in what ours does behind it.
KEPT = []


def losses(backend, sharded):
    dist.init_process_group(
        backend, init_method=f"file://{STORE}-{backend}-{sharded}", rank=int(os.environ["RANK"]), world_size=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(dist.get_rank())
    told = []
    for _ in range(8):
        x, y = torch.randn(8, 16, generator=batches), torch.randn(8, 4, generator=batches)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    if backend == "gloo":
        KEPT.append((model, dist.group.WORLD))
    dist.destroy_process_group()
    return told


for sharded in (False, True):
    theirs, ours = losses("gloo", sharded), losses("zbmd", sharded)
    assert ours == theirs and len(set(ours)) == 8, (sharded, ours, theirs)
print("good")
"""

DEATH = """
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    for step in range(6):
        if step == 3 and dist.get_rank() == 1 and os.environ["ZBMD_INCARNATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 8)).sum().backward()


told = []
while True:
    dist.init_process_group("zbmd")  # its timeout is half an hour: what ends a wait sooner is the notice
    try:
        train()
        break
    except RuntimeError as error:
        assert "peer rank1 lost" in str(error), error
        told.append(error)
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        assert error.__cause__ is not None, error
    else:
        raise AssertionError("a group that has lost a member takes no more operations")
    dist.destroy_process_group()
assert len(told) == (dist.get_rank() != 1), told
total = torch.ones(3)
dist.all_reduce(total)
assert total[0] == 3
print("good")
dist.destroy_process_group()
"""

CHILDREN = """
import multiprocessing
import sys
from torch.utils.data import DataLoader


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def new_group():
    dist.new_group([dist.get_rank()])


def main():
    dist.init_process_group("zbmd")
    dist.all_reduce(torch.ones(1))
    for call, code in ((dist.barrier, 7), (dist.destroy_process_group, 5), (new_group, 7)):
        pid = os.fork()
        if pid == 0:
            try:
                call()
            except RuntimeError:
                sys.exit(7)
            sys.exit(5)
        assert ended(pid) == code, call
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=print, args=("a child",))
        child.start()
        child.join()
        assert child.exitcode == 0
    for _ in range(2):
        batches = DataLoader(list(range(100)), batch_size=8, num_workers=2)
        assert sum(int(batch.sum()) for batch in batches) == 4950
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x[0] == 2
    print("good")


if __name__ == "__main__":  # a child by `spawn` runs this file again
    main()
"""


DEATHS_WHILE_ALL_MEET = """
from zbmd.collectives.torch import rendezvous

KILLED = {(1, 1): "step", (1, 2): "before", (0, 1): "behind"}  # (rank, incarnation): where it dies
end = KILLED.get((int(os.environ["RANK"]), int(os.environ["ZBMD_INCARNATION"])))
share, meetings = rendezvous._shared_store, 0


def shared_store(*args):
    global meetings
    meetings += 1
    if end == "before" or (end == "behind" and meetings == 2):
        if end == "behind":
            share(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return share(*args)


rendezvous._shared_store = shared_store
for _ in range(8):
    dist.init_process_group("zbmd")
    try:
        for step in range(4):
            if end == "step" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.ones(3)
            dist.all_reduce(total)
            sub = dist.new_group([0, 2])  # which uses the store
        break
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
assert total[0] == 3 and dist.get_world_size() == 3
stores = [None] * 3
dist.all_gather_object(stores, str(dist.distributed_c10d._get_default_store()))
print("good")
dist.destroy_process_group()
"""

SHRINK = """
for world in (4, 3, 2):
    dist.init_process_group("zbmd")
    assert dist.get_world_size() == world, dist.get_world_size()
    me, last = dist.get_rank(), int(os.environ["RANK"])
    try:
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        for step in range(3):
            if (world, last, step) in {(4, 1, 2), (3, 0, 1)}:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_gather(gathered, torch.tensor([last]))
        if world == 2:
            break
        dist.barrier()
    except RuntimeError as error:
        print(f"lost: {error}")
    dist.destroy_process_group()
left = torch.cat(gathered).tolist()
assert left == [2, 3] and left[me] == last, (left, me)
pair = dist.new_group([0, 1])  # ranks of the new numbering
x = torch.full((2,), float(me))
dist.broadcast(x, 1, group=pair)
assert x[0] == 1
dist.send(x, 1 - me) if me else dist.recv(x, 1)
print("good")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("body", "ranks", "links"),
    [
        (OPERATIONS, 3, "auto"),
        (OPERATIONS, 3, "tcp"),
        (LARGE, 2, "auto"),
        (LARGE, 2, "tcp"),
        (COUNTS, 2, "auto"),
        (LOSSES, 2, "auto"),
        (DEATH, 3, "auto"),
        (CHILDREN, 2, "auto"),
        (DEATHS_WHILE_ALL_MEET, 3, "auto"),
        (DEATHS_WHILE_ALL_MEET, 3, "tcp"),
        (SHRINK, 4, "auto"),
        (SHRINK, 4, "tcp"),
    ],
    ids=[
        "operations",
        "operations over TCP",
        "large",
        "large over TCP",
        "counts",
        "losses",
        "death",
        "children",
        "deaths while all meet",
        "deaths while all meet, over TCP",
        "shrink",
        "shrink over TCP",
    ],
)
async def test_torch_over_zbmd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ranks: int, links: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_LINKS", links)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    script = tmp_path / "job.py"
    script.write_text(f"{HEAD}\nSTORE = {str(tmp_path / 'store')!r}\n{body}")
    output = Lines()
    on_loss = {DEATH: OnLoss.REPLACE, DEATHS_WHILE_ALL_MEET: OnLoss.REPLACE, SHRINK: OnLoss.SHRINK}
    arena_bytes = (48 if body is LARGE else 32) << 20
    config = HostConfig(
        target=str(script), world_size=ranks, on_loss=on_loss.get(body, OnLoss.STOP), arena_bytes=arena_bytes
    )
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    good = sum(line.endswith(": good") for line in output.lines)
    assert good == (2 if body is SHRINK else ranks), "\n".join(output.lines)
