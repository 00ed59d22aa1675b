"""The loop of `resilient_ddp.py`; each process says which one it is, at its begin and at its end."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

WHO = f"rank {os.environ['RANK']} is process {os.getpid()}, task {os.environ.get('SLURM_PROCID', '-')}"

print(f"begun: {WHO}", flush=True)
print(f"told on standard error by rank {os.environ['RANK']}", file=sys.stderr, flush=True)
runpy.run_path(str(Path(__file__).with_name("resilient_ddp.py")), run_name="__main__")
print(f"ended: {WHO}", flush=True)
