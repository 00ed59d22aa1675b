"""Errors of scripts over the backend `zbmd`: every rank gets them in PyTorch's words. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

HEAD = """
import os, signal, sys, warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zbmd.torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
dist.init_process_group("zbmd", timeout=timedelta(minutes=5))
me, n = dist.get_rank(), dist.get_world_size()


def fails(call, *texts):
    try:
        call()
    except RuntimeError as error:
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError(f"nothing was raised; {texts} was expected")


"""

MISMATCHED = """
import torch.distributed._functional_collectives as functional

op = (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(2.0))[me]
narrow = (torch.float16, torch.bfloat16)[me]
narrower = (torch.float32, torch.float8_e5m2)[me]
as_bytes = (torch.float8_e4m3fn, torch.float8_e5m2)[me]
a, b = torch.full((4,), 1.5), torch.tensor([3, 4])  # 16 bytes each
mine = (a, b)[me]


def again():
    dist.destroy_process_group()
    dist.init_process_group("zbmd", timeout=timedelta(minutes=5))


def gather():
    dist.gather(mine, [torch.empty_like(a)] * 2 if me == 0 else None)


def all_gather():
    dist.all_gather([torch.empty(3, 4 - 3 * me)] * 2, torch.ones(3, 4 - 3 * me))


def in_another_order():
    dist.broadcast(a, 0) if me else dist.reduce(a, 0)


def splits():
    # The second rank takes less than the first sends.
    out, given, mine = torch.empty(4), torch.ones(4), [[1, 3], [2, 2]][me]
    dist.all_to_all_single(out, given, mine, mine)


def together():
    dist.all_reduce_coalesced([a, a[:2].clone()][:: 1 - 2 * me])


def gathered_together():
    for out in functional.all_gather_into_tensor_coalesced([torch.ones(1)] * (2 - me), dist.group.WORLD):
        functional.wait_tensor(out)


def all_to_all():
    dist.all_to_all([torch.empty_like(mine)] * 2, [mine] * 2)


for call, there, here in (
    (lambda: dist.broadcast(mine, 0), "broadcast(float32[4], src=0)", "broadcast(int64[2], src=0)"),
    (all_gather, "all_gather(float32[3, 4])", "all_gather(float32[3, 1])"),
    (in_another_order, "reduce(float32[4], dst=0, SUM)", "broadcast(float32[4], src=0)"),
    (lambda: dist.all_reduce(a.to(narrow)), "(float16[4], SUM)", "(bfloat16[4], SUM)"),
    (lambda: dist.all_reduce(a.to(narrower)), "(float32[4], SUM)", "(float8_e5m2[4], SUM)"),
    (lambda: dist.broadcast(a.to(as_bytes), 0), "(float8_e4m3fn[4], src=0)", "(float8_e5m2[4], src=0)"),
    (lambda: dist.all_reduce(a, op), "(float32[4], SUM)", "(float32[4], PREMUL_SUM)"),
    (lambda: dist.all_gather_into_tensor(torch.cat([mine] * 2), mine), "(float32[4])", "(int64[2])"),
    (gather, "gather(float32[4], dst=0)", "gather(int64[2], dst=0)"),
    (lambda: dist.scatter(mine, None if me else [a, a]), "scatter(float32[4], src=0)", "(int64[2], src=0)"),
    (lambda: dist.all_to_all_single(torch.empty_like(mine), mine), "(float32[4])", "(int64[2])"),
    (all_to_all, "all_to_all([float32[4], float32[4]])", "all_to_all([int64[2], int64[2]])"),
    (lambda: dist.all_reduce(torch.ones(2 + me, 3)), "(float32[2, 3], SUM)", "(float32[3, 3], SUM)"),
    (splits, "split_sizes=[1, 3])", "split_sizes=[2, 2])"),
    (together, "all_reduce([float32[4], float32[2]], SUM)", "all_reduce([float32[2], float32[4]], SUM)"),
    (gathered_together, "_tensor([float32[1], float32[1]])", "all_gather_into_tensor(float32[1])"),
):
    texts = f"{there} on rank 0", f"{here} on rank 1"
    fails(lambda: (call(), dist.barrier()), "Desynchronised: call #1 of default_pg", *texts)
    fails(dist.barrier, there, here)
    again()
for sent, taken in (
    (a, torch.ones(2)),
    (a, b),
    (a.bool(), torch.ones(4, dtype=torch.int8)),
    (a.to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8)),
    (torch.ones(1 << 20), torch.ones(1 << 19)),
    (torch.ones(1 << 20), torch.ones(1 << 20, dtype=torch.int32)),
):
    sends, receives = (f"{str(x.dtype)[6:]}[{x.numel()}], " for x in (sent, taken))
    texts = f"send({sends}dst=1, tag=0) on rank 0", f"recv({receives}src=0, tag=0) on rank 1"
    if me:
        fails(lambda: dist.recv(taken, 0), "Desynchronised", *texts)
    elif sent.numel() > 4:  # it waits for its receiver
        fails(lambda: dist.send(sent, 1), "Desynchronised", *texts)
    else:
        dist.send(sent, 1)
        fails(dist.barrier, "Desynchronised", *texts)
    fails(dist.barrier, *texts)
    again()
dist.all_reduce(a)
dist.barrier()
print("good")
"""

EARLY = """
# Each rank but the first learns within the call who has left, and what it is missing in.
group = dist.new_group()
if me:
    dist.all_reduce(torch.ones(1))
    waits = [
        lambda: dist.all_reduce(torch.ones(2, 3)),
        lambda: dist.barrier(group),
        lambda: dist.recv(torch.ones(1), 0),
        lambda: dist.recv(torch.ones(1)),
        lambda: dist.send(torch.ones(1 << 20), 0),
        lambda: DistributedDataParallel(nn.Linear(2, 2)),
        lambda: dist.all_gather_object([None] * n, me),
        dist.new_group,
    ]
    call = "all_reduce(float32[2, 3], SUM) #2 of default_pg"
    fails(waits[0], f"rank 0 finished its script; {call} waits for it")
    for wait in waits[1:]:
        fails(wait, "rank 0", "finished its script")
    print("good")
else:
    dist.all_reduce(torch.ones(1))
    print("good")
"""

DESTROYED = """
other = dist.new_group()
if me == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    late = dist.irecv(torch.ones(1), 1)
    dist.destroy_process_group(other)
    dist.destroy_process_group()
    fails(work.wait, "all_reduce(float32[3], SUM) #1 of default_pg", "this rank destroyed its process group")
    fails(late.wait, "closed")
else:
    fails(lambda: dist.barrier(other), "rank 0 destroyed its process group; barrier() #1 of ")
    fails(lambda: dist.recv(torch.ones(1), 0), "rank 0 destroyed its process group")
    # Over TCP its part of the first may be here already.
    fails(lambda: (dist.all_reduce(torch.ones(3)), dist.barrier()), "rank 0 destroyed its process group")
print("good")
"""

KILLED = """
# A rank is killed. One that learns it from another, which has left its groups, names the death as well.
dist.all_reduce(torch.ones(1))
if me < n - 1:
    dist.send(torch.ones(1), n - 1)
else:
    for rank in range(n - 1):
        dist.recv(torch.ones(1), rank)
    os.kill(os.getpid(), signal.SIGKILL)
if me == 0:
    texts = f"peer rank{n - 1} lost", "all_reduce(float32[4], SUM) #2 of default_pg"
    fails(lambda: dist.all_reduce(torch.ones(4)), *texts)
    dist.destroy_process_group()
else:
    fails(lambda: dist.recv(torch.ones(1), 0), "")
    fails(lambda: dist.all_reduce(torch.ones(4)), f"peer rank{n - 1} lost")
print("good")
"""

MANY = """
import torch.distributed._functional_collectives as functional

COUNT = 5000
given = [torch.full((4,), float(k)) for k in range(COUNT)]
summed = [functional.all_reduce(x, "sum", dist.group.WORLD) for x in given]
assert all((functional.wait_tensor(x) == 2.0 * k).all() for k, x in enumerate(summed))
works = [dist.all_reduce(x, async_op=True) for x in given]
futures = [work.get_future() for work in works[::2]]
del works
torch.futures.wait_all(futures)
dist.barrier()
assert all((x == 2.0 * k).all() for k, x in enumerate(given))
x = torch.ones(2)
there = [dist.isend(torch.full((2,), float(k)), 1 - me, tag=k) for k in range(COUNT)]
back = [torch.empty(2) for _ in range(COUNT)]
for work in there + [dist.irecv(out, 1 - me, tag=k) for k, out in enumerate(back)]:
    work.wait()
assert all(out[0] == k for k, out in enumerate(back))

# As many groups at once as there can be; one more says so; closed ones can be had again at once.
kept = []
fails(lambda: [kept.append(dist.new_group()) for _ in range(99)], "process groups", "destroy")
assert len(kept) == 71
for _ in range(2):
    for group in kept:
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    kept = [dist.new_group() for _ in range(71)]
print("good")
"""

WRAPPED = """
import tempfile
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

assert dist.get_debug_level() == dist.DebugLevel.DETAIL


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def run(model, steps=2):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()


run(DistributedDataParallel(net()), 12)
run(DistributedDataParallel(net(), static_graph=True))
run(DistributedDataParallel(net(), find_unused_parameters=True, gradient_as_bucket_view=True))
model = DistributedDataParallel(net())
with model.join():
    run(model, 2 + me)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
run(model)
optimizer.step()
run(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
run(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True))
sharded = net()
fully_shard(sharded[0])
fully_shard(sharded)
run(sharded)
assert (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) == n).all()
mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("a",))
dist.all_reduce(torch.ones(1), group=mesh.get_group("a"))
distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
objects = [None] * n
dist.all_gather_object(objects, me)
where = [tempfile.mkdtemp() if me == 0 else None]
dist.broadcast_object_list(where)
checkpoint.save({"a": torch.ones(3)}, checkpoint_id=where[0])
with dist._coalescing_manager(async_ops=True) as many:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(2))
many.wait()
for more in ({}, {"use_local_synchronization": True}, {"backend": "gloo"}):
    group = dist.new_group(**more)
    dist.all_reduce(torch.ones(1), group=group)
    assert dist.ProcessGroup.unbox(group.boxed()) is not None
fails(lambda: dist.broadcast(torch.ones(1 + me), 0), "broadcast(float32[1], src=0)")
print("good")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("body", "ranks", "links", "variables"),
    [
        (MISMATCHED, 2, "auto", {}),
        (MISMATCHED, 2, "tcp", {}),
        (EARLY, 3, "auto", {}),
        (EARLY, 3, "tcp", {}),
        (DESTROYED, 3, "auto", {}),
        (DESTROYED, 3, "tcp", {}),
        (MANY, 2, "auto", {}),
        (WRAPPED, 2, "auto", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ],
    ids=[
        "mismatched",
        "mismatched over TCP",
        "early",
        "early over TCP",
        "destroyed",
        "destroyed over TCP",
        "many",
        "wrapped",
    ],
)
async def test_the_error_of_every_rank_names_what_happened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    ranks: int,
    links: str,
    variables: dict[str, str],
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_LINKS", links)
    script, output = tmp_path / "job.py", Lines()
    script.write_text(HEAD + body)
    config = HostConfig(
        target=str(script),
        world_size=ranks,
        on_loss=OnLoss.STOP,
        arena_bytes=32 << 20,
        environment=variables,
    )
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == ranks, "\n".join(output.lines)


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_a_death_is_named_by_who_hears_of_it_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_LINKS", links)
    script, output = tmp_path / "job.py", Lines()
    script.write_text(HEAD + KILLED)
    config = HostConfig(target=str(script), world_size=3, on_loss=OnLoss.SHRINK, arena_bytes=32 << 20)
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == 2, "\n".join(output.lines)
