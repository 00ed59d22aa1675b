"""A rank that ends, and leaves a process which waits for its input."""

from __future__ import annotations

import os
import subprocess
import sys

READ = "import sys; sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", READ], stdin=subprocess.PIPE, close_fds=True)
print("done")
os._exit(0)
