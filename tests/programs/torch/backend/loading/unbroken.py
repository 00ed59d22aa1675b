"""Shows that PyTorch works, and whether it knows the backend. Argument: a module to import first, if any."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import sys
from typing import Any

if sys.argv[1:]:
    importlib.import_module(sys.argv[1])
import torch

dist: Any = importlib.import_module("torch.distributed")
print("torch is there", torch.ones(1).item(), "zbmd" in dist.Backend.backend_list)
