"""Fixtures of the tests of the PyTorch backend: `zbmd-node` as a user starts it."""

from __future__ import annotations

from support.processes.launch_fixtures import launcher, template

__all__ = ["launcher", "template"]
