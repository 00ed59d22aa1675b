"""The last rank is killed while others wait for it."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal
from datetime import timedelta

from programs.torch.backend.common import begin, dist, fails, torch

me, n = begin(timeout=timedelta(minutes=5))

# A rank is killed. One that learns it from another, which has left its groups, names the death as well.
dist.all_reduce(torch.ones(1))
if me < n - 1:
    dist.send(torch.ones(1), n - 1)
else:
    for rank in range(n - 1):
        dist.recv(torch.ones(1), rank)
    os.kill(os.getpid(), signal.SIGKILL)
if me == 0:
    texts = f"peer rank{n - 1} lost", "in all_reduce(float32[4], SUM) #2 of default_pg; destroy the"
    fails(lambda: dist.all_reduce(torch.ones(4)), *texts)
    dist.destroy_process_group()
else:
    fails(lambda: dist.recv(torch.ones(1), 0), "")
    fails(lambda: dist.all_reduce(torch.ones(4)), f"peer rank{n - 1} lost")
print("good")
