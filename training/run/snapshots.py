"""The snapshot process of a host, which also writes checkpoints (`checkpoint.held`) of logged steps.

Only its launcher starts it, by `python -m zbmd.training.run.snapshots`.
"""

from __future__ import annotations

import importlib
import os
import sys

from zbmd.actors.snapshots.holder import HeldMemory, HolderWork, run_holder
from zbmd.transport import kill_points as faults

PROCESS = "snapshots"
"""Its name among the processes that kill themselves; the incarnation counts those of a job."""
IMPORTED = ("zbmd.training.checkpoint.held.service", "zbmd.training.run.ledger")


def _work(held: HeldMemory) -> HolderWork:
    """Make what writes, for the first checkpoint."""
    from zbmd.training.checkpoint.held.service import HeldCheckpoints
    from zbmd.training.run.ledger import logged_in

    every = faults.parse(os.environ.get(faults.FAULT_VARIABLE, ""))
    faults.arm(PROCESS, held.number, faults.spelled(each for each in every if each.process == PROCESS))
    return HeldCheckpoints(held, logged_in)


def _prepare() -> None:
    for name in IMPORTED:
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(run_holder(sys.argv[1:], _work, prepare=_prepare))
