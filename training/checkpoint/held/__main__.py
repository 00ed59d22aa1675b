"""The snapshot process of a host, which also writes checkpoints. Only its launcher starts it."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

from zbmd.actors.snapshots.holder import HeldMemory, HolderWork, run_holder
from zbmd.transport import kill_points as faults

PROCESS = "snapshots"
"""Its name among the processes that kill themselves; the incarnation counts those of a job."""
SERVICE = "zbmd.training.checkpoint.held.service"


def _work(held: HeldMemory) -> HolderWork:
    """Make what writes, for the first checkpoint."""
    from zbmd.training.checkpoint.held.service import HeldCheckpoints

    every = faults.parse(os.environ.get(faults.FAULT_VARIABLE, ""))
    faults.arm(PROCESS, held.number, faults.spelled(each for each in every if each.process == PROCESS))
    return HeldCheckpoints(held)


if __name__ == "__main__":
    sys.exit(run_holder(sys.argv[1:], _work, prepare=partial(importlib.import_module, SERVICE)))
