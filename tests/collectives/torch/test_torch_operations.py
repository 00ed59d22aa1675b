"""Operations of `torch.distributed` that other backends leave out, or that PyTorch keeps for one of them.

Reductions with a factor, of narrow dtypes and of sparse tensors; `monitored_barrier`, `split_group`,
functional collectives; compiled programs; records of calls. Real processes of `zbmd-node run`'s host.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS = 3
HEAD = """
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import zbmd.torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
dist.init_process_group("zbmd", timeout=timedelta(minutes=2))
me, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
total = sum(range(n))


def fails(call, *texts):
    try:
        call()
    except RuntimeError as error:
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError(f"nothing was raised; {texts} was expected")


def mine(*shape, dtype=torch.float32):
    return torch.full(shape, me).to(dtype)


def same(tensor, value):
    assert (tensor.to(torch.float64) == value).all(), (tensor, value)


"""

REDUCTIONS = """
scaled = dist._make_nccl_premul_sum(2.0)
for dtype in (torch.float32, torch.float16, torch.float64):
    x = mine(5, dtype=dtype)
    dist.all_reduce(x, op=scaled)
    same(x, 2 * total)
x = mine(5)
dist.all_reduce(x, op=dist._make_nccl_premul_sum(torch.tensor([2.0])))
same(x, 2 * total)
x = mine(5)
dist.reduce(x, 1, op=scaled)
same(x, 2 * total if me == 1 else me)
x, out = mine(2 * n), torch.empty(2)
dist.reduce_scatter_tensor(out, x, op=scaled)
same(out, 2 * total)
same(x, me)  # the input is not multiplied
dist.reduce_scatter(out, [mine(2) for _ in range(n)], op=scaled)
same(out, 2 * total)

for op, value in (("SUM", 1), ("MAX", 1), ("MIN", 0), ("PRODUCT", 0), ("BAND", 0), ("BOR", 1), ("BXOR", 1)):
    x = torch.tensor([me == 0] * 3)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    same(x, value)
for name in ("uint16", "uint32", "uint64", "int8", "int16", "bfloat16", "float16"):
    x = mine(5, dtype=getattr(torch, name))
    dist.all_reduce(x)
    same(x, total)
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    dtype = getattr(torch, name)
    for op, value in (("SUM", total), ("MAX", n - 1), ("AVG", total / n)):
        x = mine(5, dtype=dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        same(x, value)
    out = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(out, mine(2 * n, dtype=dtype))
    same(out, total)
    out = torch.empty(2 * n, dtype=dtype)
    dist.all_gather_into_tensor(out, mine(2, dtype=dtype))
    same(out.view(n, 2)[:, 0], torch.arange(n))
for dtype in (torch.complex32, torch.complex64, torch.complex128):
    x = torch.full((4,), me + 1j).to(dtype)
    dist.all_reduce(x)
    same(torch.view_as_real(x)[:, 0], total)
    same(torch.view_as_real(x)[:, 1], n)
x = torch.full((4,), 2 * me + 2j)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert (x == n - 1 + 2j).all(), x
x = torch.tensor([me, -me - 1, 7])  # cut off towards zero, as NCCL has it
dist.all_reduce(x, op=dist.ReduceOp.AVG)
total = n * (n - 1) // 2
assert x.tolist() == [total // n, -((total + n) // n), 7], x
x = torch.ones(2, dtype=torch.bool)
fails(lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), "no reduction 'avg' for dtype bool")
"""

SPARSE = """
def sparse(values, dtype=torch.float32):
    # One entry of this rank's own, and one at the end that all ranks have.
    values = torch.tensor(values).to(dtype)
    return torch.sparse_coo_tensor([[me, n]], values, (n + 1, *values.shape[1:]))


for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
    x = sparse([me + 1, me + 1], dtype)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.is_sparse and x.is_coalesced() and work.result()[0] is x, (x, work.result())
    assert torch.equal(x.to_dense(), torch.tensor([*range(1, n + 1), total + n]).to(dtype)), x.to_dense()
x = sparse([[1.0, 2.0], [3.0, 4.0]])
dist.all_reduce(x)
assert torch.equal(x.to_dense(), torch.tensor([[1.0, 2.0]] * n + [[3.0 * n, 4.0 * n]])), x.to_dense()
x = torch.sparse_coo_tensor(torch.zeros(2, me, dtype=torch.int64), torch.ones(me), (2, 3))  # rank 0 has none
dist.all_reduce(x)
same(x.to_dense()[0, 0], total)
x = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (4,))
dist.all_reduce(x)
assert x._nnz() == 0
fails(lambda: dist.all_reduce(sparse([1.0, 1.0]), op=dist.ReduceOp.MAX), "ReduceOp.SUM", ".to_dense()")
fails(lambda: dist.broadcast(sparse([1.0, 1.0]), 0), "layout torch.sparse_coo")
other = torch.sparse_coo_tensor([[0]], [1.0], (3 + me,))
fails(lambda: dist.all_reduce(other), "Desynchronised", "sparse float32[3] with", "sparse float32[5] with")
"""

BARRIERS = """
for _ in range(3):
    dist.monitored_barrier()
dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
short = timedelta(seconds=0.2)
for wait_all_ranks in (False, True, False):
    if me == 0:
        late = "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"
        late = late if wait_all_ranks else "Rank 1 failed to pass monitoredBarrier in 200 ms"
        fails(lambda: dist.monitored_barrier(timeout=short, wait_all_ranks=wait_all_ranks), late)
    dist.barrier()
if me != 1:
    texts = ["Rank 2 successfully reached monitoredBarrier, but", "from rank 0: "] if me else []
    texts.append("Rank 1 failed to pass monitoredBarrier")
    fails(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)), *texts)
dist.barrier()  # the group is of use after all that
dist.monitored_barrier(timeout=timedelta(seconds=60))
if me == 0:
    fails(lambda: world.monitored_barrier(timedelta(0)), "Rank 0 timed out in monitoredBarrier")
pair = dist.new_group([0, 2])
dist.monitored_barrier(pair, timedelta(seconds=60))  # does nothing at rank 1

# Groups: each rank of the parent calls it; ranks are the parent's.
half = dist.split_group(split_ranks=[[0, 1], [2]], group_desc="a half", timeout=timedelta(seconds=60))
assert half.group_desc == "a half"
x = mine(2) + 1
dist.all_reduce(x, group=half)
same(x, 3)
if me != 2:
    assert dist.get_process_group_ranks(half) == [0, 1]
again = dist.split_group(parent_pg=half, split_ranks=[[1 if me < 2 else 0]])
assert again is None if me == 0 else dist.get_process_group_ranks(again) == [me]
for wrong in (None, [], [[]], [[0, 0]]):
    try:
        dist.split_group(split_ranks=wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(f"{wrong} was taken for a split")
gloo = dist.new_group(backend="gloo")  # those of other backends go to PyTorch's own functions
dist.monitored_barrier(gloo, timedelta(seconds=60))
"""

FUNCTIONAL = """
ops, name = torch.ops._c10d_functional, world.group_name
wait = ops.wait_tensor
out = torch.empty(2 * n)
wait(ops.all_gather_into_tensor_out(mine(2), n, name, out=out))
same(out.view(n, 2)[:, 0], torch.arange(n))
out = torch.empty(2)
wait(ops.reduce_scatter_tensor_out(mine(2 * n), "sum", n, name, out=out))
same(out, total)
there, back = (me + 1) % n, (me - 1) % n
x, out = mine(3), torch.empty(3)
for tensor in ops.batch_p2p_ops(["isend", "irecv"], [there, back], [0, 0], [x, out], name):
    wait(tensor)
same(out, back)
out = torch.empty(3)
for tensor in (ops.isend(x, there, 5, name), ops.irecv(out, back, 5, name)):
    wait(tensor)
same(out, back)
same(wait(functional.all_reduce(mine(2), "avg", world)), total / n)
same(wait(functional.all_gather_tensor(mine(2, 2), 1, world))[0], torch.arange(n).repeat_interleave(2))
x = mine(2 * n).requires_grad_()
functional.reduce_scatter_tensor_autograd(x, "sum", 0, world).sum().backward()
same(x.grad, 1)
with dist._coalescing_manager(async_ops=True) as together:
    outs = [torch.empty(3), torch.empty(2, 2)]
    for out in outs:
        dist.reduce_scatter_tensor(out, mine(n * out.shape[0], *out.shape[1:]))
together.wait()
for out in outs:
    same(out, total)
lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(n)]
dist.all_gather_coalesced(lists, [mine(3), mine(2, 2)])
for rank, tensors in enumerate(lists):
    for tensor in tensors:
        same(tensor, rank)
work = dist.all_reduce(mine(3), async_op=True)
work.block_current_stream()
assert work.is_completed()
"""

COMPILED = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

compiled = torch.compile(backend="aot_eager")


@compiled
def async_op(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1


@compiled
def in_place(x):
    x = x + me
    dist.broadcast(x, 1)
    y = torch.empty(n * x.shape[0])
    dist.all_gather_into_tensor(y, x)
    return y + 1


@compiled
def others(x):
    dist.barrier()
    dist.send(x, (me + 1) % n)
    y = torch.empty_like(x)
    dist.recv(y, (me - 1) % n)
    return functional.all_reduce(y, "sum", world) * 2


same(async_op(torch.ones(3)), n + 1)
same(in_place(torch.zeros(3)), 2)
same(others(torch.ones(3)), 2 * n)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def gradients(made):
    for _ in range(3):
        made.zero_grad()
        made(torch.ones(2, 4) * me).sum().backward()
    return [getattr(p.grad, "full_tensor", lambda: p.grad)() for p in made.parameters()]


sharded = model()
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer)
eager = gradients(DistributedDataParallel(model()))
for found in (
    gradients(torch.compile(DistributedDataParallel(model()), backend="aot_eager")),
    gradients(torch.compile(sharded, backend="aot_eager")),
):
    for one, other in zip(eager, found, strict=True):
        torch.testing.assert_close(one, other)
"""

RECORDS = """
import json


def dumped(**options):
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(**options))


with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
    dist.all_reduce(mine(3, 4))
    dist.all_gather([torch.empty(2)] * n, mine(2), async_op=True).wait()
    works = [dist.isend(mine(5), (me + 1) % n), dist.irecv(torch.empty(5), (me - 1) % n)]
    for work in works:
        work.wait()
shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("zbmd:")}
assert shapes == {
    "zbmd:all_reduce": [[3, 4]], "zbmd:all_gather": [[2]], "zbmd:send": [[5]], "zbmd:recv": [[5]]
}, shapes

group = dist.new_group(group_desc="recorded", timeout=timedelta(minutes=2))
for count in range(1, 6):
    dist.all_reduce(mine(count), group=group)
dist.broadcast(mine(2, 3, dtype=torch.bfloat16), 0, group=group)
dist.barrier(group)
names = [group.group_name, "recorded"]
kept = [entry for entry in dumped()["entries"] if entry["process_group"] == names]
assert [entry["collective_seq_id"] for entry in kept] == [4, 5, 6, 7], kept  # the last 4, by the variable
last = kept[-2]
assert last["profiling_name"] == "zbmd:broadcast" and last["state"] == "completed" and last["retired"], last
assert last["input_sizes"] == [[2, 3]] and last["input_dtypes"] == ["BFloat16"], last
times = [last[f"time_{name}_ns"] for name in ("created", "discovered_started", "discovered_completed")]
assert last["timeout_ms"] == 120_000 and 0 < times[0] <= times[1] <= times[2], last
found = dumped(includeCollectives=False)
assert not found.get("entries") and found["pg_config"][group.group_name]["ranks"] == str([*range(n)]), found
assert not dumped(onlyActive=True).get("entries"), dumped(onlyActive=True)
if me == 0:  # what the others do not call is under way, until its time is up
    short = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    fails(lambda: dist.all_reduce(mine(9), group=short), "Timed out in ")
    (active,) = dumped(onlyActive=True)["entries"]
    assert active["input_sizes"] == [[9]] and active["state"] == "started", active
else:
    dist.new_group([0, 1], timeout=timedelta(seconds=1))
dist.barrier()
"""
BODIES = {
    "records": RECORDS,
    "reductions": REDUCTIONS,
    "sparse": SPARSE,
    "barriers and splits": BARRIERS,
    "functional": FUNCTIONAL,
    "compiled": COMPILED,
}


@pytest.mark.parametrize(
    ("name", "links"),
    [(name, "auto") for name in BODIES] + [("sparse", "tcp"), ("barriers and splits", "tcp")],
)
async def test_operations_over_zbmd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, links: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_LINKS", links)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "4")
    script = tmp_path / "job.py"
    script.write_text(f"{HEAD}{BODIES[name]}\nprint('good')\ndist.destroy_process_group()\n")
    output = Lines()
    config = HostConfig(target=str(script), world_size=RANKS, on_loss=OnLoss.STOP)
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == RANKS, "\n".join(output.lines)
