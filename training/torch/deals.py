"""The samples that known samplers deal in one pass: with them a log can show that each came once."""

from __future__ import annotations

import importlib
from typing import Any, Final

from zbmd.training.run.loop_steps import Deal

data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

_MODULES: Final = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Of samplers that are known; subclasses may deal as they like."""


def deal_of(loader: Any, ranks: int) -> Deal | None:
    """Return what the samplers of a map-style loader deal to `ranks` ranks; None: they are not known."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if not _is(batches, "BatchSampler") or batches.sampler is not sampler:
        return None
    try:
        if _is(sampler, "DistributedSampler", "StatefulDistributedSampler"):
            return _distributed(sampler, batches, ranks)
        if _is(sampler, "SequentialSampler"):
            return _of_each(len(sampler.data_source), len(sampler.data_source), batches)
        if _is(sampler, "RandomSampler"):
            whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
            return _of_each(len(sampler), len(sampler.data_source), batches) if whole else None
        if _is(sampler, "SubsetRandomSampler"):
            unlike = len(set(sampler.indices)) == len(sampler.indices)
            return _of_each(len(sampler.indices), len(loader.dataset), batches) if unlike else None
    except TypeError:  # a dataset without a length
        return None
    return None


def _is(value: Any, *names: str) -> bool:
    kind = type(value)
    return kind.__name__ in names and f"{kind.__module__}.".startswith(_MODULES)


def _of_each(samples: int, below: int, batches: Any) -> Deal:
    left_out = samples % batches.batch_size if batches.drop_last else 0
    return Deal(samples=samples, below=below, together=False, left_out=left_out)


def _distributed(sampler: Any, batches: Any, ranks: int) -> Deal | None:
    if sampler.num_replicas != ranks:
        return None
    samples, dealt = len(sampler.dataset), sampler.total_size
    left_out = max(0, samples - dealt)
    if batches.drop_last:
        left_out += ranks * (sampler.num_samples % batches.batch_size)
    return Deal(
        samples=samples,
        below=samples,
        together=True,
        again=max(0, dealt - samples),
        left_out=left_out,
    )
