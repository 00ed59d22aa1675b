"""A mirror of the shard of another rank, for optimizers whose updates a buddy cannot repeat.

Such an optimizer communicates in `step()`, is one of several, or keeps more than moments of its parameters'
shape. Its update is made before the vote: then each rank sends all of its part to its buddy, and `Slots` has
what a commit and a repetition need. A part lies in one piece of memory, of which each side has two.
"""

from __future__ import annotations

import copy
import importlib
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.training.torch import points
from zbmd.training.torch.encoding import decode, encode, name_of
from zbmd.training.torch.fsdp.division import buddy_of, ward_of
from zbmd.training.torch.fsdp.modules import is_sharded, local_of
from zbmd.training.torch.fsdp.replica import SCALED, Shard, belongs_to_shard, digests_of
from zbmd.training.torch.fsdp.slots import Slots
from zbmd.training.torch.transfer import Header, Shape, aligned, decode_header, empty, tensor_at
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = importlib.import_module("torch")
tensors_of_torch: Any = importlib.import_module("torch.distributed.tensor")

_LENGTH: Final = struct.Struct("<Q")
PART_BYTES_MAX: Final = 1 << 42
_OF_OPTIMIZER: Final = frozenset(("state", "param_groups", "defaults", *SCALED))
"""Attributes that are kept otherwise, or belong to one call of `step()`."""
_PLAIN: Final = (bool, int, float, str)
_DEPTH_MAX: Final = 4
REPLICATED: Final = -1
"""The placement of a DTensor that is whole on each rank; others are the dimension that is cut."""


class MirroredShard(Shard):
    """This rank's parameters, and all that its optimizers keep: moments however placed, entries, attributes.

    Raises `UserError` for what cannot be kept.
    """

    def state(self) -> Any:
        """Return the shard as `encoding.encode` takes it."""
        return {
            **super().state(),
            "kinds": [
                {name: kind for name, value in self._moments(each).items() if (kind := _kind(value, each))}
                for each in self.updated
            ],
            "entries": [_entries_of(optimizer) for optimizer in self.optimizers],
            "attributes": [_attributes_of(optimizer) for optimizer in self.optimizers],
        }

    def _moments(self, parameter: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer_of(parameter).state.get(parameter, {})
        return found

    def load(self, state: Any) -> None:
        """Take a part; see `Shard.load`. Its tensors become the optimizers' own."""
        super().load(state)
        try:
            kinds, entries, attributes = (list(state[name]) for name in ("kinds", "entries", "attributes"))
            for parameter, values, of in zip(self.updated, state["moments"], kinds, strict=True):
                for name, kind in of.items():
                    self._moments(parameter)[name] = _as_kind(values[name], kind, parameter)
            for optimizer, found, numbers in zip(self.optimizers, entries, attributes, strict=True):
                _require_known(optimizer, found, numbers)
                optimizer.state.update(found)
                for name in _attributes_of(optimizer).keys() - numbers.keys():
                    del vars(optimizer)[name]  # an update that is undone has set it for the first time
                vars(optimizer).update(numbers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RemoteProtocolError(f"a part, as another rank has sent it: {error!r}") from None

    @property
    def undivided(self) -> str:
        """Return the name of what is in it, is no number and has not the rows of its parameter; "": nothing.

        Such a state may be this rank's own, and its shape may follow from the number of ranks.
        """
        for parameter in self.updated:
            for name, value in self._moments(parameter).items():
                kind = _kind(value, parameter)
                is_whole = kind[:1] == ["dtensor"] and set(kind[1]) == {REPLICATED}
                is_cut = kind[:1] != ["dtensor"] and belongs_to_shard(local_of(value), parameter)
                if not (is_whole or is_cut or _is_number(value)):
                    return f"state {name!r}"
        more = [
            (f"entry {name!r}", each) for one in self.optimizers for name, each in _entries_of(one).items()
        ]
        more += [
            (f"attribute {name!r}", each)
            for one in self.optimizers
            for name, each in _attributes_of(one).items()
        ]
        return next((what for what, value in more if not _is_number(value)), "")

    @property
    def has_more(self) -> str:
        """Return the name of something in it that is neither a number nor a moment as FSDP2's; "": none."""
        for parameter in self.updated:
            for name, value in self._moments(parameter).items():
                is_moment = not _kind(value, parameter) and belongs_to_shard(local_of(value), parameter)
                if not (is_moment or _is_number(value)):
                    return f"state {name!r}"
        return next((f"entry {name!r}" for each in self.optimizers for name in _entries_of(each)), "")


def _is_number(value: Any) -> bool:
    """Whether a part of an optimizer's state is neither an array nor has several parts."""
    if isinstance(value, torch.Tensor):
        return bool(value.dim() == 0)
    return not isinstance(value, dict | list | tuple)


def _kind(value: Any, parameter: Any) -> list[Any]:
    """Return how a moment is placed; empty: as `replica.placed` takes it."""
    like = belongs_to_shard(local_of(value), parameter)
    if not is_sharded(value):
        return ["plain"] if like else []
    if like and value.placements == parameter.placements:
        return []
    known = {"Replicate": REPLICATED}
    places = [
        each.dim if type(each).__name__ == "Shard" else known.get(type(each).__name__)
        for each in value.placements
    ]
    if None in places or not is_sharded(parameter) or value.device_mesh != parameter.device_mesh:
        raise UserError(
            f"an optimizer has a state that is placed as {[*value.placements]}: a mirror takes those of its "
            "parameter's mesh, cut along a dimension or whole on each rank"
        )
    return ["dtensor", places, [*value.shape], [*value.stride()]]


def _as_kind(local: Any, kind: Sequence[Any], parameter: Any) -> Any:
    if kind[0] == "plain":
        return local
    _, places, shape, stride = kind
    return tensors_of_torch.DTensor.from_local(
        local,
        parameter.device_mesh,
        [
            tensors_of_torch.Replicate() if each == REPLICATED else tensors_of_torch.Shard(each)
            for each in places
        ],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def _entries_of(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer's state has beside its parameters', by name."""
    return {key: value for key, value in optimizer.state.items() if isinstance(key, str)}


def _attributes_of(optimizer: Any) -> dict[str, Any]:
    """Return the numbers and tensors that an optimizer has as attributes. Raises `UserError` for more."""
    found = {}
    for name, value in vars(optimizer).items():
        if name in _OF_OPTIMIZER or name.endswith("_hooks"):
            continue
        if isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and not is_sharded(value)):
            found[name] = value
        elif _has_tensors(value, 0):
            raise UserError(
                f"{type(optimizer).__name__} keeps tensors in its attribute {name!r}, which a replacement "
                "would miss: keep them in state, by parameter"
            )
    return found


def require_captured(optimizer: Any) -> None:
    """Raise `UserError` if an optimizer keeps tensors that a replacement does not get of a model in DDP."""
    kept = [name for name in vars(optimizer) if name not in _OF_OPTIMIZER and not name.endswith("_hooks")]
    for name in kept:
        value = vars(optimizer)[name]
        is_one = isinstance(value, torch.Tensor)
        if _has_tensors(value, 0) and not (is_one and not value.is_floating_point()):
            raise UserError(
                f"{type(optimizer).__name__} keeps tensors in its attribute {name!r}, which a replacement "
                "would miss: keep them in state, by parameter"
            )


def _require_known(optimizer: Any, entries: dict[Any, Any], attributes: dict[Any, Any]) -> None:
    """Raise `RemoteProtocolError` for what `_entries_of` and `_attributes_of` never return."""
    for name, value in attributes.items():
        is_kept = name in _OF_OPTIMIZER or str(name).endswith("_hooks")
        is_code = callable(getattr(type(optimizer), str(name), None))
        if is_kept or is_code or not isinstance(value, (*_PLAIN, torch.Tensor)):
            raise RemoteProtocolError(f"a part sets {name!r} of {type(optimizer).__name__} to {value!r:.60}")
    if strangers := [name for name in [*entries, *attributes] if not isinstance(name, str)]:
        raise RemoteProtocolError(f"a part of {type(optimizer).__name__} has {strangers[0]!r:.60} as a name")


def _has_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, torch.nn.Parameter) or depth > _DEPTH_MAX:
        return False
    if isinstance(value, torch.Tensor):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list | tuple) and any(_has_tensors(each, depth + 1) for each in inner)


class _Memory:
    """Two pieces of memory, of which the one that holds what is committed is never written."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def free(self, nbytes: int) -> Any:
        """Return as many bytes that are not committed."""
        if self._pieces[0].numel() != nbytes:
            self._pieces[0] = torch.empty(nbytes, dtype=torch.uint8)
        return self._pieces[0]

    def commit(self) -> None:
        """Count what was written last as committed."""
        self._pieces.reverse()


def packed(state: Any, memory: _Memory) -> Any:
    """Return a part as bytes: the length of its header, the header, tensors. Raises as `encode`."""
    tree, inner = encode(state, "the part of a rank")
    if any(is_sharded(each) for each in inner):
        raise UserError("an optimizer keeps DTensors in lists or dictionaries, which a mirror does not take")
    shapes = [Shape(name_of(each.dtype), list(each.shape)) for each in inner]
    header = msgspec.msgpack.encode(Header(tree, shapes, []))
    head = np.frombuffer(_LENGTH.pack(len(header)) + header, np.uint8)
    end = head.size
    for each in inner:
        end = aligned(end) + each.numel() * each.element_size()
    whole, at = memory.free(end), head.size
    whole[:at] = torch.from_numpy(head.copy())
    for each in inner:
        into, at = tensor_at(whole, at, each.detach())
        into.copy_(each.detach())
    return whole


def unpacked(whole: Any) -> Any:
    """Return the part that these bytes are, over their memory. Raises `RemoteProtocolError`."""
    if whole.numel() < _LENGTH.size:
        raise RemoteProtocolError(f"a part of {whole.numel()} bytes came")
    (length,) = _LENGTH.unpack(whole[: _LENGTH.size].numpy().tobytes())
    at, inner = _LENGTH.size + min(length, whole.numel()), []
    header = decode_header(whole[_LENGTH.size : at].numpy().tobytes())
    for shape in header.tensors:
        each, at = tensor_at(whole, at, empty(shape))
        inner.append(each)
    return decode(header.tree, inner)


class Mirror:
    """The mirror of one rank, whose part is `own`: of its ward's, and of its own as it is committed."""

    def __init__(self, own: MirroredShard) -> None:
        self._own, self.slots = own, Slots[Any]()
        self._out, self._in = _Memory(), _Memory()
        self._digests: tuple[int, ...] = ()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def begin(self, *, compares: bool) -> None:
        """An optimizer is about to update. compares: whether digests of the part before are wanted."""
        if self.slots.updating:
            return
        self._digests = digests_of(self._own, self._own.state()) if compares else ()
        own = self.slots.own
        self.slots.begin(copy.deepcopy(self._own.state()) if own is None else own)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def deliver(self, group: Group, end_ns: int, rank: int, size: int) -> None:
        """Send the updated part to the buddy, receive the ward's. Raises as operations of `group` do."""
        own = packed(self._own.state(), self._out)
        length, theirs = np.array([own.numel()], np.int64), np.zeros(1, np.int64)
        self._exchange(group, end_ns, length, theirs, rank, size)
        if not 0 < theirs[0] <= PART_BYTES_MAX:
            raise RemoteProtocolError(f"a part of {theirs[0]} bytes is to come")
        faults.hit(points.MIRRORING)
        ward = self._in.free(int(theirs[0]))
        self._exchange(group, end_ns, bytes_over(own), bytes_over(ward), rank, size)
        self.slots.hold(unpacked(own), unpacked(ward))

    @staticmethod
    def _exchange(group: Group, end_ns: int, out: Any, into: Any, rank: int, size: int) -> None:
        sends, receives = [0] * size, [0] * size
        sends[buddy_of(rank, size)], receives[ward_of(rank, size)] = out.size, into.size
        group.submit(lambda c: c.all_to_all_v(out, sends, receives, into, deadline_ns=end_ns)).result()

    def divided(self, ward: Any) -> None:
        """The own part has come from elsewhere, for another number of ranks. ward: None: there is none."""
        self.slots.replace()
        self.slots.keep(ward)

    def commit(self) -> None:
        """The transaction is committed."""
        if self.slots.next_own is not None:
            self._out.commit()
            self._in.commit()
        self.slots.commit()

    def go_back(self) -> None:
        """The transaction is to be repeated: have the part as it is committed."""
        own = self.slots.go_back()
        if own is not None:
            self._own.load(copy.deepcopy(own))

    def digests(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return those of this rank's part before the update, and of the ward's that is committed."""
        ward = self.slots.ward
        return self._digests, () if ward is None or not self._digests else digests_of(self._own, ward)

    def state(self) -> Any:
        """Return the ward's part, as `MirroredShard.state` returns the original."""
        return self.slots.ward
