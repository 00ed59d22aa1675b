"""The `torch.distributed` backend `zbmd`; see docs/GUIDE_TORCH.md.

Importing this module registers the backend, so `dist.init_process_group("zbmd")` finds it. `import zbmd`
alone imports neither this nor PyTorch.
"""

from __future__ import annotations

from zbmd.collectives.torch.backend import BACKEND, register

__all__ = ["BACKEND", "register"]

register()
