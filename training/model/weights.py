"""Files of weights, as safetensors: ours, and GPT-2 weights in the layout of Hugging Face.

Ours have one named tensor per parameter, and configuration and step as metadata. Hugging Face's are
`config.json` beside `model.safetensors`; matrices are (inputs, outputs) there too, so a
tensor is only renamed.
"""

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
from zbmd.training.model.gpt import MLP_RATIO, parameter_shapes
from zbmd.training.ops import EPSILON
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


CONFIG_NAME = "config.json"
GPT2_WEIGHTS_NAME = "model.safetensors"
CONFIG_BYTES_MAX = 1 << 20
PREFIX = "transformer."
"""Prefix of the names in a file of the model with its head; a file of one without a head has none."""

_OURS_TO_THEIRS = {
    "attn.norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.in": "mlp.c_fc",
    "mlp.out": "mlp.c_proj",
}
# Masks that older files hold: constants, not weights.
_IGNORED_ENDINGS = (".attn.bias", ".attn.masked_bias")
_TIED_HEAD = "lm_head.weight"
_FLOATS = ("F16", "F32", "F64")


class HuggingFaceConfig(msgspec.Struct, kw_only=True):
    """The fields of a GPT-2's `config.json` that determine what is computed. Other fields are ignored."""

    model_type: str = ""
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = EPSILON
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    architectures: list[str] | None = None

    def model(self, path: Path) -> GPTConfig:
        """Return the equivalent model. Raises `UserError` if there is none, or it is impossible."""
        # Each is the one value that this engine computes with.
        for name, found, known in (
            ("model_type", self.model_type, "gpt2"),
            ("n_inner", self.n_inner, None if self.n_inner is None else MLP_RATIO * self.n_embd),
            ("activation_function", self.activation_function, "gelu_new"),
            ("layer_norm_epsilon", self.layer_norm_epsilon, EPSILON),
            ("tie_word_embeddings", self.tie_word_embeddings, True),
            ("scale_attn_weights", self.scale_attn_weights, True),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, False),
        ):
            if found != known:
                raise UserError(
                    f"{path} describes an unsupported model: its {name} is {found!r}, and "
                    f"only {known!r} is supported."
                )
        return GPTConfig(
            family="gpt2",
            activation="gelu",
            vocabulary=self.vocab_size,
            context=self.n_positions,
            width=self.n_embd,
            layers=self.n_layer,
            heads=self.n_head,
        )


def load_gpt2(path: Path) -> tuple[npt.NDArray[np.float32], GPTConfig]:
    """Return the flat float32 parameters and the configuration of the GPT-2 at `path`.

    path: a directory with `config.json` and `model.safetensors`, or such a weights file beside its
    `config.json`. Tensors are float16, float32 or float64. Raises `UserError` for files that are missing or
    damaged, for a model that this engine does not support, and for tensors that do not fit the configuration.
    """
    file = path / GPT2_WEIGHTS_NAME if path.is_dir() else path
    config = _read_config(file.parent / CONFIG_NAME)
    layout = ParameterLayout.of(parameter_shapes(config))
    try:
        with safe_open(file, framework="numpy") as opened:
            prefix = PREFIX if any(name.startswith(PREFIX) for name in opened.keys()) else ""  # noqa: SIM118
            wanted = {prefix + hugging_face_name(slot.name): slot for slot in layout.slots}
            _check_names(file, set(wanted), set(opened.keys()))
            for name, slot in wanted.items():
                found = opened.get_slice(name)
                _check_tensor(file, name, (tuple(found.get_shape()), found.get_dtype()), slot.shape)
            flat = np.zeros(layout.size, dtype=np.float32)  # no more than the file has
            for name, view in zip(wanted, layout.views(flat), strict=True):
                view[...] = opened.get_tensor(name)
            if _TIED_HEAD in opened.keys():  # noqa: SIM118
                _check_head(file, opened.get_tensor(_TIED_HEAD), layout.views(flat)[0])
    except FileNotFoundError as error:
        raise UserError(
            f"there are no weights at {file}: give the directory of a model, or its file."
        ) from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a safetensors file: {error}.") from error
    return flat, config


def save_gpt2(directory: Path, params: Array, config: GPTConfig) -> None:
    """Write flat `params` (layout.size,) as a GPT-2 that other tools can read, each file atomically.

    Raises `UserError` for a model of another family or activation, and as `write_atomically`.
    """
    if config.family != "gpt2" or config.activation != "gelu":
        raise UserError(
            f'a model of the family "{config.family}" with "{config.activation}" is no GPT-2, and has no '
            "place in that layout. Keep it as weights of this program."
        )
    layout = ParameterLayout.of(parameter_shapes(config))
    views = layout.views(to_host(params))
    tensors = {
        PREFIX + hugging_face_name(s.name): np.ascontiguousarray(v)
        for s, v in zip(layout.slots, views, strict=True)
    }
    described = HuggingFaceConfig(
        model_type="gpt2",
        vocab_size=config.vocabulary,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        architectures=["GPT2LMHeadModel"],
    )
    # The format is what tells readers that the tensors are laid out as PyTorch's.
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(directory / GPT2_WEIGHTS_NAME, lambda file: file.write(data))
    text = msgspec.json.format(msgspec.json.encode(described))
    write_atomically(directory / CONFIG_NAME, lambda file: file.write(text))


def hugging_face_name(name: str) -> str:
    """Return the Hugging Face name, without prefix, of parameter `name` of a gpt2 model."""
    if name.startswith("blocks."):
        _, block, part, layer, kind = name.split(".")
        return f"h.{block}.{_OURS_TO_THEIRS[f'{part}.{layer}']}.{kind}"
    known = {"embed.weight": "wte.weight", "positions.weight": "wpe.weight"}
    return known.get(name, name.replace("head.norm", "ln_f"))


def _read_config(path: Path) -> GPTConfig:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}. A {CONFIG_NAME} must lie beside the weights."
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise UserError(f"{path} has more than {CONFIG_BYTES_MAX} bytes: it is not a model configuration.")
    try:
        described = msgspec.json.decode(data, type=HuggingFaceConfig)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} does not describe a GPT-2: {error}.") from error
    return described.model(path)


def _check_names(path: Path, wanted: set[str], found: set[str]) -> None:
    found = {name for name in found - {_TIED_HEAD} if not name.endswith(_IGNORED_ENDINGS)} | (found & wanted)
    for name in sorted(wanted ^ found):
        trouble = "lacks" if name in wanted else "has an unknown"
        raise UserError(f"{path} does not fit its {CONFIG_NAME}: it {trouble} tensor {name}.")


def _check_tensor(path: Path, name: str, found: tuple[tuple[int, ...], str], shape: tuple[int, ...]) -> None:
    if found[1] not in _FLOATS:
        raise UserError(f"{path}: tensor {name} is {found[1]}: convert the weights to F32.")
    if found[0] == shape:
        return
    if name.endswith("wte.weight") and found[0][1:] == shape[1:]:
        raise UserError(
            f"{path} does not fit its {CONFIG_NAME}: the vocabulary has {found[0][0]} tokens in {name}, and "
            f"{shape[0]} in the configuration."
        )
    raise UserError(
        f"{path} does not fit its {CONFIG_NAME}: tensor {name} has shape {found[0]}, not {shape}."
    )


def _check_head(path: Path, head: npt.NDArray[np.generic], table: Array) -> None:
    if head.shape != table.shape or not np.array_equal(head, table):
        raise UserError(
            f"{path} has a head of its own ({_TIED_HEAD} differs from the embedding): such a GPT-2 is not "
            "supported."
        )
