"""Durable checkpoints: the whole state of a version in one safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from zbmd.training.files import write_atomically
from zbmd.transport.errors import UserError

CHECKPOINT_FORMAT = "zbmd-checkpoint-1"
CHECKPOINT_NAME = "checkpoint.safetensors"
DIFFERENCES_MAX = 8
VALUE_CHARACTERS_MAX = 16

FlatState = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A version of the state: `flat` is float32: weights and moments, (layout.size,) each.

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
    """Read a checkpoint of `elements` float32 that was written under `plan`; `path` may be a run's directory.

    Raises `UserError` if it is missing, damaged, or belongs to a run with other settings or data.
    """
    if path.is_dir():
        path /= CHECKPOINT_NAME
    try:
        path.open("rb").close()  # safetensors takes every failure to open for a missing file
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != CHECKPOINT_FORMAT:
                raise ValueError(f"its format is {metadata.get('format')}, not {CHECKPOINT_FORMAT}")
            flat: FlatState = file.get_tensor("state")
            version = int(metadata["version"])
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint at {path}: check the path given to --resume.") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{path} cannot be read as a checkpoint: {why}. Give --resume the {CHECKPOINT_NAME} of a run, "
            "whole, or leave it out to start from the beginning."
        ) from error
    require_plan(
        path, metadata.get("plan", ""), plan, alike=flat.shape == (elements,) and flat.dtype == np.float32
    )
    return Checkpoint(version=version, plan=plan, flat=flat)


def require_plan(path: Path, there: str, here: str, *, alike: bool = True) -> None:
    """Raise `UserError` unless the plan of the checkpoint at `path` is ours, and its state is `alike`."""
    if there == here and alike:
        return
    differing = ", ".join(_differences(there, here)) or "the size of its state"
    raise UserError(
        f"{path} belongs to another run, so it cannot go on bit for bit. What differs (there, here): "
        f"{differing}. Give the options and data of that run, or leave out --resume."
    )


def checkpoint_version(path: Path) -> int | None:
    """The version of the checkpoint at `path`, without reading its state; None if there is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            return int((file.metadata() or {})["version"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def _differences(there: str, here: str) -> list[str]:
    """The leaves in which two plans differ, in words: at most `DIFFERENCES_MAX`, each short."""
    try:
        known = _leaves(msgspec.json.decode(there))
    except (ValueError, RecursionError):
        return ["its plan cannot be read"]
    wanted = _leaves(msgspec.json.decode(here))
    names = sorted(name for name in known | wanted if known.get(name) != wanted.get(name))
    return [
        f"{name} ({_shortened(known.get(name))}, {_shortened(wanted.get(name))})"
        for name in names[:DIFFERENCES_MAX]
    ]


def _leaves(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= _leaves(inner, f"{name}.{key}" if name else str(key))
    return found


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"
