"""A run of `zbmd train` that the last rank holds up at a step; rank 0 has helpers; argv: step, its options.

One of the helpers is in a session of its own, as a daemon is. The others wait in the step that one rank never
begins, so what is killed then is surely in the middle of the run. A checkpoint of step 2 is whole then: its
writers have few processors beside short steps, so steps wait for them, and votes for it are between.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.jobs.by_words import train_by
from support.jobs.writer_work import counted

from zbmd.training.checkpoint import saving

HANG_AT, *ARGUMENTS = sys.argv[1:]
WRITTEN_BEFORE, NAMED_BEFORE = 4, 6
WORK = counted()


def before_step(version: int) -> None:
    if version == WRITTEN_BEFORE:
        WORK.until(saving.Wrote)
    elif version == NAMED_BEFORE and os.environ["RANK"] == "0":
        WORK.until(saving.Published)
    if version == int(HANG_AT) and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        signal.pause()


if os.environ["RANK"] == "0":
    for apart in (False, True):
        helper = subprocess.Popen(["sleep", "1000"], start_new_session=apart)
    print("address", os.environ["ZBMD_NODE"])
train_by(ARGUMENTS, before_step)
