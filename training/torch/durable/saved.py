"""The content of a loop's checkpoint: pieces of its parameters and moments, and the rest of its state.

A parameter that all ranks have alike is written by rank 0, a shard by its rank, each with its moments. So any
number of ranks can read them. The rest, which is small, is one piece more, of rank 0: see `transfer.rest_of`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.checkpoint.formats.tensors import STATE, WEIGHTS, Tensor, described_piece, key_of
from zbmd.training.checkpoint.sharded import Piece, SavedState, open_state, read_names
from zbmd.training.checkpoint.verified import newest_whole
from zbmd.training.run.loop_steps import LoopPlan
from zbmd.training.torch.durable.checkpoints import Options
from zbmd.training.torch.encoding import dtype_named, from_blob, name_of, to_blob
from zbmd.training.torch.exchange import Exchange
from zbmd.training.torch.fsdp.modules import is_sharded, local_of
from zbmd.training.torch.fsdp.replica import placed
from zbmd.training.torch.state import LoopState
from zbmd.training.torch.transfer import Carried, Position, loaded, own_tensors, rest_of
from zbmd.training.torch.votes import noted_of, without_wishes
from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = importlib.import_module("torch")
layouts: Any = importlib.import_module("torch.distributed.tensor._utils")

_VOTE_BYTES: Final = 8
REST: Final = "zbmd.loop"
"""The name of the piece with the rest."""
_NUMPY: Final = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
)
"""Dtypes that a file has as they are; others as unsigned integers of their size."""


class Part(NamedTuple):
    """The part of a tensor that this rank has. size: of the whole. cut: None: it has nothing.

    writes: whether it is for this rank to write.
    """

    name: str
    tensor: Any
    size: int
    cut: ParameterSlice | None
    writes: bool

    @property
    def slot(self) -> ParameterSlot:
        """The whole tensor, as a checkpoint has it."""
        return ParameterSlot(name=self.name, shape=(self.size,), offset=0, decayed=False)


def part_of(name: str, tensor: Any, rank: int) -> Part:
    """Return the part of a tensor, which may be a DTensor as `fully_shard` makes it, that `rank` has."""
    size = math.prod(tensor.shape)
    if not is_sharded(tensor):
        return Part(name, tensor, size, flat_slice(size, 0, size) if size else None, rank == 0)
    mesh, placements = tensor.device_mesh, tensor.placements
    local, offset = layouts.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    axis = next(each.dim for each in placements if each.is_shard())
    coordinate = mesh.get_coordinate()
    first = all(at == 0 for at, each in zip(coordinate, placements, strict=True) if not each.is_shard())
    if math.prod(local) == 0:
        return Part(name, tensor, size, None, first)
    cut = ParameterSlice(
        math.prod(tensor.shape[:axis]),
        tensor.shape[axis],
        math.prod(tensor.shape[axis + 1 :]),
        offset[axis],
        offset[axis] + local[axis],
    )
    return Part(name, tensor, size, cut, first)


def _parts(state: LoopState) -> tuple[list[Part], list[list[Part]]]:
    """Return the parts of all tensors, and those of the parameters of each optimizer."""
    named = [part_of(name, tensor, state.rank) for name, tensor in own_tensors(state.models)]
    known = {id(part.tensor): part for part in named}
    updated: list[list[Part]] = []
    for number, optimizer in enumerate(state.optimizers):
        every = [each for group in optimizer.param_groups for each in group["params"]]
        for at, each in enumerate(every):
            if id(each) not in known:
                known[id(each)] = part_of(f"of the optimizer {number}.{at}", each, state.rank)
                named.append(known[id(each)])
        updated.append([known[id(each)] for each in every])
    return named, updated


def _divided(moments: dict[str, Any], parameter: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of the moments that have an element for each of the parameter's, and the others."""
    shape = local_of(parameter).shape
    like = {
        name: local_of(value)
        for name, value in moments.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0 and local_of(value).shape == shape
    }
    return like, {name: value for name, value in moments.items() if name not in like}


def pieces_of(state: LoopState, version: int) -> list[Piece]:
    """Return what this rank writes of a checkpoint. version: of the machine.

    What no transaction writes before its vote is not copied. Raises `UserError` for a state that cannot be
    saved.
    """
    if state.shards is not None:
        state.shards.require_savable()
    named, updated = _parts(state)
    buffers = {id(buffer) for _, buffer in state.boundary.buffers()}
    arrays = {part.name: [(WEIGHTS, local_of(part.tensor))] for part in named}
    moments: list[list[Any]] = []
    for number, (optimizer, parts) in enumerate(zip(state.optimizers, updated, strict=True)):
        moments.append([])
        for part in parts:
            like, others = _divided(dict(optimizer.state.get(part.tensor, {})), part.tensor)
            arrays[part.name] += [(f"{number}.{name}", value) for name, value in like.items()]
            moments[-1].append([{name: name_of(value.dtype) for name, value in like.items()}, others])
    pieces = [
        Piece(
            part.name,
            part.cut,
            tuple(
                _flat(part.name, tensor, copies=id(part.tensor) in buffers) for _, tensor in arrays[part.name]
            ),
            names=tuple(name for name, _ in arrays[part.name]),
            dtype=None,
        )
        for part in named
        if part.writes and part.cut is not None
    ]
    if state.rank == 0:
        rest = rest_of(state.optimizers, state.boundary, state.carried(version), moments=False)
        blob = np.frombuffer(to_blob([rest, moments], "the state of a loop"), np.uint8)
        pieces.append(Piece(REST, flat_slice(blob.size, 0, blob.size), (blob,), names=(STATE,), dtype=None))
        pieces.append(described_piece(_described(named, arrays), pieces[-1:]))
    return pieces


def _described(named: Sequence[Part], arrays: Mapping[str, list[tuple[str, Any]]]) -> list[Tensor]:
    """Return the tensors of a checkpoint, for readers without this loop."""
    return [
        Tensor(
            key_of(array, part.name, array.partition(".")[2]),
            array,
            part.name,
            name_of(value.dtype),
            tuple(part.tensor.shape),
        )
        for part in named
        for array, value in arrays[part.name]
    ]


def load(saved: SavedState, state: LoopState) -> Carried:
    """Load a checkpoint into models, optimizers and what has a `state_dict`; return the rest.

    Raises `UserError` for a damaged one, and for one of other parameters.
    """
    named, updated = _parts(state)
    try:
        size = saved.size_of(REST)
        slot = ParameterSlot(name=REST, shape=(size,), offset=0, decayed=False)
        rest, moments = from_blob(saved.parameter(STATE, slot, np.uint8).tobytes(), "its state")
        with torch.no_grad():
            for part in named:
                if part.cut is not None:
                    local = local_of(part.tensor).detach()
                    local.copy_(_read(saved, WEIGHTS, part, local.dtype))
        for number, parts in enumerate(updated):
            _load_moments(saved, state.optimizers[number], number, parts, moments[number])
        return loaded(rest, state.optimizers, state.boundary)
    except (RemoteProtocolError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{saved.path} cannot be read as a checkpoint of this loop: {error}. Give resume=True in a "
            "directory whose checkpoint is whole, and of the same model and optimizers."
        ) from error


def agreed_name(exchange: Exchange, where: str, rank: int, refused: str) -> str:
    """Return the name of the index that all ranks go on from: of the newest checkpoint that is whole.

    Each rank verifies a part of it; all call this. refused: why rank 0 must not go on. Raises `UserError` on
    all ranks.
    """
    try:
        told = exchange.gather(refused.encode())
        if told[0]:
            raise UserError(told[0].decode(errors="replace"))
        places = len(told)

        def vote(at: int) -> list[int]:
            rows = exchange.gather(at.to_bytes(_VOTE_BYTES, "little"))
            return [int.from_bytes(row, "little") for row in rows]

        found = newest_whole(Path(where), vote, place=rank, places=places)
        names = {row.decode(errors="replace") for row in exchange.gather(_name_in(found).encode())}
        if len(names) > 1:
            raise UserError(
                f"ranks see other checkpoints in {where}: {sorted(names)} are the newest whole ones; give "
                "a directory that all hosts share, or copies that are alike"
            )
    except LOSSES as error:  # all meet again before the first step, and have chosen by then
        CONTINUITY.note(error)
        if refused:
            raise UserError(refused) from None
        found = newest_whole(Path(where))
    return _name_in(found)


def _name_in(index: Path) -> str:
    return str(index).rpartition("/")[2]


def resumed(
    options: Options, state: LoopState, plan: LoopPlan, seed: int | None, refused: str
) -> tuple[int, str]:
    """Go on from a checkpoint, if that is asked for; return its version, and why that cannot be.

    seed: see `resume`. refused: why rank 0 must not write here.
    """
    if not options.resume:
        return 0, refused
    exchange = Exchange(timedelta(seconds=CONTINUITY.groups[0].limit_s))
    try:
        name = agreed_name(exchange, options.saves.where, state.rank, refused)
        return resume(options.saves.index(name), state, plan, seed), ""
    except UserError as error:
        return 0, str(error)


def resume(where: Path | str, state: LoopState, plan: LoopPlan, seed: int | None) -> int:
    """Go on from a checkpoint; return its version. seed: None: that of the checkpoint.

    where: of its index, or the directory of the newest one. Raises `UserError` for one that is missing,
    damaged or of another run, and for another number of ranks where that cannot be.
    """
    path = str(where)
    there = LoopPlan.read(read_names(path).plan)
    ranks = plan.ranks if there is None else there.ranks
    with closing(open_state(path, plan=msgspec.structs.replace(plan, ranks=ranks).text())) as saved:
        carried = load(saved, state)
    if ranks == plan.ranks:
        carried = replace(carried, rows=tuple(without_wishes(row) for row in carried.rows))
    else:
        carried = replace(carried, rows=(), position=_at_end_of_pass(path, carried, ranks, plan.ranks))
    if seed is not None and seed != carried.seed:
        raise UserError(
            f"{path} belongs to a run with seed {carried.seed}, so it cannot be resumed by "
            f"zbmd.torch.resilient(seed={seed}): give that seed, or none"
        )
    state.adopt(carried)
    return carried.version


def _at_end_of_pass(path: str, carried: Carried, there: int, here: int) -> Position:
    """Return the position for another number of ranks. Raises `UserError` in the middle of a pass."""
    position, noted = carried.position, noted_of(carried.rows[0], there) if carried.rows else None
    if noted is not None and noted.step == position.step and noted.drawn[0].batches == position.at:
        return position._replace(passes=position.passes + 1, at=0)  # that was the last batch
    if not position.at:
        return position
    raise UserError(
        f"{path} is of step {position.step}, in the middle of a pass over the data, which the samplers of "
        f"{there} ranks deal otherwise than those of {here}: start {there} ranks, or go on from a checkpoint "
        "at the end of a pass"
    )


def _load_moments(
    saved: SavedState, optimizer: Any, number: int, parts: Sequence[Part], moments: Sequence[Any]
) -> None:
    optimizer.state.clear()
    on_device = {
        id(each)
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")  # then the count of steps is on the device, too
        for each in group["params"]
    }
    for part, (like, others) in zip(parts, moments, strict=True):
        where = local_of(part.tensor).device
        values = {
            name: each.to(where) if isinstance(each, torch.Tensor) and id(part.tensor) in on_device else each
            for name, each in others.items()
        }
        for name, dtype in like.items():
            value = _read(saved, f"{number}.{name}", part, dtype_named(dtype)).to(where)
            values[name] = placed(value, part.tensor)
        if values:
            optimizer.state[part.tensor] = values


def _read(saved: SavedState, array: str, part: Part, dtype: Any) -> Any:
    """Return this rank's part of one array of a checkpoint, as a tensor of the shape that it has here."""
    local = local_of(part.tensor)
    if part.cut is None:
        return torch.empty(local.shape, dtype=dtype)
    whole = saved.parameter(array, part.slot, _file_dtype(part.name, dtype))
    own = np.ascontiguousarray(part.cut.of(whole)).reshape(-1)
    return torch.from_numpy(own.view(np.uint8)).view(dtype).reshape(local.shape)


def _flat(name: str, tensor: Any, *, copies: bool) -> Array:
    """Return a tensor as a file has it, flat: its own memory, or a copy of that."""
    whole = bytes_over(tensor.detach().cpu().contiguous())
    return (whole.copy() if copies else whole).view(_file_dtype(name, tensor.dtype))


def _file_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    known = name_of(dtype)
    if known in _NUMPY:
        return np.dtype(known)
    if dtype.itemsize > np.dtype(np.uint64).itemsize:
        raise UserError(f"{name} is {known}, which no checkpoint has: save it as real numbers")
    return np.dtype(f"u{dtype.itemsize}")
