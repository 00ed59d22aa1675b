"""Records a capture in a folder, in the way that is named. Arguments: the folder, a name of `CASES`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from zbmd.transport import capture
from zbmd.transport.clock.hlc import HybridClock

log = capture.LogRecorder(
    Path(sys.argv[1]),
    capture.Origin(process="rank0", incarnation=1),
    capture.Clocks(hybrid=HybridClock()),
)


def killed() -> None:
    for i in range(1000):
        log.mark(0, i)
    assert log.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def ends() -> None:
    for i in range(1000):
        log.mark(0, i)


def forks() -> None:
    log.note("before")
    log.flush()
    before = set(os.listdir("/proc/self/fd"))
    pid = os.fork()
    if pid == 0:
        log.note("from the child")
        log.close()
        kept = [f"/proc/self/fd/{fd}" for fd in before if os.path.exists(f"/proc/self/fd/{fd}")]
        os._exit(any("zlog" in os.readlink(path) for path in kept))
    _, status = os.waitpid(pid, 0)
    log.note("after")
    log.close()
    sys.exit(os.waitstatus_to_exitcode(status))


def fills_its_disk() -> None:
    for _ in range(200):
        log.note(os.urandom(200).hex())
        log.flush()
    assert log.failure == os.strerror(27), log.failure
    assert not log._buffer
    print("the job goes on")


CASES = {case.__name__: case for case in (killed, ends, forks, fills_its_disk)}
CASES[sys.argv[2]]()
