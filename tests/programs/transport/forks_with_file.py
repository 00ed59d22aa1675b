"""Take the file of blocks that a launcher gives, fork as a loader does for its workers, and be killed.

The child prints a line, and lives until its standard input ends.
"""

from __future__ import annotations

import os
import signal
import sys

from zbmd.transport.memory.kept import take_kept_file

assert take_kept_file(os.environ, wait_ms=0) is not None
assert take_kept_file(os.environ, wait_ms=0) is None, "it is taken once"
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
