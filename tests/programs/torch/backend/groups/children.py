"""Ranks that have child processes: a child cannot use the group, and the rank can go on."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from programs.torch.backend.common import dist, torch
from torch.utils.data import DataLoader


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def new_group():
    dist.new_group([dist.get_rank()])


def main():
    dist.init_process_group("zbmd")
    dist.all_reduce(torch.ones(1))
    for call, code in ((dist.barrier, 7), (dist.destroy_process_group, 5), (new_group, 7)):
        pid = os.fork()
        if pid == 0:
            try:
                call()
            except RuntimeError:
                sys.exit(7)
            sys.exit(5)
        assert ended(pid) == code, call
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=print, args=("a child",))
        child.start()
        child.join()
        assert child.exitcode == 0
    numbers: Any = range(100)
    for _ in range(2):
        batches = DataLoader(numbers, batch_size=8, num_workers=2)
        assert sum(int(batch.sum()) for batch in batches) == 4950
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x[0] == 2
    print("good")


if __name__ == "__main__":  # a child by `spawn` runs this file again
    main()
