"""Durable checkpoints: the whole state of a version in one safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from zbmd.training.files import write_atomically
from zbmd.transport.errors import UserError

CHECKPOINT_FORMAT = "zbmd-checkpoint-1"
CHECKPOINT_NAME = "checkpoint.safetensors"

FlatState = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A version of the state: `flat` is (3 * layout.size,) float32, weights, mean and square.

    `plan` is what fixes the bits of the run (see `LogHeader.plan`): a run goes on only under the same one.
    """

    version: int
    plan: str
    flat: FlatState


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint: durable on return, or what was at `path` is untouched.

    Raises `UserError` when the disk is full or the directory is closed to us.
    """
    metadata = {
        "format": CHECKPOINT_FORMAT,
        "version": str(checkpoint.version),
        "plan": checkpoint.plan,
    }
    data = save({"state": checkpoint.flat}, metadata=metadata)
    write_atomically(path, lambda file: file.write(data))


def load_checkpoint(path: Path, *, plan: str, elements: int) -> Checkpoint:
    """Read a checkpoint of `elements` float32 that was written under `plan`.

    Raises `UserError` if it is missing, damaged, or belongs to a run with other settings or data.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            flat: FlatState = file.get_tensor("state")
            version = int(metadata["version"])
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint at {path}: check the path given to --resume.") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a checkpoint: {error}.") from error
    if metadata.get("format") != CHECKPOINT_FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program ({CHECKPOINT_FORMAT}).")
    if metadata.get("plan") != plan or flat.shape != (elements,) or flat.dtype != np.float32:
        raise UserError(
            f"{path} belongs to a run with other settings or other data, so it cannot go on bit for bit. "
            f"It was made with {metadata.get('plan')}; this run has {plan}. Give the same options and data."
        )
    return Checkpoint(version=version, plan=plan, flat=flat)
