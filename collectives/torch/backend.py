"""The `torch.distributed` backend `zbmd`: `import zbmd.torch`, then `dist.init_process_group("zbmd")`.

Nothing of torch is imported before `register` is called.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from zbmd.transport.errors import UserError

BACKEND: Final = "zbmd"


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
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
        rendezvous: Any = importlib.import_module("zbmd.collectives.torch.rendezvous")
        rendezvous.install()


def _create(options: Any, _: Any) -> Any:
    """A process group, for `torch.distributed`."""
    groups: Any = importlib.import_module("zbmd.collectives.torch.process_group")
    return groups.create(options)
