"""The snapshot process of a host, which also writes checkpoints. Only its launcher starts it."""

from __future__ import annotations

import sys

from zbmd.actors.snapshots.holder import HeldMemory, HolderWork, run_holder


def _work(held: HeldMemory) -> HolderWork:
    """Make what writes. It imports numpy and codecs, which a process that only holds memory does without."""
    from zbmd.training.checkpoint.held.service import HeldCheckpoints

    return HeldCheckpoints(held)


if __name__ == "__main__":
    sys.exit(run_holder(sys.argv[1:], _work))
