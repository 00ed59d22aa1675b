"""A rank that says that it is there, and waits for signals, until a file exists: `FILE [EXIT_CODE]`.

Then it ends, with the exit code if it is rank 1.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

dist: Any = importlib.import_module("torch.distributed")
torch: Any = importlib.import_module("torch")

dist.init_process_group("zbmd")
rank = dist.get_rank()


def heard(number: int, _: object) -> None:
    print(f"rank {rank} has {signal.Signals(number).name}", flush=True)


signal.signal(signal.SIGUSR1, heard)
x = torch.ones(1)
dist.all_reduce(x)
if not Path(sys.argv[1]).exists():
    print(f"rank {rank} of {x.item():.0f} waits: {os.getpid()}", flush=True)
    while True:
        signal.pause()
dist.destroy_process_group()
print(f"rank {rank} of {x.item():.0f} is good", flush=True)
sys.exit(int(sys.argv[2]) if rank == 1 and sys.argv[2:] else 0)
