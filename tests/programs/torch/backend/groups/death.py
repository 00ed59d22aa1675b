"""A rank dies in DDP; the others get an error, and train on in a new group."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal

from programs.torch.backend.common import DistributedDataParallel, dist, nn, torch


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    for step in range(6):
        if step == 3 and dist.get_rank() == 1 and os.environ["ZBMD_INCARNATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 8)).sum().backward()


told = []
while True:
    dist.init_process_group("zbmd")  # its timeout is half an hour: what ends a wait sooner is the notice
    try:
        train()
        break
    except RuntimeError as error:
        assert "peer rank1 lost" in str(error), error
        told.append(error)
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        assert error.__cause__ is not None, error
    else:
        raise AssertionError("a group that has lost a member takes no more operations")
    dist.destroy_process_group()
assert len(told) == (dist.get_rank() != 1), told
total = torch.ones(3)
dist.all_reduce(total)
assert total[0] == 3
print("good")
dist.destroy_process_group()
