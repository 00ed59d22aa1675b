"""A run of `zbmd train` that the last rank holds up at a step; rank 0 has helpers; argv: step, its options.

One of the helpers is in a session of its own, as a daemon is. The others wait in the step that one rank never
begins, so what is killed then is surely in the middle of the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.jobs.by_words import train_by

HANG_AT, *ARGUMENTS = sys.argv[1:]


def before_step(version: int) -> None:
    if version == int(HANG_AT) and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        signal.pause()


if os.environ["RANK"] == "0":
    for apart in (False, True):
        helper = subprocess.Popen(["sleep", "1000"], start_new_session=apart)
    print("address", os.environ["ZBMD_NODE"])
train_by(ARGUMENTS, before_step)
