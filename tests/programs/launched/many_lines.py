"""Ranks that print 3000 lines, and end in the midst of one of standard error; rank 0 leaves at once."""

from __future__ import annotations

import os
import sys

rank = os.environ["RANK"]
for i in range(3000):
    print(rank * 80, i)
sys.stderr.write("no newline at the end")
sys.stderr.flush()
if rank == "0":
    os._exit(0)
