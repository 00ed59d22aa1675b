"""Entry point `torch.backends`: `import torch` makes the backend `zbmd` known to `torch.distributed`.

A module of its own, beside the package: a program that imports PyTorch and does not use zbmd pays for nothing
of it. What the backend needs is imported when a process group is made, and in ranks of a job at the first
rendezvous.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

BACKEND = "zbmd"
RANK_VARIABLE = "ZBMD_NODE"
"""Set in the ranks of a job, whose rendezvous is zbmd's own."""
SCHEMES = ("env", "tcp")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What PyTorch's `env://` reads."""
OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Set by mpirun and srun, which do not set those."""

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def load() -> None:
    """Register the backend at the end of `import torch`. Never raises: that import must not fail."""
    try:
        dist: Any = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available():
            register(dist)
    except Exception as error:  # noqa: BLE001 (whatever it is, PyTorch is of use without this backend)
        logging.getLogger("zbmd").warning("PyTorch cannot use the backend zbmd: %r", error)


def register(dist: Any) -> None:
    """Make `zbmd` known to `torch.distributed`, the module `dist`; again, it does nothing."""
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers: dict[str, Handler] | None = getattr(
        sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None
    )
    if handlers is not None:
        before = {scheme: handlers[scheme] for scheme in SCHEMES if scheme in handlers}
        handlers.update({scheme: _of_ranks(scheme, handlers, before) for scheme in before})


def _create(options: Any, of_others: Any) -> Any:
    """Return a process group, for `torch.distributed`. of_others: `pg_options`, which ours has none of."""
    return importlib.import_module("zbmd.collectives.torch.backend").create(options, of_others)


def _of_ranks(scheme: str, handlers: dict[str, Handler], before: dict[str, Handler]) -> Handler:
    """Return a handler that, in a rank of a job, puts zbmd's in the place of PyTorch's once it is called."""

    def handler(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if RANK_VARIABLE not in os.environ:
            if scheme == "env":
                _complete_environment()
            yield from before[scheme](url, **options)
            return
        if handlers[scheme] is handler:
            handlers.update(before)
            importlib.import_module("zbmd.collectives.torch.rendezvous").install()
        yield from handlers[scheme](url, **options)

    return handler


def _complete_environment() -> None:
    """Set what `env://` needs and mpirun or srun has said in its own words; what is set stays."""
    missing = [name for name in NEEDED if name not in os.environ]
    if missing and any(name in os.environ for name in OTHER_LAUNCHERS):
        derive = importlib.import_module("zbmd.actors.bootstrap.rank_variables").rank_variables
        for name, value in derive(os.environ).items():
            os.environ.setdefault(name, value)
