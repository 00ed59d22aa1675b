"""Ends in the way that is named, with a ring that a crash writes down. Arguments: a folder, a case."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from zbmd.transport import capture
from zbmd.transport.clock.hlc import HybridClock

origin = capture.Origin(process="rank0", incarnation=1)
ring = capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()))
undo = capture.dump_on_crash(ring, Path(sys.argv[1]))
ring.note("before the crash")


def exception() -> None:
    raise ValueError("odd")


def abort() -> None:
    signal.raise_signal(signal.SIGABRT)
    signal.pause()


def quits() -> None:
    signal.raise_signal(signal.SIGQUIT)
    signal.pause()


def thread() -> None:
    failing = threading.Thread(target=lambda: 1 / 0, name="worker")
    failing.start()
    failing.join()


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends() -> None:
    sys.exit(3)


def undone() -> None:
    undo()
    raise ValueError


def forked_child() -> None:
    pid = os.fork()
    if pid == 0:
        raise ValueError("in the child")
    os.waitpid(pid, 0)


CASES = {
    case.__name__: case for case in (exception, abort, quits, thread, sigkill, ends, undone, forked_child)
}
CASES[sys.argv[2]]()
