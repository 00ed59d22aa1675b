"""Buckets of DDP in the arena: the same gradients, and nothing staged."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys

from programs.torch.backend.arena.common import fill_the_arena, lies_in_arena, net, same, train, world
from programs.torch.backend.common import DistributedDataParallel

import zbmd.torch


def buckets():
    return world.buckets


for more in ({}, {"static_graph": True}, {"bucket_cap_mb": 0.1}, {"find_unused_parameters": True}):
    for zero in ({}, {"set_to_none": False}):
        # Gradients that are views are divided by the number of ranks where others are multiplied.
        more["gradient_as_bucket_view"] = True
        plain, staged_plain = train(DistributedDataParallel(net(), **more), 6, **zero)
        moved = DistributedDataParallel(net(), **more)
        assert zbmd.torch.use_arena(moved) is moved
        found, staged_moved = train(moved, 6, **zero)
        assert same(plain, found), (more, zero)
        assert len(buckets().moved) > (1 if "bucket_cap_mb" in more else 0), (more, zero)
        assert all(lies_in_arena(parameter.grad) for parameter in moved.parameters()), (more, zero)
        used = 100 if "find_unused_parameters" in more else 0  # the map of used parameters is no bucket
        assert staged_moved <= used < staged_plain or sys.argv[1] != "staged", (staged_moved, staged_plain)
        assert staged_moved == staged_plain == 0 or sys.argv[1] == "staged", (staged_moved, staged_plain)
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
