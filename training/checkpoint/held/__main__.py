"""The snapshot process of a host, which also writes checkpoints. Only its launcher starts it."""

from __future__ import annotations

import os
import sys

from zbmd.actors.snapshots.holder import HeldMemory, HolderWork, run_holder
from zbmd.transport import kill_points as faults

PROCESS = "snapshots"
"""Its name among the processes that kill themselves; the incarnation counts those of a job."""


def _work(held: HeldMemory) -> HolderWork:
    """Make what writes. It imports numpy and codecs, which a process that only holds memory does without."""
    from zbmd.training.checkpoint.held.service import HeldCheckpoints

    own = [
        str(each)
        for each in faults.parse(os.environ.get(faults.FAULT_VARIABLE, ""))
        if each.process == PROCESS
    ]
    faults.arm(PROCESS, held.number, ",".join(own))
    return HeldCheckpoints(held)


if __name__ == "__main__":
    sys.exit(run_holder(sys.argv[1:], _work))
