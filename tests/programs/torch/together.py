"""Run a script whose ranks, once each has come to where it is to be killed, are killed together.

A rank that were killed alone could be replaced, and get its state from one that is late. Arguments: a
directory that the ranks share, their number, and the script.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from support.processes.polling import until

from zbmd.transport import kill_points

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
kill_at_once = kill_points.die


def kill_together() -> NoReturn:
    """Kill this process when all ranks are here."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / os.environ["RANK"]).touch()
    asyncio.run(until(lambda: len(list(FOLDER.iterdir())) == RANKS))
    kill_at_once()


kill_points.die = kill_together
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
