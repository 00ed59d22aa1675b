"""Real processes, forked."""

from __future__ import annotations

from support.processes.forked import fork

__all__ = ["fork"]
