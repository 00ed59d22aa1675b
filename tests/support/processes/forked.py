"""Real processes for tests: forked, so that they start in a millisecond, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest

PR_SET_PDEATHSIG = 1
Fork = Callable[[Callable[[], None]], int]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Run a function in a forked child: `pid = fork(main)`. What is alive after the test is killed."""
    pids: list[int] = []

    def start(main: Callable[[], None]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            pids.append(pid)
            return pid
        faulthandler.disable()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        code = 1
        try:
            if os.getppid() in (parent, 0):  # 0: it is outside of our namespace of processes
                main()
                code = 0
        finally:
            if code:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
