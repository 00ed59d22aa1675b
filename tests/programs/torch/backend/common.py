"""Shared by programs over the backend `zbmd`."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
functional: Any = importlib.import_module("torch.distributed._functional_collectives")
nn: Any = torch.nn
DistributedDataParallel: Any = nn.parallel.DistributedDataParallel
importlib.import_module("zbmd.torch")
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


def begin(**options: object) -> tuple[int, int]:
    """Make the group of all ranks; return this rank and their number."""
    dist.init_process_group("zbmd", **options)
    return dist.get_rank(), dist.get_world_size()


def fails(call: Callable[[], object], *texts: str, kind: type[Exception] = RuntimeError) -> None:
    """Make a call that must raise an error of that kind with all the `texts`."""
    try:
        call()
    except kind as error:
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError(f"nothing was raised; {texts} was expected")
