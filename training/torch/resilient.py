"""`resilient`: what scripts call to have a training loop that survives losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zbmd.collectives.torch.backend import modules
from zbmd.collectives.torch.work import as_torch_error
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import KEEP_DEFAULT, Retention
from zbmd.training.checkpoint.pace import Every
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.profiler.operations import EVERY_MAX, EVERY_VARIABLE, parse_ops_every
from zbmd.training.torch.durable.checkpoints import Options, Saves
from zbmd.training.torch.durable.slow_ranks import require_choice
from zbmd.training.torch.run import Run
from zbmd.transport.errors import UserError, ZbmdError

modules()  # where this module is imported before ranks are forked, a replacement finds them imported


def resilient(
    model: Any,
    optimizer: Any,
    *others: Any,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    checkpoint_every: Every = 0,
    checkpoint_to: str | os.PathLike[str] = "",
    keep_checkpoints: int = KEEP_DEFAULT,
    keep_every: int = 0,
    checkpoint_codec: str = Codec.NONE.value,
    resume: bool = False,
    exact: bool | int = False,
    on_straggler: str = OnStraggler.WARN.value,
    mirror: bool = False,
    profile_ops: int | None = None,
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
    checkpoint_to: a directory, or the URL of an object store, for checkpoints; default: `out`.
    keep_checkpoints: the last so many of them are kept; keep_every: and for ever those of each so many
    steps; 0: none. checkpoint_codec: none or zstd.
    resume: go on from the newest checkpoint that is whole.
    exact: the bits do not depend on the number of ranks: a batch has so many logical shares (True: as many as
    ranks), each with the loader's batch size, which the ranks divide among them.
    on_straggler: what is done about a slow rank: warn, or replace; see docs/GUIDE_STRAGGLERS.md.
    mirror: vote once all optimizers have updated, and send each rank's part of the state to its buddy before:
    for optimizers that communicate in `step()`. Over FSDP2 it is chosen where it is needed.
    profile_ops: profile each op of every so-many-th step, into `out`; 0: of none; default: as
    `ZBMD_TRAIN_PROFILE_OPS` says, off or every=N; see docs/GUIDE_PROFILE.md.
    """
    models, optimizers = _listed(model), [_inner(each, "optimizer") for each in _listed(optimizer)]
    others = tuple(_inner(each, "scheduler") for each in others)
    for each in others:
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise UserError(
                f"{type(each).__name__} has no state_dict and load_state_dict: it cannot be continued"
            )
    if out is None and (checkpoint_every or resume):
        raise UserError("zbmd.torch.resilient(checkpoint_every=…, resume=…) needs a directory: give it out=…")
    retention = Retention(keep_checkpoints, keep_every)
    options = Options(
        out=None if out is None else Path(out),
        saves=_saves(str(checkpoint_to or out or ""), checkpoint_every, retention, checkpoint_codec),
        resume=resume,
        exact=exact,
        mirror=mirror,
        on_straggler=require_choice(on_straggler),
        profile_ops=_ops_every(profile_ops, out is not None),
    )
    try:
        return Run(models, optimizers, others, seed, options)
    except ZbmdError as error:
        if isinstance(error, UserError):
            raise
        raise as_torch_error(error) from error


def _saves(where: str, every: Every, retention: Retention, codec: str) -> Saves:
    """Return what is asked of checkpoints. Raises `UserError`."""
    if codec not in {known.value for known in Codec}:
        raise UserError(f"zbmd.torch.resilient(checkpoint_codec=…): expected none or zstd, got {codec!r}")
    saves = Saves(where=where, every=every, retention=retention, codec=Codec(codec))
    saves.check()
    return saves


def _ops_every(given: int | None, is_recorded: bool) -> int:
    """Return which steps are sampled. Raises `UserError` for what is no number of steps."""
    if given is None:
        try:
            every = parse_ops_every(os.environ.get(EVERY_VARIABLE, "off"))
        except UserError as error:
            raise UserError(f"{EVERY_VARIABLE}: {error}") from None
        return every if is_recorded else 0
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= EVERY_MAX:
        raise UserError(
            f"zbmd.torch.resilient(profile_ops=…): expected 0 to {EVERY_MAX:,} steps, got {given!r}"
        )
    if given and not is_recorded:
        raise UserError("zbmd.torch.resilient(profile_ops=…) needs a directory: give it out=…")
    return given


def _listed(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def _inner(prepared: Any, name: str) -> Any:
    """Return the optimizer or scheduler in one that accelerate has prepared.

    Raises `UserError` if it makes one update of several steps.
    """
    inner = getattr(prepared, name, None)
    if inner is None or not type(prepared).__module__.startswith("accelerate."):
        return prepared
    steps = prepared.gradient_state.num_steps
    if steps != 1:
        raise UserError(
            f"Accelerator(gradient_accumulation_steps={steps}) accumulates over steps of the loop, and a "
            "lost rank's part would be missing: leave it at 1, and make the passes over a batch in one "
            "run.step(), all but the last in accelerator.no_sync(model)"
        )
    return inner
