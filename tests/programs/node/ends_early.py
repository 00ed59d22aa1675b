"""Rank 0 has less to do and ends; another one fails for want of it, or elsewhere."""

import os
import select
import sys

import numpy

import zbmd

with zbmd.init() as worker:
    group = worker.group()
    pids = group.all_gather(numpy.array([os.getpid()]))
    if worker.rank:
        if sys.argv[1] == "waits":
            try:
                group.barrier()
            except zbmd.ZbmdError as error:
                print(error, flush=True)
        first = os.pidfd_open(int(pids[0].item()))
        select.select([first], [], [])  # until it is gone
        sys.exit(5)
