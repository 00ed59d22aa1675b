"""`zbmd` whose last rank waits before each step of `GATES` until the file `go` and its number is there.

The others wait for it in that step: a slow test finds the run where it wants it. A snapshot process that is
there is found in the next step, as there are no more than a few; one that a test has stopped is waited for.
argv: that of `zbmd`.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path

from zbmd.tools.demo.overhead import timed_task
from zbmd.tools.entry import zbmd
from zbmd.tools.train import command
from zbmd.training.checkpoint.held import line
from zbmd.training.sharded.run import train

POLL_S = 0.02
GATES = {int(number) for number in os.environ.get("GATES", "").split(",") if number}
IS_LAST = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def before_step(version: int) -> None:
    """Wait at a gate, on the training thread."""
    while IS_LAST and version in GATES and not Path(f"go{version}").exists():
        threading.Event().wait(POLL_S)


trained = partial(train, task_of=timed_task(before_step))
for module, name, value in (
    (line, "LOOK_S", 0.0),
    (line, "LOOK_SHARE", 0),
    (line, "SILENT_S", 120.0),
    (command, "train", trained),
):
    setattr(module, name, value)
sys.exit(zbmd.main())
