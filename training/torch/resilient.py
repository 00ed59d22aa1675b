"""`resilient`: what scripts call to have a training loop that survives losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zbmd.collectives.torch.work import as_torch_error
from zbmd.training.checkpoint.pace import Every
from zbmd.training.job.paced import require_every
from zbmd.training.torch.run import Options, Run
from zbmd.transport.errors import UserError, ZbmdError


def resilient(
    model: Any,
    optimizer: Any,
    *others: Any,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    checkpoint_every: Every = 0,
    resume: bool = False,
    exact: bool | int = False,
) -> Run:
    """Return a run whose steps survive the loss of ranks; see docs/GUIDE_TORCH.md.

        run = zbmd.torch.resilient(model, optimizer, scheduler)
        for x, y in run.batches(loader, epochs=10):
            with run.step():
                ...
                optimizer.step()

    model, optimizer: one, or a list. others: what else has a `state_dict`: schedulers, a `GradScaler`. seed:
    of random numbers in steps; default: that of `torch.manual_seed` on rank 0. All ranks call it, after all
    process groups are made. Raises `UserError` for what cannot be continued, and `DistBackendError`.

    out: a directory that all ranks share: of the commit log and the metrics, for `zbmd ledger`, and of the
    checkpoint, which is written after each `checkpoint_every` steps ("auto": at the pace that
    the loop measures), and when a signal asks for it.
    resume: go on from the checkpoint in `out`. exact: the bits do not depend on the number of ranks: a batch
    has so many logical shares (True: as many as ranks), each with the loader's batch size, which the ranks
    divide among them.
    """
    models = [*model] if isinstance(model, list | tuple) else [model]
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for each in others:
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise UserError(
                f"{type(each).__name__} has no state_dict and load_state_dict: it cannot be continued"
            )
    if out is None and (checkpoint_every or resume):
        raise UserError("zbmd.torch.resilient(checkpoint_every=…, resume=…) needs a directory: give it out=…")
    require_every(checkpoint_every, "zbmd.torch.resilient(checkpoint_every=…)")
    options = Options(
        out=None if out is None else Path(out), checkpoint_every=checkpoint_every, resume=resume, exact=exact
    )
    try:
        return Run(models, optimizers, others, seed, options)
    except ZbmdError as error:
        if isinstance(error, UserError):
            raise
        raise as_torch_error(error) from error
