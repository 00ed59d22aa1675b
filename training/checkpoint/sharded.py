"""Durable sharded checkpoints: each rank writes what it holds, and a small index file lists all shards.

A shard is a safetensors file: slices of parameters' weights and moments, float32 but for PyTorch's, each with
its position in the whole parameter (`ParameterSlice`) and a digest. Any number of ranks, on any mesh, can
therefore load a checkpoint written by any other. Each checkpoint's shards have names of their own, and the
previous shards are deleted only after the new index is durable: a crash at any moment leaves the last durable
checkpoint intact.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.checkpoint.plan import read_plan, require_plan
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.training.optim.elementwise import ARRAYS, AdamWState, StateArray
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

if TYPE_CHECKING:  # who reads what a run has left needs no groups
    from zbmd.collectives.group.group import Group


Trained = tuple[npt.NDArray[np.float32], GPTConfig, int]
"""Flat parameters, the configuration of their model, and the step after which they were saved."""


def load_trained(path: Path) -> Trained:
    """Load the weights at `path`: a weights file, a checkpoint of any job, or a run's directory (the latest
    counts).

    Returns the float32 masters of a 16-bit checkpoint. Raises `UserError` if there are no weights, or they
    are damaged.
    """
    if not path.is_dir():
        return _of_checkpoint(path) if path.suffix == ".json" else load_weights(path)
    weights, checkpoint = path / WEIGHTS_NAME, checkpoint_in(path)
    if checkpoint is None:
        return load_weights(weights)
    if not weights.exists():
        return _of_checkpoint(checkpoint)
    found = load_weights(weights)
    return found if found[2] >= read_names(checkpoint).version else _of_checkpoint(checkpoint)


def _of_checkpoint(path: Path) -> Trained:
    text = read_names(path).plan
    plan = read_plan(text, where=str(path))
    layout = ParameterLayout.of(parameter_shapes(plan.model))
    flat = np.zeros(layout.size, np.float32)
    with closing(open_state(path, plan=text)) as saved:
        for slot in layout.slots:
            flat[slot.span] = saved.parameter("weights", slot)
        return flat, plan.model, saved.version


SHARDS_FORMAT: Final = "zbmd-checkpoint-shards-1"
SHARDS_NAME: Final = "checkpoint.json"
MANIFEST_BYTES_MAX: Final = 1 << 20
OPEN_TRIES: Final = 3
"""A checkpoint may be replaced between reading its index and opening its shards."""
_SHARD_NAME: Final = re.compile(r"checkpoint-\d+-[0-9a-f]{16}-\d+\.safetensors")

WRITE_POINT = faults.declare("shards.write", "before a rank writes its shard of a checkpoint")
WRITTEN_POINT = faults.declare("shards.written", "when its shard is durable, before all are named")
NAMED_POINT = faults.declare("shards.named", "when a new checkpoint is named, before the old one's shards go")


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of parameter `name`: its weights and moments, in the order of `cut`.

    names: of `arrays`, and maybe more. dtype: which they are written as; None: each as it is.
    """

    name: str
    cut: ParameterSlice
    arrays: tuple[Array, ...]
    names: Sequence[str] = ARRAYS
    dtype: npt.DTypeLike | None = np.float32


def whole_pieces(layout: ParameterLayout, state: AdamWState, arrays: Sequence[StateArray]) -> list[Piece]:
    """Return a checkpoint's content from one process that holds every parameter whole, on any device."""
    views = (layout.views(to_host(getattr(state, name))) for name in arrays)
    return [
        Piece(slot.name, flat_slice(slot.size, 0, slot.size), tuple(held))
        for slot, *held in zip(layout.slots, *views, strict=True)
    ]


def shared_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return which of the items with these sizes each of `ranks` writes, if all ranks hold all of them.

    The largest first, each to the rank that has least: at most 4/3 of the optimum (Graham 1969, LPT). The
    result is the same on all ranks.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        rank = taken.index(min(taken))
        found[rank].append(at)
        taken[rank] += sizes[at]
    return [sorted(one) for one in found]


def share_of(pieces: Sequence[Piece], *, ranks: int, place: int) -> list[Piece]:
    """Return the pieces that the rank at `place` of `ranks` writes, if all of them hold the same."""
    sizes = [sum(one.size for one in piece.arrays) for piece in pieces]
    return [pieces[at] for at in shared_out(sizes, ranks)[place]]


class ShardNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index of a checkpoint: its version, its plan (see `plan_text`), the loss scale, and its shard
    files.
    """

    format: str
    version: int
    plan: str
    loss_scale: tuple[float, ...]
    files: tuple[str, ...]


def shard_stem(group: Group, version: int) -> str:
    """Return the beginning of the names of a new checkpoint's shards; all members together."""
    token = np.array([secrets.randbits(64) if group.rank == 0 else 0], np.uint64)
    token = group.blocking.broadcast(token, 0)
    return f"checkpoint-{version}-{int(token[0]):016x}"


def write_shard_of(directory: Path, stem: str, place: int, pieces: Sequence[Piece]) -> bool:
    """Write the shard of the rank at `place`, durable on return; return whether there is one.

    Raises `UserError` for a full disk.
    """
    faults.hit(WRITE_POINT)
    if pieces:
        write_shard(directory / f"{stem}-{place}.safetensors", pieces)
    return bool(pieces)


def name_shards(
    group: Group,
    directory: Path,
    stem: str,
    *,
    wrote: bool,
    version: int,
    plan: str,
    loss_scale: tuple[float, ...] = (),
) -> None:
    """Name the shards of a checkpoint, of which this rank has written its own; all members together.

    `directory` must be shared by all of them. The checkpoint is durable once the first member has returned;
    until then the previous one is. Raises `UserError` for a full disk and a directory that is not shared, and
    as the group does.
    """
    faults.hit(WRITTEN_POINT)
    every = group.blocking.all_gather(np.array([wrote], np.int64)).reshape(-1)
    if group.rank == 0:
        places = np.flatnonzero(every).tolist()
        name_written(directory, stem, places, version=version, plan=plan, loss_scale=loss_scale)


def name_written(
    directory: Path,
    stem: str,
    places: Sequence[int],
    *,
    version: int,
    plan: str,
    loss_scale: tuple[float, ...] = (),
) -> None:
    """Name the shards of a checkpoint, which the ranks at these places have written: durable on return.

    Raises `UserError` for a full disk, and a directory that not all of them share.
    """
    files = tuple(f"{stem}-{at}.safetensors" for at in places)
    absent = [name for name in files if not (directory / name).exists()]
    if absent:
        raise UserError(
            f"{', '.join(absent)} is not in {directory} of this host: a checkpoint needs a directory that "
            "all ranks share. Name one with --out."
        )
    names = ShardNames(format=SHARDS_FORMAT, version=version, plan=plan, loss_scale=loss_scale, files=files)
    _take_over(directory, names)


def remove_unnamed(directory: Path, stem: str) -> None:
    """Remove the shards of a checkpoint that was not named; by the first member, which would have done it."""
    try:
        named = read_names(directory / SHARDS_NAME).files
    except UserError:
        named = ()
    if not any(name.startswith(stem) for name in named):
        for path in directory.glob(f"{stem}-*.safetensors"):
            path.unlink(missing_ok=True)


def write_alone(
    directory: Path,
    pieces: Sequence[Piece],
    *,
    version: int,
    plan: str,
    loss_scale: tuple[float, ...] = (),
) -> None:
    """Write a checkpoint, from one process that holds all of the state.

    Raises `UserError` for a full disk.
    """
    name = f"checkpoint-{version}-{secrets.randbits(64):016x}-0.safetensors"
    write_shard(directory / name, pieces)
    names = ShardNames(format=SHARDS_FORMAT, version=version, plan=plan, loss_scale=loss_scale, files=(name,))
    _take_over(directory, names)


def _take_over(directory: Path, names: ShardNames) -> None:
    """Write the index of the new shards, and remove the shards of the previous checkpoint."""
    write_names(directory, names)
    faults.hit(NAMED_POINT)
    for path in directory.glob("checkpoint-*.safetensors"):
        # Those of a later version may belong to a checkpoint that other ranks are writing already.
        if path.name not in names.files and is_shard(path) and _version_of(path) <= names.version:
            path.unlink(missing_ok=True)


def _version_of(path: Path) -> int:
    """Return the version that the name of a shard has."""
    return int(path.name.split("-")[1])


def is_shard(path: Path) -> bool:
    """Return whether a file has the name of a shard."""
    return _SHARD_NAME.fullmatch(path.name) is not None


def write_names(directory: Path, names: ShardNames) -> None:
    """Write the index of a checkpoint: durable on return. Raises `UserError` for a full disk."""
    data = msgspec.json.encode(names)
    write_atomically(directory / SHARDS_NAME, lambda file: file.write(data))


def write_shard(path: Path, pieces: Sequence[Piece]) -> None:
    """Write one shard: durable on return. Raises `UserError` for a full disk."""
    tensors = {
        f"{array}.{piece.name}": np.ascontiguousarray(data, piece.dtype).reshape(piece.cut.shape)
        for piece in pieces
        for array, data in zip(piece.names, piece.arrays, strict=False)
    }
    metadata = {f"digest.{name}": _digest(tensor) for name, tensor in tensors.items()}
    metadata |= {f"cut.{piece.name}": msgspec.json.encode(piece.cut).decode() for piece in pieces}
    made = save(tensors, metadata={"format": SHARDS_FORMAT, **metadata})
    write_atomically(path, lambda file: file.write(made))


def _digest(tensor: Array) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.data)


class SavedState:
    """The state in a checkpoint, read parameter by parameter. Close it after use.

    Open shards remain readable if the checkpoint is replaced. `loss_scale`: of float16, see `LossScale`.
    """

    def __init__(self, path: Path, plan: str) -> None:
        self.path = path
        self._files = ExitStack()
        try:
            names = self._open()
            require_plan(path, names.plan, plan)
        except BaseException:
            self._files.close()
            raise
        self.version, self.loss_scale = names.version, names.loss_scale

    def close(self) -> None:
        """Close its files."""
        self._files.close()

    def _open(self) -> ShardNames:
        for left in reversed(range(OPEN_TRIES)):
            names = read_names(self.path)
            self._parts: dict[str, list[tuple[Any, dict[str, str]]]] = {}
            try:
                for name in names.files:
                    self._open_shard(self.path.parent / name)
            except FileNotFoundError as error:
                self._files.close()
                if not left:
                    raise _unreadable(self.path, f"{error.filename} is missing") from error
            else:
                return names
        raise AssertionError("the last try returns or raises")

    def _open_shard(self, path: Path) -> None:
        try:
            path.open("rb").close()  # safetensors takes every failure to open for a missing file
            file = self._files.enter_context(safe_open(path, framework="numpy"))
            metadata = file.metadata() or {}
            if metadata.get("format") != SHARDS_FORMAT:
                raise ValueError(f"its format is {metadata.get('format')}, not {SHARDS_FORMAT}")
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        for key in metadata:
            if key.startswith("cut."):
                self._parts.setdefault(key.removeprefix("cut."), []).append((file, metadata))

    def verify(self) -> None:
        """Read all of it, and compare each digest. Raises `UserError` for damage."""
        every = {id(file): (file, metadata) for parts in self._parts.values() for file, metadata in parts}
        try:
            for file, metadata in every.values():
                for key, digest in metadata.items():
                    kind, _, name = key.partition(".")
                    if kind == "digest" and _digest(file.get_tensor(name)) != digest:
                        raise ValueError(
                            f"checksum mismatch in {name}: the shard was corrupted after it was written"
                        )
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(self.path, error) from error

    def size_of(self, name: str) -> int:
        """Return the elements of a whole parameter; 0 if there is nothing of it. Raises `UserError`."""
        try:
            for _, metadata in self._parts.get(name, ()):
                cut = msgspec.json.decode(metadata[f"cut.{name}"], type=ParameterSlice)
                return cut.outer * cut.each * cut.inner
        except (KeyError, ValueError) as error:
            raise _unreadable(self.path, error) from error
        return 0

    def parameter(self, array: str, slot: ParameterSlot, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return one array of a whole parameter, (slot.size,) of `dtype`. Raises `UserError` for damage."""
        whole = np.empty(slot.size, dtype)
        there = np.zeros(slot.size, np.bool_)
        try:
            for file, metadata in self._parts.get(slot.name, ()):
                cut = msgspec.json.decode(metadata[f"cut.{slot.name}"], type=ParameterSlice)
                cut.check(slot.size)
                found: Array = file.get_tensor(f"{array}.{slot.name}")
                if found.dtype != whole.dtype or found.shape != cut.shape:
                    raise ValueError(f"{array} of {slot.name} is {found.dtype} of shape {found.shape}")
                if metadata.get(f"digest.{array}.{slot.name}") != _digest(found):
                    raise ValueError(
                        f"checksum mismatch in {array} of {slot.name}: the shard was corrupted after it was "
                        "written"
                    )
                if cut.of(there).any():
                    raise ValueError(f"a part of {slot.name} occurs twice")
                cut.of(whole)[...] = found
                cut.of(there)[...] = True
            if not there.all():
                raise ValueError(f"a part of {slot.name} is missing")
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise _unreadable(self.path, error) from error
        return whole


def read_names(path: Path) -> ShardNames:
    """Return the index of the checkpoint at `path`. Raises `UserError` if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {MANIFEST_BYTES_MAX} bytes")
        names = msgspec.json.decode(data, type=ShardNames)
        if names.format != SHARDS_FORMAT or names.version < 0:
            raise ValueError(f"its format is {names.format}, its version {names.version}")
        strange = [name for name in names.files if not _SHARD_NAME.fullmatch(name)]
        if strange:
            raise ValueError(f"{strange[0]!r} is not the name of a shard")
    except FileNotFoundError as error:
        raise no_checkpoint(path) from error
    except (OSError, ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise _unreadable(path, error) from error
    return names


def checkpoint_in(directory: Path) -> Path | None:
    """Return the index of the last checkpoint of the run in `directory`; None if there is none."""
    path = directory / SHARDS_NAME
    return path if path.exists() else None


def open_state(path: Path, *, plan: str) -> SavedState:
    """Open a checkpoint: its index, or the directory of the run that wrote it.

    Raises `UserError` if it is missing, damaged, or belongs to a run with other settings or data than `plan`.
    """
    return SavedState(path / SHARDS_NAME if path.is_dir() else path, plan)


def take_state(
    saved: SavedState,
    state: AdamWState,
    layout: ParameterLayout,
    arrays: Sequence[StateArray],
    *,
    xp: ModuleType,
) -> None:
    """Fill a whole state, of arrays of `xp`, from a checkpoint. Raises `UserError` for damage."""
    for name, slot in product(arrays, layout.slots):
        getattr(state, name)[slot.span] = xp.asarray(saved.parameter(name, slot))


def require_state(path: Path, *, plan: str, steps: int) -> None:
    """Check that a run of `steps` can resume from what `open_state` would open, without reading its arrays.

    Raises `UserError` as that does, and if no step is left.
    """
    with closing(open_state(path, plan=plan)) as found:
        version = found.version
    if version >= steps:
        raise UserError(
            f"the checkpoint {path} is of step {version}, and --steps is {steps}: no step is left. "
            "Give more --steps, which are counted from the beginning."
        )


def no_checkpoint(path: Path) -> UserError:
    """Return the error for a missing checkpoint."""
    return UserError(f"there is no checkpoint at {path}: check the path given to --resume.")


def _unreadable(path: Path, why: object) -> UserError:
    reason = why.strerror if isinstance(why, OSError) and why.strerror else why
    return UserError(
        f"{path} cannot be read as a checkpoint: {reason}. Give --resume a run's directory with a whole "
        "checkpoint, or omit it to start from the beginning."
    )
