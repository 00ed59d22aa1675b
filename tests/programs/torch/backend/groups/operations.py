"""Every operation, of every dtype, in groups and on threads; the errors of calls that are wrong."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from programs.torch.backend.common import dist, torch

from zbmd.transport.errors import DeadlineExceeded, UserError

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
        whole: Any = sum(all_of(n * count, dtype=dtype))
        same(out, whole[me * count : (me + 1) * count])

x = mine(6, 5).T  # not contiguous
dist.all_reduce(x, op=dist.ReduceOp.AVG)
torch.testing.assert_close(x, sum(all_of(6, 5)).T / n)
outs = [torch.empty(4, 3).T for _ in range(n)]
dist.all_gather(outs, mine(3, 4))
for out, expected in zip(outs, all_of(3, 4), strict=True):
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
for k, (x, work) in enumerate(zip(xs, works, strict=True)):
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    same(x, sum(all_of(1000)) + n * k)
assert future.wait() == xs[-1].sum() and torch.equal(works[0].result()[0], xs[0])
groups = [dist.new_group() for _ in range(3)]
totals = [torch.ones(100) for _ in groups]
pairs = zip(totals, groups, strict=True)
threads = [threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": g}) for x, g in pairs]
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
soon = dist.new_group(timeout=timedelta(minutes=5))  # which is the limit of its making, too
late = dist.new_group()
if me == 0:
    soon.set_timeout(timedelta(seconds=1))
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
