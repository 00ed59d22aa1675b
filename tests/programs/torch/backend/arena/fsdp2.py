"""Gradients of FSDP2 in the arena: the same, nothing staged, and memory that is free again."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import sys

from programs.torch.backend.arena.common import fill_the_arena, n, net, room, same, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zbmd.torch


def sharded(**more):
    model, mesh = net(), init_device_mesh("cpu", (n,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


for more in ({}, {"reshard_after_forward": False}):
    plain, staged_plain = train(sharded(**more), 4)
    model = sharded(**more)
    assert zbmd.torch.use_arena(model) is model
    used = room().used_bytes
    found, staged_moved = train(model, 4)
    assert same(plain, found), more
    assert room().used_bytes > used, "gradients are where they were reduced"
    assert staged_moved == 0 and (staged_plain > 0) == (sys.argv[1] == "staged"), staged_moved
    del model, found
    gc.collect()  # modules that FSDP2 has sharded refer to each other
    assert room().used_bytes == used, "their memory is free again"
if sys.argv[1] != "staged":
    taken = fill_the_arena()
    assert same(train(zbmd.torch.use_arena(sharded(**more)), 4)[0], plain)
print("good")
