"""The `torch.distributed` backend `zbmd`: `dist.init_process_group("zbmd")`.

`import torch` registers it, by the entry point `torch.backends` of `zbmd_autoload`; `import zbmd.torch` does
where that is switched off (TORCH_DEVICE_BACKEND_AUTOLOAD=0). Nothing of torch is imported before that.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import zbmd_autoload
from zbmd.transport.errors import UserError
from zbmd_autoload import BACKEND

__all__ = ["BACKEND", "create", "modules", "register"]

MODULES: Final = ("attach", "functions", "flights", "process_group")


def register() -> None:
    """Make `zbmd` known to `torch.distributed`; again, it does nothing.

    Raises `UserError` if there is no PyTorch, or one without `torch.distributed`.
    """
    try:
        dist: Any = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise UserError(f"PyTorch cannot be imported ({error}): pip install 'zbmd[torch]'") from None
    if not dist.is_available():
        raise UserError("this PyTorch was built without torch.distributed: install another build")
    zbmd_autoload.register(dist)


def create(options: Any, of_others: Any = None) -> Any:
    """Return the process group that `torch.distributed` asks for. Raises `DistBackendError`.

    of_others: `pg_options`, for a backend beside ours.
    """
    attach, functions, flights, groups = modules()
    attach.ensure(options)
    functions.install()
    flights.install()
    return groups.create(options, of_others)


def modules() -> list[Any]:
    """Import what a first process group needs. A process that forks ranks does so before: it takes 0.1 s."""
    return [importlib.import_module(f"zbmd.collectives.torch.{name}") for name in MODULES]
