"""Threads that must run when due, on a busy machine too: those whose silence is taken for a death."""

from __future__ import annotations

import os
import threading
from enum import Enum
from typing import Final

PRIORITY: Final = 1
"""The lowest of the real-time ones: above all that computes, below all that the kernel does."""
NICE: Final = -15


class Urgency(Enum):
    """What a thread was given."""

    REAL_TIME = "real-time priority"
    NICE = "a high share"
    NONE = "no priority: CAP_SYS_NICE, RLIMIT_RTPRIO or RLIMIT_NICE would allow it"


def ask_for_priority() -> Urgency:
    """Have the calling thread run before those that compute, as far as this process may; what it got.

    For threads that sleep nearly always. Real-time threads share their core in turn (SCHED_RR), the kernel
    keeps a part of it for the others, and processes that are forked from such a thread do not inherit it.
    """
    try:
        # 0 is the calling thread: sched_setscheduler(2) is about threads.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        except OSError:
            return Urgency.NONE
        return Urgency.NICE
    return Urgency.REAL_TIME
