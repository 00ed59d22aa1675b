"""The `torch.distributed` backend `zbmd`; see docs/GUIDE_TORCH.md.

Importing this package registers the backend, so `dist.init_process_group("zbmd")` finds it. `import zbmd`
alone imports neither this nor PyTorch.
"""

from __future__ import annotations

import importlib
import sys

from zbmd.collectives.torch.backend import BACKEND as BACKEND
from zbmd.collectives.torch.backend import register as register
from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals(), "BACKEND", "register"):
    from zbmd.collectives.torch.memory import empty as empty
    from zbmd.collectives.torch.memory import use_arena as use_arena
    from zbmd.training.torch.resilient import resilient as resilient
    from zbmd.training.torch.run import Run as Run

# `python -m zbmd.torch.run` imports this package first, with "-m" in the place of the program's path. It
# supervises ranks, and needs nothing of PyTorch.
if not (sys.argv[:1] == ["-m"] and "zbmd.torch.run" in sys.orig_argv):
    # The points at which a test kills a rank must be declared before it joins; the loop is imported late.
    importlib.import_module("zbmd.training.torch.points")
    register()
