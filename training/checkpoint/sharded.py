"""Durable checkpoints: each rank writes what it holds, and a small index file lists all shards.

A shard is a safetensors file (`blocks`): slices of parameters' weights and moments, float32 but for
PyTorch's, each with its position in the whole parameter (`ParameterSlice`). Any number of ranks, on any
mesh, can therefore load a checkpoint written by any other. Each checkpoint's files have names of their own,
and others are deleted only after its index is durable: a crash at any moment leaves the last durable
checkpoint intact.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.checkpoint.blocks import Codec, Shard, encoded
from zbmd.training.checkpoint.index import (
    KEEP,
    SHARDS_FORMAT,
    SHARDS_NAME,
    Retention,
    ShardNames,
    candidates,
    is_index,
    put_index,
    read_index,
    remove_others,
    require_shared,
    unreadable,
)
from zbmd.training.checkpoint.plan import read_plan, require_plan
from zbmd.training.checkpoint.storage import Buffer, Directory, Storage, storage_of, url_of
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.training.optim import OptimizerConfig, arrays_of, saved_arrays
from zbmd.training.optim.elementwise import ARRAYS, AdamWState
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

Trained = tuple[npt.NDArray[np.float32], GPTConfig, int]
"""Flat parameters, the configuration of their model, and the step after which they were saved."""


def load_trained(path: Path) -> Trained:
    """Load the weights at `path`: a weights file, a checkpoint of any job, or a run's directory (the latest
    counts).

    Returns the float32 masters of a 16-bit checkpoint. Raises `UserError` if there are no weights, or they
    are damaged.
    """
    if url_of(path) is not None:
        return _of_checkpoint(path)
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


OPEN_TRIES: Final = 3
"""A checkpoint may be replaced between reading its index and opening its shards."""

WRITE_POINT = faults.declare("shards.write", "before a rank writes its shard of a checkpoint")
WRITTEN_POINT = faults.declare("shards.written", "when its shard is durable, before all are named")
INDEX_POINT = faults.declare("shards.index", "when all shards are durable, before the index is written")
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


def whole_pieces(layout: ParameterLayout, state: AdamWState, optimizer: OptimizerConfig) -> list[Piece]:
    """Return a checkpoint's content from one process that holds every parameter whole, on any device."""
    views = (layout.views(to_host(getattr(state, name))) for name in arrays_of(optimizer))
    return [
        Piece(
            slot.name,
            flat_slice(slot.size, 0, slot.size),
            tuple(held[: len(saved_arrays(optimizer, slot.name, slot.shape))]),
        )
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


def shard_name(stem: str, place: int) -> str:
    """Return the name of the shard of the rank at `place`."""
    return f"{stem}-{place}.safetensors"


def stem_of(version: int, token: int) -> str:
    """Return the beginning of the names of a new checkpoint's files. token: 64 bits, of no other one."""
    return f"checkpoint-{version}-{token:016x}"


def shard_of(pieces: Sequence[Piece], codec: Codec) -> tuple[list[Buffer], str]:
    """Return the bytes of a shard, and the digest of its header."""
    tensors = {
        f"{array}.{piece.name}": np.ascontiguousarray(data, piece.dtype).reshape(piece.cut.shape)
        for piece in pieces
        for array, data in zip(piece.names, piece.arrays, strict=False)
    }
    cuts = {f"cut.{piece.name}": msgspec.json.encode(piece.cut).decode() for piece in pieces}
    return encoded(tensors, {"format": SHARDS_FORMAT, **cuts}, codec)


def write_shard_of(
    storage: Storage, stem: str, place: int, pieces: Sequence[Piece], codec: Codec = Codec.NONE
) -> str:
    """Write the shard of the rank at `place`, durable on return; return the digest of its header.

    Without pieces nothing is written: "". Raises `UserError` for a full disk.
    """
    faults.hit(WRITE_POINT)
    if not pieces:
        return ""
    fragments, digest = shard_of(pieces, codec)
    storage.put(shard_name(stem, place), fragments)
    return digest


def name_written(
    storage: Storage,
    stem: str,
    headers: Mapping[int, str],
    *,
    version: int,
    plan: str,
    loss_scale: tuple[float, ...] = (),
    retention: Retention = KEEP,
    known: Container[str] | None = None,
) -> None:
    """Name the shards of a checkpoint: durable on return. Then remove what `retention` does not keep.

    headers: the digest of the header of each shard, by the place of the rank that has written it; known: see
    `remove_others`. Raises `UserError` for a full disk, and a directory that not all of them share.
    """
    files = tuple(shard_name(stem, place) for place in sorted(headers))
    require_shared(storage, files)
    names = ShardNames(
        format=SHARDS_FORMAT,
        version=version,
        plan=plan,
        loss_scale=loss_scale,
        files=files,
        headers=tuple(headers[place] for place in sorted(headers)),
    )
    faults.hit(INDEX_POINT)
    put_index(storage, names)
    faults.hit(NAMED_POINT)
    remove_others(storage, names, retention, known)


def write_alone(
    where: Path | str | Storage,
    pieces: Sequence[Piece],
    *,
    version: int,
    plan: str,
    loss_scale: tuple[float, ...] = (),
    retention: Retention = KEEP,
    codec: Codec = Codec.NONE,
) -> None:
    """Write a checkpoint, from one process that holds all of the state.

    Raises `UserError` for a full disk.
    """
    storage, stem = storage_of(where), stem_of(version, secrets.randbits(64))
    headers = {0: write_shard_of(storage, stem, 0, pieces, codec)}
    name_written(
        storage, stem, headers, version=version, plan=plan, loss_scale=loss_scale, retention=retention
    )


class SavedState:
    """The state in a checkpoint, read parameter by parameter. Close it after use.

    Open shards of a directory remain readable if the checkpoint is replaced. `path`: of its index;
    `loss_scale`: of float16, see `LossScale`.
    """

    def __init__(self, storage: Storage, name: str, plan: str) -> None:
        self.path = storage.where(name)
        self._storage, self._name = storage, name
        self._shards = list[tuple[str, Shard]]()
        try:
            names = self._open()
            require_plan(self.path, names.plan, plan)
        except BaseException:
            self.close()
            raise
        self.version, self.loss_scale = names.version, names.loss_scale

    def close(self) -> None:
        """Close its files."""
        for _, shard in self._shards:
            shard.close()

    def _open(self) -> ShardNames:
        for left in reversed(range(OPEN_TRIES)):
            names = read_index(self._storage, self._name)
            self._parts = dict[str, list[tuple[str, Shard]]]()
            try:
                for name, digest in zip(names.files, names.headers, strict=True):
                    self._open_shard(name, digest)
            except FileNotFoundError as error:
                self.close()
                self._shards.clear()
                if not left:
                    raise unreadable(self.path, "a shard is missing") from error
            else:
                return names
        raise AssertionError("the last try returns or raises")

    def _open_shard(self, name: str, digest: str) -> None:
        where = self._storage.where(name)
        try:
            file = self._storage.open(name)
            try:
                shard = Shard(file, digest=digest)
            except BaseException:
                file.close()
                raise
            self._shards.append((where, shard))
            if shard.metadata.get("format") != SHARDS_FORMAT:
                raise ValueError(f"its format is {shard.metadata.get('format')}, not {SHARDS_FORMAT}")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise unreadable(where, error) from error
        for key in shard.metadata:
            if key.startswith("cut."):
                self._parts.setdefault(key.removeprefix("cut."), []).append((where, shard))

    @property
    def shards(self) -> list[tuple[str, Shard]]:
        """Return its open shards, each with its path or URL."""
        return list(self._shards)

    def verify(self, *, place: int = 0, places: int = 1) -> None:
        """Read all of it, and compare the checksum of each block. Raises `UserError` for damage.

        Of `places` ranks that verify it together, the one at `place` reads each `places`-th block.
        """
        at = 0
        for where, shard in self._shards:
            try:
                blocks = shard.block_names()
                shard.verify(None if places == 1 else blocks[(place - at) % places :: places])
                at += len(blocks)
            except (OSError, ValueError) as error:
                raise unreadable(where, error) from error

    def size_of(self, name: str) -> int:
        """Return the elements of a whole parameter; 0 if there is nothing of it. Raises `UserError`."""
        try:
            for _, shard in self._parts.get(name, ()):
                cut = msgspec.json.decode(shard.metadata[f"cut.{name}"], type=ParameterSlice)
                return cut.outer * cut.each * cut.inner
        except (KeyError, ValueError) as error:
            raise unreadable(self.path, error) from error
        return 0

    def parameter(self, array: str, slot: ParameterSlot, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return one array of a whole parameter, (slot.size,) of `dtype`. Raises `UserError` for damage."""
        whole = np.empty(slot.size, dtype)
        there, at = np.zeros(slot.size, np.bool_), self.path
        try:
            for where, shard in self._parts.get(slot.name, ()):
                at = where
                cut = msgspec.json.decode(shard.metadata[f"cut.{slot.name}"], type=ParameterSlice)
                cut.check(slot.size)
                found = shard.tensor(f"{array}.{slot.name}")
                if found.dtype != whole.dtype or found.shape != cut.shape:
                    raise ValueError(f"{array} of {slot.name} is {found.dtype} of shape {found.shape}")
                if cut.of(there).any():
                    raise ValueError(f"a part of {slot.name} occurs twice")
                cut.of(whole)[...] = found
                cut.of(there)[...] = True
            if not there.all():
                raise ValueError(f"a part of {slot.name} is missing")
        except (OSError, KeyError, ValueError) as error:
            raise unreadable(at, error) from error
        return whole


def located(where: Path | str | Storage) -> tuple[Storage, str]:
    """Return the storage of a checkpoint, and the name of its index.

    where: the index, or the directory or URL of what has checkpoints: then the newest. Raises `UserError`.
    """
    if not isinstance(where, (Path, str)):
        return where, SHARDS_NAME
    text = url_of(where)
    if text is None:
        path = Path(where)
        return (Directory(path), SHARDS_NAME) if path.is_dir() else (Directory(path.parent), path.name)
    folder, _, name = text.rpartition("/")
    if name == SHARDS_NAME or is_index(name):
        return storage_of(folder), name
    return storage_of(text), SHARDS_NAME


def read_names(path: Path | str) -> ShardNames:
    """Return the index of the checkpoint at `path`. Raises `UserError` if it is missing or damaged."""
    return read_index(*located(path))


def checkpoint_in(where: Path) -> Path | None:
    """Return the index of the last checkpoint in the directory of a run; None if there is none."""
    path = where / SHARDS_NAME
    return path if path.exists() else None


def last_in(storage: Storage) -> str | None:
    """Return the path or URL of the index of the last checkpoint in a storage; None if there is none."""
    try:
        found = candidates(storage)
    except UserError:
        return None
    return storage.where(found[0]) if found else None


def open_state(path: Path | str | Storage, *, plan: str) -> SavedState:
    """Open a checkpoint: its index, or the directory of the run that wrote it.

    Raises `UserError` if it is missing, damaged, or belongs to a run with other settings or data than `plan`.
    """
    storage, name = located(path)
    return SavedState(storage, name, plan)


def take_state(
    saved: SavedState,
    state: AdamWState,
    layout: ParameterLayout,
    optimizer: OptimizerConfig,
    *,
    xp: ModuleType,
) -> None:
    """Fill a whole state, of arrays of `xp`, from a checkpoint. Raises `UserError` for damage."""
    for slot in layout.slots:
        for name in saved_arrays(optimizer, slot.name, slot.shape):
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
