"""Real processes, forked."""

from __future__ import annotations

from forked import fork

__all__ = ["fork"]
