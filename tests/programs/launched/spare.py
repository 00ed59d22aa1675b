"""A rank that counts steps with the others, whatever is killed, until the file `done` is there.

Arguments: the directory of that file, and how it behaves. "early": a spare of it reads its rank too early.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import zbmd
from zbmd.actors.process.spare import is_spare

DONE, HOW = Path(sys.argv[1]) / "done", sys.argv[2]


def main() -> None:
    """Count, and write who takes part in each view."""
    if HOW == "early" and is_spare():
        print(os.environ.get("RANK", "0"))
    print(f"begins {os.getpid()} spare={is_spare()}", flush=True)
    with zbmd.init() as worker:
        rank, number = worker.rank, os.environ["RANK"]
        print(f"rank {rank} {number} {os.environ['LOCAL_RANK']} is {os.getpid()}", flush=True)
        epoch, ends = 0, False
        while not ends:
            group = worker.group(after=epoch)
            epoch = group.epoch
            try:
                print(f"entered {epoch} with {len(group.members)}", flush=True)
                while not ends:
                    ends = group.all_reduce(np.array([float(DONE.exists())]), op="max")[0] > 0
            except zbmd.PeerLost:
                continue


main()
