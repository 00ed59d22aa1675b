"""A job of which rank 3 waits for its end before it votes in step 4; argv: that of `zbmd`."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from zbmd.tools.entry import zbmd
from zbmd.training.redundancy.buddy import BuddyReplica

votes, vote = 0, BuddyReplica.vote


def held_up(self: BuddyReplica) -> Any:
    global votes
    votes += 1
    if os.environ["RANK"] == "3" and votes == 4 and os.environ["ZBMD_INCARNATION"] == "1":
        print("rank 3 stands still in step 4", flush=True)
        threading.Event().wait()
    return vote(self)


BuddyReplica.vote = held_up
sys.exit(zbmd.main())
