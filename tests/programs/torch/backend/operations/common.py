"""Shared by the programs of this folder: the group of all ranks, and tensors of a rank."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

from programs.torch.backend.common import begin, dist, torch

me, n = begin(timeout=timedelta(minutes=2))
world = dist.group.WORLD
total = sum(range(n))


def mine(*shape, dtype=torch.float32):
    return torch.full(shape, me).to(dtype)


def same(tensor, value):
    assert (tensor.to(torch.float64) == value).all(), (tensor, value)
