"""A rank under torchrun that dies in the first attempt; the others see why, and the second ends well."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

import torch
from programs.torch.launched import check

from zbmd.transport.errors import PeerLost

dist: Any = importlib.import_module("torch.distributed")

dist.init_process_group("zbmd")
check()
attempt, me = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
if attempt == 0:
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        assert isinstance(error.__cause__, PeerLost), repr(error.__cause__)
        print(f"rank {me} saw: {error}", flush=True)
        raise SystemExit(3) from None
    raise AssertionError("rank 1 is dead")
print(f"rank {me} of {dist.get_world_size()} is good in attempt {attempt}")
dist.destroy_process_group()
