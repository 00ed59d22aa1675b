"""The `torch.distributed` backend `zbmd`; see docs/GUIDE_TORCH.md.

Importing this module registers the backend, so `dist.init_process_group("zbmd")` finds it. `import zbmd`
alone imports neither this nor PyTorch.
"""

from __future__ import annotations

import importlib

from zbmd.collectives.torch.backend import BACKEND as BACKEND
from zbmd.collectives.torch.backend import register as register
from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals(), "BACKEND", "register"):
    from zbmd.training.torch.run import Run as Run
    from zbmd.training.torch.run import resilient as resilient

# The points at which a test kills a rank must be declared before it joins; the loop itself is imported late.
importlib.import_module("zbmd.training.torch.points")
register()
