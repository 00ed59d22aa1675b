"""Lightning's `Trainer.fit` as a loop that survives losses: the strategies `Resilient` (DDP) and
`ResilientModelParallel` (FSDP2).

See docs/GUIDE_TORCH.md.
"""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.training.torch.frameworks.fit import Resilient as Resilient
    from zbmd.training.torch.frameworks.fit import ResilientModelParallel as ResilientModelParallel
