"""Read and write GPT-2 weights in the layout of Hugging Face: `config.json` beside `model.safetensors`.

Matrices are (inputs, outputs) there too, so a tensor is only renamed.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
"""Of a model in several files: which of them has each tensor."""
CONFIG_BYTES_MAX = 1 << 20
INDEX_BYTES_MAX = 16 << 20
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
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
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

    path: a directory with `config.json` and `model.safetensors`, or several files and their index, or such a
    weights file beside its `config.json`. Tensors are float16, float32 or float64. Raises `UserError` for
    files that are missing or damaged, for a model that this engine does not support, and for tensors that do
    not fit the configuration.
    """
    file = weights_file(path)
    config = _read_config(file.parent / CONFIG_NAME)
    layout = ParameterLayout.of(parameter_shapes(config))
    try:
        with ExitStack() as files:
            opened = _opened(file, files)
            prefix = PREFIX if any(name.startswith(PREFIX) for name in opened) else ""
            wanted = {prefix + hugging_face_name(slot.name): slot for slot in layout.slots}
            _check_names(file, set(wanted), set(opened))
            for name, slot in wanted.items():
                found = opened[name].get_slice(name)
                _check_tensor(file, name, (tuple(found.get_shape()), found.get_dtype()), slot.shape)
            flat = np.zeros(layout.size, dtype=np.float32)  # no more than the file has
            for name, view in zip(wanted, layout.views(flat), strict=True):
                view[...] = opened[name].get_tensor(name)
            if _TIED_HEAD in opened:
                _check_head(file, opened[_TIED_HEAD].get_tensor(_TIED_HEAD), layout.views(flat)[0])
    except FileNotFoundError as error:
        raise UserError(
            f"there are no weights at {file}: give the directory of a model, or its file."
        ) from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a safetensors file: {error}.") from error
    return flat, config


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weights_file(path: Path) -> Path:
    """Return the weights at `path`: the file itself, or in a directory the one, or the index of several."""
    if not path.is_dir():
        return path
    alone = path / WEIGHTS_NAME
    return path / INDEX_NAME if not alone.exists() and (path / INDEX_NAME).exists() else alone


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, in the order of the index at `path`.

    Raises `UserError` for an index that is damaged, or names a file that is not beside it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(INDEX_BYTES_MAX + 1)
        if len(data) > INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {INDEX_BYTES_MAX} bytes")
        names = msgspec.json.decode(data, type=_Index).weight_map
        strange = [name for name in names.values() if not _BESIDE.fullmatch(name)]
        if strange:
            raise ValueError(f"{strange[0]!r} is not the name of a safetensors file beside it")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: give the directory of a model.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not an index of safetensors files: {error}. Restore it.") from error
    return {tensor: path.parent / name for tensor, name in names.items()}


def _opened(file: Path, files: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor. Raises as `safe_open`, and `UserError` for one that lacks it."""
    if file.suffix != ".json":
        alone = files.enter_context(safe_open(file, framework="numpy"))
        return dict.fromkeys(alone.keys(), alone)
    index = read_index(file)
    every = {path: files.enter_context(safe_open(path, framework="numpy")) for path in set(index.values())}
    for tensor, path in index.items():
        if tensor not in every[path].keys():  # noqa: SIM118
            raise UserError(f"{path} lacks tensor {tensor}, which {file.name} names: restore both.")
    return {tensor: every[path] for tensor, path in index.items()}


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
    # The format is what tells readers that the tensors are laid out as PyTorch's.
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(directory / WEIGHTS_NAME, lambda file: file.write(data))
    save_config(directory, config)


def save_config(directory: Path, config: GPTConfig) -> None:
    """Write the `config.json` of a GPT-2, atomically. Raises as `write_atomically`."""
    described = HuggingFaceConfig(
        model_type="gpt2",
        vocab_size=config.vocabulary,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        architectures=["GPT2LMHeadModel"],
    )
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
