"""Imports each module of an installed `zbmd` that needs no extra, and calls compiled code."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import zbmd

assert zbmd.__file__ is not None and "site-packages" in zbmd.__file__, zbmd.__file__
BEHIND_AN_EXTRA = (
    "zbmd.collectives.torch.",
    "zbmd.training.torch.",
    "zbmd.tools.bench.peers.xoscar_pair",
    "zbmd.torch",
    "zbmd.transport.rdma.native._rdma",
    "zbmd.transport.rdma.p",
    "zbmd.transport.rdma.plane",
)
for found in pkgutil.walk_packages(zbmd.__path__, "zbmd.", onerror=lambda name: None):
    if not found.name.startswith(BEHIND_AN_EXTRA):
        importlib.import_module(found.name)
assert not {"torch", "cupy", "pyverbs"} & sys.modules.keys()

stepper = importlib.import_module("zbmd.collectives.native._stepper")
native = importlib.import_module("zbmd.transport.native._native")
assert str(stepper.__file__).endswith(".so") and str(native.__file__).endswith(".so")
first_ns = native.now_ns()
assert 0 < first_ns <= native.now_ns()
print("probe passed")
