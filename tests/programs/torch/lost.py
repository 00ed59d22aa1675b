"""Three ranks of which one dies: the others get a typed error, meet again without it, and go on."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from programs.torch.launched import check

from zbmd.collectives.errors import MembersLost
from zbmd.transport.errors import DeadlineExceeded, PeerLost

dist: Any = importlib.import_module("torch.distributed")

torch.set_num_threads(1)
me, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 3)
dist.init_process_group("zbmd", store=store, rank=me, world_size=3)
check()
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)  # the one that started the supervisor
try:
    dist.all_reduce(torch.ones(3))
except dist.DistBackendError as error:
    assert isinstance(error.__cause__, PeerLost) and "rank0 lost" in str(error), repr(error.__cause__)
else:
    raise AssertionError("rank 0 is dead")
try:
    dist.new_group([1, 2])
except dist.DistBackendError as error:
    assert isinstance(error.__cause__, MembersLost) and "initialise again" in str(error), repr(error)
else:
    raise AssertionError("the default group is over")
dist.destroy_process_group()
dist.init_process_group("zbmd", store=store, rank=me - 1, world_size=2)
check()
dist.destroy_process_group()
if me == 1:
    try:
        dist.init_process_group(
            "zbmd", store=dist.PrefixStore("x", store), rank=0, world_size=3, timeout=timedelta(seconds=0.5)
        )
    except dist.DistBackendError as error:
        assert isinstance(error.__cause__, DeadlineExceeded), repr(error.__cause__)
        assert "rank 1, 2 did not come" in str(error), error
    else:
        raise AssertionError("nobody came")
print(f"rank {me} is good")
