"""Three ranks that one process makes: by `mp.spawn`, `multiprocessing` or `os.fork`; then init methods.

Arguments: how, and the init method.

A line is written by one call: torchrun starts Python without a buffer, and ranks share a pipe.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from programs.torch.launched import check

dist: Any = importlib.import_module("torch.distributed")


RANKS = 3
BACKENDS = ("zbmd", "cpu:zbmd", *(["cpu:zbmd,cuda:nccl"] if dist.is_nccl_available() else []))
"""A build without NCCL has none to put beside ours."""


def rank(me: int, init_method: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    for number, backend in enumerate(BACKENDS):
        # A file that ranks have met in ends with the last of their stores; a port may be used again at once.
        method = f"{init_method}{number}" if init_method.startswith("file:") else init_method
        dist.init_process_group(backend, init_method=method, rank=me, world_size=RANKS)
        check()
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.write(f"rank {me} of {RANKS} is good\n")


def forked(init_method: str) -> None:
    """Make ranks by `os.fork`."""
    children = []
    for me in range(RANKS):
        pid = os.fork()
        if pid == 0:
            rank(me, init_method)
            sys.exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * RANKS, codes


def main(how: str, init_method: str) -> None:
    """Start the ranks, and wait for their end."""
    if how == "os.fork":
        forked(init_method)
    else:
        start: Any = importlib.import_module("torch.multiprocessing").start_processes
        start(rank, args=(init_method,), nprocs=RANKS, start_method=how)


if __name__ == "__main__":
    main(*sys.argv[1:])
