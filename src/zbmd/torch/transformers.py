"""Hugging Face's `Trainer` as a loop that survives losses: `resilient(trainer)`. See docs/GUIDE_TORCH.md."""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.training.torch.frameworks.trainer import resilient as resilient
