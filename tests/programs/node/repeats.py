"""A rank that fails in the same way in every incarnation: by an error, or by taking all memory there is."""

import os
import sys
import time

import zbmd

how = sys.argv[1]
incarnation = int(os.environ["ZBMD_INCARNATION"])


def fail() -> None:
    if how == "memory":
        held = []
        while True:
            held.append(b"x" * (16 << 20))
    time.sleep(0)
    raise ValueError(f"no {incarnation} at 0x{id(how):x}")


with zbmd.init() as worker:
    print(f"begun {incarnation}", flush=True)
    if worker.rank == 1:
        fail()
    epoch = 1
    while True:  # a survivor that goes on with every replacement
        epoch = worker.view(after=epoch).epoch
