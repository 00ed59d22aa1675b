"""`import torch` alone knows the backend, and has imported nothing of it. Argument: an init method."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

dist: Any = importlib.import_module("torch.distributed")
assert "zbmd" in dist.Backend.backend_list, dist.Backend.backend_list
ours = sorted(name for name in sys.modules if name.startswith("zbmd"))
assert ours == ["zbmd_autoload"], ours
assert dist.get_default_backend_for_device("cpu") == "gloo"
address = sys.argv[1]
dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
assert "zbmd" not in sys.modules  # a program of gloo imports nothing of it
dist.destroy_process_group()
dist.init_process_group("zbmd", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(3.0)
dist.all_reduce(x)
assert x.tolist() == [0, 1, 2] and dist.get_backend() == "zbmd"
dist.destroy_process_group()
print("found")
