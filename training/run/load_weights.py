"""Load the weights of a run from its weights file or its latest checkpoint."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.checkpoint.plan import read_plan
from zbmd.training.checkpoint.sharded import checkpoint_in, open_state, read_names
from zbmd.training.checkpoint.whole import CHECKPOINT_FORMAT, checkpoint_plan, checkpoint_version, metadata_of
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.model.weights import load_weights
from zbmd.training.optim import arrays_of
from zbmd.training.run.journal import WEIGHTS_NAME

Trained = tuple[npt.NDArray[np.float32], GPTConfig, int]
"""Flat parameters, the configuration of their model, and the step after which they were saved."""


def load_trained(path: Path) -> Trained:
    """Load the weights at `path`: a weights file, a checkpoint of any job, or a run's directory (the latest
    counts).

    Returns the float32 masters of a 16-bit checkpoint. Raises `UserError` if there are no weights, or they
    are damaged.
    """
    if not path.is_dir():
        return _of_checkpoint(path) if _is_checkpoint(path) else load_weights(path)
    weights, checkpoint = path / WEIGHTS_NAME, checkpoint_in(path)
    if checkpoint is None:
        return load_weights(weights)
    if not weights.exists():
        return _of_checkpoint(checkpoint)
    found = load_weights(weights)
    return found if found[2] >= _step_of(checkpoint) else _of_checkpoint(checkpoint)


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".json" or metadata_of(path).get("format") == CHECKPOINT_FORMAT


def _step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint. Raises `UserError` if its index cannot be read."""
    if checkpoint.suffix == ".json":
        return read_names(checkpoint).version
    return checkpoint_version(checkpoint) or 0


def _of_checkpoint(path: Path) -> Trained:
    text = read_names(path).plan if path.suffix == ".json" else checkpoint_plan(path)
    plan = read_plan(text, where=str(path))
    layout = ParameterLayout.of(parameter_shapes(plan.model))
    arrays, flat = arrays_of(plan.training.optimizer), np.zeros(layout.size, np.float32)
    with closing(open_state(path, plan=text, layout=layout, arrays=arrays)) as saved:
        for slot in layout.slots:
            flat[slot.span] = saved.parameter("weights", slot)
        return flat, plan.model, saved.version
