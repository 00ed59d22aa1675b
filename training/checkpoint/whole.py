"""Whole checkpoints: the state of a version in one safetensors file."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from zbmd.training.checkpoint.plan import require_plan
from zbmd.training.files import write_atomically
from zbmd.transport.errors import UserError

CHECKPOINT_FORMAT = "zbmd-checkpoint-1"
CHECKPOINT_NAME = "checkpoint.safetensors"

FlatState = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A version of the state. `flat` is float32: weights and moments, (layout.size,) each.

    `plan` is what determines the bits of the run (see `LogHeader.plan`): a run resumes only under the same
    plan.
    """

    version: int
    plan: str
    flat: FlatState


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint: durable on return, or the file at `path` is unchanged.

    Raises `UserError` if the disk is full or the directory is not writable.
    """
    metadata = {
        "format": CHECKPOINT_FORMAT,
        "version": str(checkpoint.version),
        "plan": checkpoint.plan,
    }
    data = save({"state": checkpoint.flat}, metadata=metadata)
    write_atomically(path, lambda file: file.write(data))


def load_checkpoint(path: Path, *, plan: str, elements: int) -> Checkpoint:
    """Read a checkpoint of `elements` float32 that was written under `plan`; `path` may be a run's directory.

    Raises `UserError` if it is missing, damaged, or belongs to a run with other settings or data.
    """
    with _opened(path, plan, elements) as (file, version):
        flat: FlatState = file.get_tensor("state")
    return Checkpoint(version=version, plan=plan, flat=flat)


def require_checkpoint(path: Path, *, plan: str, elements: int) -> int:
    """Return the version that `load_checkpoint` would read, without reading its arrays. Raises as that
    does."""
    with _opened(path, plan, elements) as (_, version):
        return version


@contextlib.contextmanager
def _opened(path: Path, plan: str, elements: int) -> Generator[tuple[Any, int]]:
    if path.is_dir():
        path /= CHECKPOINT_NAME
    try:
        path.open("rb").close()  # safetensors takes every failure to open for a missing file
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != CHECKPOINT_FORMAT:
                raise ValueError(f"its format is {metadata.get('format')}, not {CHECKPOINT_FORMAT}")
            state, version = file.get_slice("state"), int(metadata["version"])
            alike = state.get_shape() == [elements] and state.get_dtype() == "F32"
            require_plan(path, metadata.get("plan", ""), plan, alike=alike)
            yield file, version
    except FileNotFoundError as error:
        raise no_checkpoint(path) from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{path} cannot be read as a checkpoint: {why}. Give --resume the {CHECKPOINT_NAME} of a run, "
            "whole, or omit it to start from the beginning."
        ) from error


def no_checkpoint(path: Path) -> UserError:
    """Return the error for a missing checkpoint."""
    return UserError(f"there is no checkpoint at {path}: check the path given to --resume.")


def require_steps_left(path: Path, version: int, steps: int) -> None:
    """Raise `UserError` if a run of `steps` has no step left after the checkpoint at `path`."""
    if version >= steps:
        raise UserError(
            f"the checkpoint {path} is of step {version}, and --steps is {steps}: no step is left. "
            "Give more --steps, which are counted from the beginning."
        )


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, without reading its tensors; empty if it is not one."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def checkpoint_version(path: Path) -> int | None:
    """Return the version of the checkpoint at `path`, without reading its state; None if there is none."""
    try:
        return int(metadata_of(path)["version"])
    except (KeyError, ValueError):
        return None


def checkpoint_plan(path: Path) -> str:
    """Return the plan of the checkpoint at `path`, without reading its state; empty if there is none."""
    return metadata_of(path).get("plan", "")
