"""Counts in a file of the folder that is given, forks a child that counts in none, and is killed."""

from __future__ import annotations

import os
import sys

import zbmd

rows = zbmd.metrics.counter("rows")
zbmd.metrics.record_to(sys.argv[1])
rows.add(1)
if (child := os.fork()) == 0:
    rows.add(100)
    zbmd.metrics.flush()
    sys.exit()
os.waitpid(child, 0)
rows.add(1)
print("counted", flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
