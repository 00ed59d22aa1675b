"""A rank that shows the variables named as arguments, and how many threads it has after a matrix product."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

print(*(os.environ[name] for name in sys.argv[1:]))
_ = np.ones((300, 300)) @ np.ones((300, 300))  # after which its pool is there
print("tasks", len(list(Path("/proc/self/task").iterdir())))
