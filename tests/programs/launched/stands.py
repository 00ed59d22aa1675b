"""Run a script whose ranks stand still where they are to be killed, so that all can be killed at once.

Arguments: the script. A rank that stands prints `rank R stands`; without a fault this is the script alone.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from zbmd.transport import kill_points


def stand() -> None:
    """Say so, and wait for the end of this process."""
    print(f"rank {os.environ['RANK']} stands", flush=True)
    while True:
        signal.pause()


kill_points.die = stand  # type: ignore[assignment]
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
