"""Read and write weights as safetensors: one named tensor per parameter, configuration and step as
metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

WEIGHTS_FORMAT = "zbmd-gpt-1"
WEIGHTS_NAME = "weights.safetensors"


def save_weights(path: Path, params: Array, config: GPTConfig, *, step: int) -> None:
    """Write flat `params` (layout.size,) of a model to `path`, atomically and durably.

    `step` is the number of optimizer steps that led to the weights. Raises `UserError` if the disk is full or
    the directory is not writable; an existing file is unchanged then.
    """
    layout = ParameterLayout.of(parameter_shapes(config))
    tensors = {
        slot.name: view for slot, view in zip(layout.slots, layout.views(to_host(params)), strict=True)
    }
    metadata = {
        "format": WEIGHTS_FORMAT,
        "config": msgspec.json.encode(asdict(config)).decode(),
        "step": str(step),
    }
    data = save(tensors, metadata=metadata)
    write_atomically(path, lambda file: file.write(data))


def load_weights(path: Path) -> tuple[npt.NDArray[np.float32], GPTConfig, int]:
    """Return the flat float32 parameters, the configuration and the step of the file `path`.

    Raises `UserError` if the file is missing or damaged, was not written by `save_weights`, or lacks a
    tensor of the configuration, has one too many, or one of another shape or dtype than float32.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            config, step = _metadata(path, file.metadata() or {})
            layout = ParameterLayout.of(parameter_shapes(config))
            names = file.keys()
            tensors: dict[str, npt.NDArray[np.generic]] = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise UserError(f"there are no weights at {path}: train first, or give another path.") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file: {error}.") from error
    _check(path, layout, tensors)
    flat = np.zeros(layout.size, dtype=np.float32)
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        view[...] = tensors[slot.name]
    return flat, config, step


def _metadata(path: Path, metadata: dict[str, str]) -> tuple[GPTConfig, int]:
    if metadata.get("format") != WEIGHTS_FORMAT:
        raise UserError(f"{path} does not hold weights in the format {WEIGHTS_FORMAT}.")
    try:
        config = msgspec.json.decode(metadata["config"], type=GPTConfig)
        step = int(metadata["step"])
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise UserError(f"the description of the weights in {path} is damaged: {error}.") from error
    return config, step


def _check(path: Path, layout: ParameterLayout, tensors: dict[str, npt.NDArray[np.generic]]) -> None:
    expected = {slot.name: slot.shape for slot in layout.slots}
    for name in expected.keys() ^ tensors.keys():
        trouble = "lacks" if name in expected else "has an unknown"
        raise UserError(f"{path} does not fit its own configuration: it {trouble} tensor {name}.")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != np.float32:
            raise UserError(
                f"{path} does not fit its own configuration: tensor {name} is {tensor.dtype} of shape "
                f"{tensor.shape}, not float32 of shape {shape}."
            )
