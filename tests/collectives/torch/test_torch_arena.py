"""Tensors in the arena: buffers of DDP and FSDP2 that ranks read in place. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

HEAD = """
import gc
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zbmd.torch
from zbmd.collectives.communicator import group_trials
from zbmd.collectives.torch.memory import arena
from zbmd.collectives.torch.tensors import bytes_over

if sys.argv[1] == "staged":  # as where the kernel lets no rank read another's memory
    group_trials._can_read = lambda told: False
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
dist.init_process_group("zbmd")
me, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def staged():
    return world.made.communicator.staged_bytes


def lies_in_arena(tensor):
    return arena().offset_of(bytes_over(tensor)) is not None


def fails(call, *texts):
    try:
        call()
    except Exception as error:
        assert all(text in str(error) for text in texts), (texts, str(error))
    else:
        raise AssertionError(f"nothing was raised; {texts} was expected")


def fill_the_arena():
    kept, size = [], 1 << 22
    while size >= 1 << 12:
        try:
            kept.append(zbmd.torch.empty(size))
        except Exception as error:
            assert "no room for" in str(error), error
            size //= 2
    return kept


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))


def train(model, steps, **zero):
    # Returns the bits of the gradients of each step, and the bytes that the last one has staged.
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(me)
    found = []
    for step in range(steps):
        before = staged()
        optimizer.zero_grad(**zero)
        model(torch.randn(16, 64, generator=data)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        found.append([gradient.clone() for gradient in local])
        optimizer.step()
    return found, staged() - before


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


"""

TENSORS = """
narrow = zbmd.torch.empty([4, 3], dtype=torch.bfloat16)
for tensor in (zbmd.torch.empty(4, 3), zbmd.torch.empty((4, 3)), narrow):
    assert tensor.shape == (4, 3) and tensor.is_contiguous() and lies_in_arena(tensor)
assert zbmd.torch.empty(0).shape == (0,) and zbmd.torch.empty(()).shape == ()
assert zbmd.torch.empty(3, dtype=torch.complex64).dtype is torch.complex64
x, y = zbmd.torch.empty(1 << 18).fill_(me), torch.full((1 << 18,), float(me))
before = staged()
dist.all_reduce(x, dist.ReduceOp.MAX)
assert staged() == before and (x == n - 1).all()
used = arena().used_bytes
views = [zbmd.torch.empty(1 << 18)[5:] for _ in range(2)]
assert arena().used_bytes == used + 2 * 4 * (1 << 18)
del views
assert arena().used_bytes == used
fails(lambda: zbmd.torch.empty(1 << 40), "no room for", "--arena")
fails(lambda: zbmd.torch.use_arena(net()), "expected DistributedDataParallel or a module with fully_shard")
fails(lambda: zbmd.torch.use_arena(DistributedDataParallel(net())), "gradient_as_bucket_view=True")
gloo = dist.new_group(backend="gloo")
gloo = DistributedDataParallel(net(), process_group=gloo, gradient_as_bucket_view=True)
fails(lambda: zbmd.torch.use_arena(gloo), "of another backend")
print("good")
"""

DDP = """
for more in ({}, {"static_graph": True}, {"bucket_cap_mb": 0.1}, {"find_unused_parameters": True}):
    for zero in ({}, {"set_to_none": False}):
        # Gradients that are views are divided by the number of ranks where others are multiplied.
        more["gradient_as_bucket_view"] = True
        plain, staged_plain = train(DistributedDataParallel(net(), **more), 6, **zero)
        moved = DistributedDataParallel(net(), **more)
        assert zbmd.torch.use_arena(moved) is moved
        found, staged_moved = train(moved, 6, **zero)
        assert same(plain, found), (more, zero)
        assert len(world.buckets.moved) > (1 if "bucket_cap_mb" in more else 0), (more, zero)
        assert all(lies_in_arena(parameter.grad) for parameter in moved.parameters()), (more, zero)
        assert staged_moved == 0 and (staged_plain > 0) == (sys.argv[1] == "staged"), staged_moved
        world.buckets = None
# Two models of one group, and one that has no room: it stays where it is.
views = {"gradient_as_bucket_view": True}
models = [zbmd.torch.use_arena(DistributedDataParallel(net(), **views)) for _ in range(2)]
found = train(models[0], 4)[0]
assert same(found, train(models[1], 4)[0])
assert all(lies_in_arena(parameter.grad) for model in models for parameter in model.parameters())
if sys.argv[1] != "staged":  # what is staged needs room as well
    taken = fill_the_arena()
    crowded = zbmd.torch.use_arena(DistributedDataParallel(net(), **views))
    assert same(train(crowded, 4)[0], found) and not lies_in_arena(next(crowded.parameters()).grad)
print("good")
"""

FSDP2 = """
def sharded(**more):
    model, mesh = net(), init_device_mesh("cpu", (n,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


for more in ({}, {"reshard_after_forward": False}):
    plain, staged_plain = train(sharded(**more), 4)
    model = sharded(**more)
    assert zbmd.torch.use_arena(model) is model
    used = arena().used_bytes
    found, staged_moved = train(model, 4)
    assert same(plain, found), more
    assert arena().used_bytes > used, "gradients are where they were reduced"
    assert staged_moved == 0 and (staged_plain > 0) == (sys.argv[1] == "staged"), staged_moved
    del model, found
    gc.collect()  # modules that FSDP2 has sharded refer to each other
    assert arena().used_bytes == used, "their memory is free again"
if sys.argv[1] != "staged":
    taken = fill_the_arena()
    assert same(train(zbmd.torch.use_arena(sharded(**more)), 4)[0], plain)
print("good")
"""


@pytest.mark.parametrize("reading", ["read", "staged"])
@pytest.mark.parametrize(
    ("body", "ranks"), [(TENSORS, 2), (DDP, 3), (FSDP2, 2)], ids=["tensors", "ddp", "fsdp2"]
)
async def test_what_lies_in_the_arena_is_reduced_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ranks: int, reading: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    script, output = tmp_path / "job.py", Lines()
    script.write_text(HEAD + body)
    config = HostConfig(
        target=str(script),
        arguments=(reading,),
        world_size=ranks,
        on_loss=OnLoss.STOP,
        arena_bytes=48 << 20,
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    )
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == ranks, "\n".join(output.lines)
