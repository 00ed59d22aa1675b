"""Ranks die in a step, before they meet the others in a new group, and after it."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal

from programs.torch.backend.common import dist, torch

from zbmd.collectives.torch import rendezvous

KILLED = {(1, 1): "step", (1, 2): "before", (0, 1): "behind"}  # (rank, incarnation): where it dies
end = KILLED.get((int(os.environ["RANK"]), int(os.environ["ZBMD_INCARNATION"])))
share, meetings = rendezvous._shared_store, 0


def shared_store(*args):
    global meetings
    meetings += 1
    if end == "before" or (end == "behind" and meetings == 2):
        if end == "behind":
            share(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return share(*args)


rendezvous._shared_store = shared_store
for _ in range(8):
    dist.init_process_group("zbmd")
    try:
        for step in range(4):
            if end == "step" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.ones(3)
            dist.all_reduce(total)
            sub = dist.new_group([0, 2])  # which uses the store
        break
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
assert total[0] == 3 and dist.get_world_size() == 3
stores = [None] * 3
dist.all_gather_object(stores, str(dist.distributed_c10d._get_default_store()))
print("good")
dist.destroy_process_group()
