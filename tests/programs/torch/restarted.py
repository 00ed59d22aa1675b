"""A rank under torchrun that dies in the first attempt; the others see why, and the second ends well.

A line is written by one call: torchrun starts Python without a buffer, and ranks share a pipe.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import signal
import sys
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
        sys.stdout.write(f"rank {me} saw: {error}\n")
        raise SystemExit(3) from None
    raise AssertionError("rank 1 is dead")
sys.stdout.write(f"rank {me} of {dist.get_world_size()} is good in attempt {attempt}\n")
dist.destroy_process_group()
