"""Fixtures of the tests of PyTorch's loops: the process that templates of their ranks are forked from."""

from __future__ import annotations

from support.jobs.resilient_loops import warm

__all__ = ["warm"]
