"""Stand for a node: print that it is up, or exit where its host is down. `node.py HOST DIRECTORY`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

host, directory = sys.argv[1], Path(sys.argv[2])
if (directory / f"down-{host}").exists():
    sys.exit(f"{host} is down")
print(f"[zbmd]: {host} (node1#1) at x: view 1: {host}", flush=True)
signal.pause()
