"""Importing this makes the backend `zbmd` known to `torch.distributed`: see docs/GUIDE_TORCH.md."""

from __future__ import annotations

from zbmd.collectives.torch.backend import register

register()
