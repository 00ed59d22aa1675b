"""The state of a loop, from a survivor to a replacement: tensor by tensor, without pickle.

A header says how the state is nested; the tensors follow in its order, into the replacement's own memory
where it has such tensors (parameters, buffers), else into new ones (moments).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.group.group import Group
from zbmd.collectives.native._messages import Request
from zbmd.collectives.torch.tensors import Array, bytes_over, tensor_text
from zbmd.training.torch import points
from zbmd.training.torch.durable.devices import own_device
from zbmd.training.torch.encoding import decode, dtype_named, encode, name_of
from zbmd.training.torch.rollback import Boundary, hyperparameters, load, restore_hyperparameters
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.memory.ahead import mapped_ahead

torch: Any = importlib.import_module("torch")

TAG: Final = 0
LABEL: Final = b"uint8[]"
"""Of each message between ranks of one host."""
HEADER_BYTES_MAX: Final = 1 << 30
COPIED_BYTES_MAX: Final = 256 << 20
"""Of copies of a device's tensors on their way, beside the largest one."""


class Shape(msgspec.Struct, array_like=True, frozen=True):
    """A tensor that follows. on_device: whether it was on its rank's device, and is to be there again."""

    dtype: str
    shape: list[int]
    on_device: bool = False


class Header(msgspec.Struct, array_like=True, frozen=True):
    """The state without its tensors. tensors: of `tree`, in order. own: number of the receiver's tensors."""

    tree: bytes
    tensors: list[Shape]
    own: list[str]


_headers: Final = msgspec.msgpack.Decoder(Header)


class Position(NamedTuple):
    """The place that the committed transactions have reached.

    step: committed steps. passes: over the data. at: steps in the pass under way. every: calls of `run.every`
    that are done after the last step. saved: whether the state after it was saved before all went on (1).
    """

    step: int = 0
    passes: int = 0
    at: int = 0
    every: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The rest of a state, beside the state of models and optimizers.

    rows: of the last vote. flags: see `KeptBuckets`.
    """

    version: int
    seed: int
    position: Position
    rows: tuple[bytes, ...]
    flags: tuple[bool, ...]


def give(
    group: Group,
    to: int,
    own: Sequence[tuple[str, Any]],
    optimizers: Sequence[Any],
    boundary: Boundary,
    carried: Carried,
    *,
    moments: bool = True,
) -> None:
    """Send the state to rank `to` of the group. Raises as `Group.send` does.

    own: tensors that the other has, too, by name. moments: whether those of optimizers are sent.
    """
    state = rest_of(optimizers, boundary, carried, moments=moments)
    send_tree(group, to, state, "the state of a loop", own)


def rest_of(optimizers: Sequence[Any], boundary: Boundary, carried: Carried, *, moments: bool) -> Any:
    """Return a state without the tensors of models, as `loaded` takes it."""
    return {
        "optimizers": [[hyperparameters(one), _moments(one) if moments else None] for one in optimizers],
        "others": [other.state_dict() for other in boundary.others],
        "changing": boundary.changing,
        "version": carried.version,
        "seed": carried.seed,
        "position": tuple(carried.position),
        "rows": carried.rows,
        "flags": carried.flags,
    }


def send_tree(group: Group, to: int, state: Any, what: str, own: Sequence[tuple[str, Any]] = ()) -> None:
    """Send nested containers of tensors, after the tensors `own`. Raises as `Group.send` does."""
    tree, inner = encode(state, what)
    header = msgspec.msgpack.encode(Header(tree, shapes_of(inner), [described(*each) for each in own]))
    sending = _Sending(group, to)
    sending.send(np.array([len(header)], np.int64).view(np.uint8))
    sending.send(np.frombuffer(header, np.uint8).copy())
    tensors = [tensor for _, tensor in own] + inner
    for number, tensor in enumerate(tensors):
        if number == len(tensors) // 2:
            sending.finish()
            faults.hit(points.GIVE)
        if not tensor.is_cpu and sending.nbytes > COPIED_BYTES_MAX:
            sending.finish()
        sending.send(bytes_over(tensor.detach().cpu().contiguous()))
    sending.finish()


def shapes_of(tensors: Sequence[Any]) -> list[Shape]:
    """Return the description of tensors that follow."""
    return [Shape(name_of(each.dtype), list(each.shape), not each.is_cpu) for each in tensors]


class _Sending:
    """Arrays of bytes on their way to rank `to`, all at once if it can read this rank's memory.

    nbytes: of those that are under way.
    """

    def __init__(self, group: Group, to: int) -> None:
        self._group, self._to = group, to
        self._requests: list[Request] = []
        self.nbytes = 0

    def send(self, data: Array) -> None:
        """Send an array, which must not change before `finish`. Raises as `Group.send` does."""
        direct = self._group.direct
        if not data.size:
            return
        if direct is None:
            self._group.blocking.send(data, self._to, tag=TAG)
        else:
            self._requests.append(direct.send(data, self._to, TAG, LABEL, timeout_ns(None)))
            self.nbytes += data.nbytes

    def finish(self) -> None:
        """Return once all of them have been received. Raises as `Group.send` does."""
        direct, requests = self._group.direct, self._requests
        while direct is not None and requests:
            direct.wait(requests.pop(0))
        self.nbytes = 0


def _receive(group: Group, source: int, into: Array) -> None:
    """Receive an array of bytes that `_Sending` sends. Raises as `Group.recv` does."""
    direct = group.direct
    if not into.size:
        return
    if direct is None:
        group.blocking.recv(source, tag=TAG, out=into)
    else:
        direct.wait(direct.receive(into, source, TAG, LABEL, timeout_ns(None)))


def take(
    group: Group,
    source: int,
    own: Sequence[tuple[str, Any]],
    optimizers: Sequence[Any],
    boundary: Boundary,
) -> Carried:
    """Receive the state from rank `source` of the group.

    Raises as `Group.recv` does, `UserError` if the model is another one here, and `RemoteProtocolError`.
    """
    return loaded(receive_tree(group, source, own), optimizers, boundary)


def receive_tree(
    group: Group, source: int, own: Sequence[tuple[str, Any]] = (), into: Sequence[Any] = ()
) -> Any:
    """Receive what `send_tree` sends: the tensors `own` in their place. Raises as `take` does.

    into: memory for the first ones of the others, where their dtypes and shapes are those.
    """
    size = np.zeros(1, np.int64)
    _receive(group, source, size.view(np.uint8))
    if not 0 < size[0] <= HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"a header of {size[0]} bytes came before the state of a loop")
    data = np.zeros(size[0], np.uint8)
    _receive(group, source, data)
    header = decode_header(data.tobytes())
    require_same([described(name, tensor) for name, tensor in own], header.own)
    first = [_fitting(*pair) for pair in zip(into, header.tensors, strict=False)]
    inner = [*first, *map(empty, header.tensors[len(first) :])]
    arrays = [bytes_over(tensor) for tensor in inner]
    with mapped_ahead(arrays):
        for _, tensor in own:
            is_there = tensor.is_cpu and tensor.is_contiguous()
            flat = tensor.detach() if is_there else torch.empty(tensor.shape, dtype=tensor.dtype)
            _receive(group, source, bytes_over(flat))
            if not is_there:
                with torch.no_grad():
                    tensor.detach().copy_(flat)
        for array in arrays:
            _receive(group, source, array)
    return decode(header.tree, placed_again(inner, header.tensors))


def placed_again(tensors: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
    """Return tensors of the host, those on this rank's device that were on the sender's."""
    return [
        tensor.to(own_device()) if shape.on_device else tensor
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def _fitting(tensor: Any, shape: Shape) -> Any:
    """Return the tensor, or a new one if another is to be received."""
    fits = (
        tensor.is_cpu
        and tensor.is_contiguous()
        and (name_of(tensor.dtype), [*tensor.shape]) == (shape.dtype, shape.shape)
    )
    return tensor.detach() if fits else empty(shape)


def decode_header(data: bytes) -> Header:
    """Decode what comes before the tensors. Raises `RemoteProtocolError`."""
    try:
        return _headers.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"the header of the state of a loop: {error}") from None


def empty(shape: Shape) -> Any:
    """Return memory for a tensor that follows. Raises `RemoteProtocolError`."""
    try:
        return torch.empty(shape.shape, dtype=dtype_named(shape.dtype))
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"the state of a loop is to have a tensor {shape}: {error}") from None


ALIGNED: Final = 64


def aligned(at: int) -> int:
    """Return the first place from `at` on at which a tensor may lie in memory that has several."""
    return -(-at // ALIGNED) * ALIGNED


def tensor_at(memory: Any, at: int, like: Any) -> tuple[Any, int]:
    """Return a tensor of the dtype and shape of `like` that lies in bytes, from `at` on, and its end.

    Raises `RemoteProtocolError` if it lies beyond them.
    """
    at, nbytes = aligned(at), like.numel() * like.element_size()
    if at + nbytes > memory.numel():
        raise RemoteProtocolError(f"a tensor of a state lies beyond its {memory.numel()} bytes")
    if not nbytes:
        return torch.empty_like(like), at
    return memory[at : at + nbytes].view(like.dtype).view(like.shape), at + nbytes


def own_tensors(models: Sequence[Any], *, parameters: bool = True) -> list[tuple[str, Any]]:
    """Return the parameters and buffers of the models, or the buffers alone, by name."""
    return [
        (f"{number}.{name}" if len(models) > 1 else name, tensor)
        for number, model in enumerate(models)
        for named in ([model.named_parameters] if parameters else []) + [model.named_buffers]
        for name, tensor in named()
    ]


def described(name: str, tensor: Any) -> str:
    """Return a tensor in words: `0.weight: float32[4,3]`."""
    return f"{name}: {tensor_text(tensor.dtype, tensor.shape)}"


def require_same(here: list[str], there: list[str]) -> None:
    """Raise `UserError` if the tensors of a model are described otherwise elsewhere."""
    for mine, theirs in zip([*here, "nothing"], [*there, "nothing"], strict=False):
        if mine != theirs:
            raise UserError(f"the model differs between ranks: {mine} on the replacement, {theirs} elsewhere")


def _moments(optimizer: Any) -> list[dict[str, Any]]:
    """Return the state of each parameter of an optimizer, in the order of its groups."""
    return [
        dict(optimizer.state.get(each, {})) for group in optimizer.param_groups for each in group["params"]
    ]


def loaded(state: Any, optimizers: Sequence[Any], boundary: Boundary) -> Carried:
    """Load what `rest_of` has returned elsewhere; return the rest. Raises as `take` does."""
    try:
        for optimizer, (groups, moments) in zip(optimizers, state["optimizers"], strict=True):
            restore_hyperparameters(optimizer, groups)
            if moments is None:
                continue
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            optimizer.state.clear()
            for parameter, values in zip(parameters, moments, strict=True):
                if values:
                    optimizer.state[parameter] = values
        for other, values in zip(boundary.others, state["others"], strict=True):
            load(other, values)
        boundary.changing = list(state["changing"])
        return Carried(
            version=int(state["version"]),
            seed=int(state["seed"]),
            position=Position(*(int(number) for number in state["position"])),
            rows=tuple(bytes(row) for row in state["rows"]),
            flags=tuple(bool(flag) for flag in state["flags"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"the state of a loop, as another rank has sent it: {error!r}") from None
