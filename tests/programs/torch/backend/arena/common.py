"""Shared by the programs of this folder: a model, its training, and where its gradients lie."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from functools import partial

from programs.torch.backend import common
from programs.torch.backend.common import begin, dist, nn, torch

import zbmd.torch
from zbmd.collectives.communicator import group_trials
from zbmd.collectives.communicator.cost_model import ONE_HOST
from zbmd.collectives.torch.memory import arena
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.transport.errors import ArenaFull, ZbmdError

if sys.argv[1] == "staged":  # as where the kernel lets no rank read another's memory
    group_trials._can_read = lambda told: False
me, n = begin()
world = dist.group.WORLD
# What was measured on a busy machine may stand for algorithms that read no memory of a peer.
world.made.communicator.model = ONE_HOST
fails = partial(common.fails, kind=ZbmdError)


def staged():
    return world.made.communicator.staged_bytes


def room():
    mine = arena()
    assert mine is not None
    return mine


def lies_in_arena(tensor):
    return room().offset_of(bytes_over(tensor)) is not None


def fill_the_arena():
    kept, size = [], 1 << 22
    while size >= 1 << 12:
        try:
            kept.append(zbmd.torch.empty(size))
        except ArenaFull as error:
            assert "no room for" in str(error), error
            size //= 2
    return kept


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))


def train(model, steps, **zero):
    # Returns the bits of the gradients of each step, and the bytes that all ranks together have staged in the
    # last one: a rank that comes last reads those of the others, and stages nothing.
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(me)
    found = []
    for _ in range(steps):
        before = staged()
        optimizer.zero_grad(**zero)
        model(torch.randn(16, 64, generator=data)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        found.append([gradient.clone() for gradient in local])
        optimizer.step()
    counts = torch.tensor([staged() - before])
    dist.all_reduce(counts)
    return found, counts.item()


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
