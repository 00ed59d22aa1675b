"""The priority of a thread: it gets what the process may have, and what it forks does not inherit it."""

from __future__ import annotations

import os
import threading

from zbmd.transport.host.process import ThreadPriority, raise_thread_priority


def policy_here() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_one_thread_and_nobody_else_is_urgent() -> None:
    found: list[tuple[ThreadPriority, int, int]] = []

    def run() -> None:
        got = raise_thread_priority()
        mine = policy_here()
        child = os.fork()
        if not child:
            os._exit(policy_here())
        found.append((got, mine, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((got, mine, of_child),) = found
    assert (got is ThreadPriority.REAL_TIME) == (mine == os.SCHED_RR)
    assert of_child == policy_here() == os.SCHED_OTHER
