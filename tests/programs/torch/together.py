"""Run a script whose ranks, once each has come to where it is to be killed, are killed together.

A rank that were killed alone could be replaced, and get its state from one that is late. Arguments: a
directory that the ranks share, their number, and the script. Variable AT: a kill point; ranks are killed
there once so many have come to it, those that live on too, and elsewhere at once.
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
from zbmd.transport.kill_points import Point

FOLDER, RANKS, AT = Path(sys.argv[1]), int(sys.argv[2]), os.environ.get("AT", "")
hit_alone, kill_at_once, last = kill_points.hit, kill_points.die, ""


def come() -> None:
    """Say that this rank is here."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / os.environ["RANK"]).touch()


def hit(point: Point) -> None:
    """Pass a point."""
    global last
    last = point
    if point == AT:
        come()
    hit_alone(point)


def kill_together() -> NoReturn:
    """Kill this process when all ranks are here."""
    if last == AT or not AT:
        come()
        asyncio.run(until(lambda: len(list(FOLDER.iterdir())) == RANKS))
    kill_at_once()


kill_points.hit, kill_points.die = hit, kill_together
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
