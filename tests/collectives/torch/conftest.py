"""Fixtures of the tests of the PyTorch backend: `zbmd-node` as a user starts it, and ranks under a host."""

from __future__ import annotations

from support.jobs.resilient_loops import warm
from support.jobs.torch_ranks import run_ranks
from support.processes.launch_fixtures import launcher, template

__all__ = ["launcher", "run_ranks", "template", "warm"]
