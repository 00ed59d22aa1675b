"""The `torch.distributed` backend `zbmd`; see docs/GUIDE_TORCH.md.

Importing this module registers the backend, so `dist.init_process_group("zbmd")` finds it. `import zbmd`
alone imports neither this nor PyTorch.
"""

from __future__ import annotations

from zbmd.collectives.torch.backend import register
from zbmd.lazy_imports import lazy_imports
from zbmd.training.torch import points

with lazy_imports(globals(), "BACKEND", "register"):
    from zbmd.training.torch.run import Run as Run
    from zbmd.training.torch.run import resilient as resilient

assert points.BEGIN  # declared before ranks join, which know then at which points they may be killed

register()
