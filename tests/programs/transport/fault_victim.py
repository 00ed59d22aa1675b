"""Passes two kill points in turn, prints what it survived, and ends with its input.

Arguments: its process, its incarnation, and its job.
"""

from __future__ import annotations

import sys

from zbmd.transport import kill_points as faults

here, there = faults.declare("a.here", "one"), faults.declare("a.there", "two")
faults.arm(sys.argv[1], int(sys.argv[2]), job=int(sys.argv[3]))
for turn in range(4):
    faults.hit(here)
    print("here", turn, flush=True)
    faults.hit(there)
    print("there", turn, flush=True)
sys.stdin.read()
