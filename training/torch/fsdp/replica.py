"""A copy of the shard of another rank, which makes the updates of its optimizer as well.

The optimizer's copy runs on plain tensors: the shard's local ones. That ends with the same bits, for an
optimizer whose `step()` computes each element from its own gradient and state, which two steps of both kinds
on small tensors show; updates of others are mirrored (`mirror`).
"""

from __future__ import annotations

import importlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.training.torch.encoding import encode
from zbmd.training.torch.fsdp.modules import is_sharded, local_of
from zbmd.training.torch.rollback import hyperparameters
from zbmd.transport.errors import RemoteProtocolError, UserError

torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")

_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
SCALED: Final = ("grad_scale", "found_inf")
"""Set by a `GradScaler` while a fused optimizer steps."""
_PROBES: Final = 2
_PROBED_MAX: Final = 1 << 16
"""Elements of a parameter, but for one row: optimizers that treat small ones otherwise begin well below."""
_SUBNORMAL, _ONE = np.array([1, 0x3F800000], np.uint32).view(np.float32)


def twin_of(optimizer: Any, parameters: Sequence[Sequence[Any]]) -> Any:
    """Return an optimizer with the same settings, without state and hooks, for other parameters, by group."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, bound to the first optimizer
    for name in _HOOKS:
        setattr(twin, name, OrderedDict())
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(own)} for group, own in zip(optimizer.param_groups, parameters, strict=True)
    ]
    return twin


def moments_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the state of each parameter of an optimizer, with local tensors, in the order of its groups."""
    return [
        {name: local_of(value) for name, value in optimizer.state.get(each, {}).items()}
        for group in optimizer.param_groups
        for each in group["params"]
    ]


def belongs_to_shard(value: Any, parameter: Any) -> bool:
    """Return whether a tensor of an optimizer's state is sharded as its parameter is."""
    return (
        is_sharded(parameter)
        and isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.shape == local_of(parameter).shape
    )


class Shard:
    """This rank's parameters: of the models, and what else `optimizers` have."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.updated = [each for group in groups for each in group["params"]]
        named = [
            (f"{number}.{name}", each)
            for number, model in enumerate(models)
            for name, each in model.named_parameters()
        ]
        known = {id(each) for _, each in named}
        named += [
            (f"of the optimizer {at}", each) for at, each in enumerate(self.updated) if id(each) not in known
        ]
        self.names = [name for name, _ in named]
        self.parameters = [each for _, each in named]
        places = {id(each): at for at, each in enumerate(self.parameters)}
        self.places = [[places[id(each)] for each in group["params"]] for group in groups]
        self._optimizers_of = {
            id(each): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }

    def optimizer_of(self, parameter: Any) -> Any:
        """Return the optimizer that updates a parameter."""
        return self._optimizers_of[id(parameter)]

    def state(self) -> Any:
        """Return the shard as `encoding.encode` takes it."""
        return {
            "names": self.names,
            "parameters": [local_of(each).detach() for each in self.parameters],
            "moments": [each for optimizer in self.optimizers for each in moments_of(optimizer)],
        }

    def load(self, state: Any) -> None:
        """Take the shard that another rank has kept. Raises `UserError` if the model is another one."""
        tensors, moments = _checked(self, state)
        with torch.no_grad():
            for name, own, given in zip(self.names, self.parameters, tensors, strict=True):
                mine = local_of(own)
                if (mine.dtype, mine.shape) != (given.dtype, given.shape):
                    raise UserError(
                        f"the model differs between ranks: {name} is {mine.dtype}{[*mine.shape]} on the "
                        f"replacement, {given.dtype}{[*given.shape]} was kept"
                    )
                if mine.data_ptr() != given.data_ptr():
                    mine.detach().copy_(given)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for own, values in zip(self.updated, moments, strict=True):
            if values:
                self.optimizer_of(own).state[own] = {
                    name: placed(value, own) for name, value in values.items()
                }


def placed(value: Any, parameter: Any) -> Any:
    """Return a moment, which becomes the optimizer's own: sharded as its parameter, or plain."""
    if not belongs_to_shard(value, parameter):
        return value
    if value.stride() != local_of(parameter).stride():
        value = torch.empty_like(local_of(parameter).detach(), dtype=value.dtype).copy_(value)
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _checked(shard: Shard, state: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    try:
        names, tensors, moments = list(state["names"]), list(state["parameters"]), list(state["moments"])
        whole = all(isinstance(each, torch.Tensor) for each in tensors) and len(tensors) == len(shard.names)
        moments = [dict(each) for each in moments]
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"a shard, as another rank has sent it: {error!r}") from None
    if names != shard.names:
        other = next((pair for pair in zip(names, shard.names, strict=False) if pair[0] != pair[1]), None)
        raise UserError(f"the model differs between ranks: {other or (len(names), len(shard.names))}")
    if not whole or len(moments) != len(shard.updated):
        raise RemoteProtocolError(f"a shard of {len(tensors)} tensors and {len(moments)} states came")
    return tensors, moments


def digests_of(shard: Shard, state: Any) -> tuple[int, ...]:
    """Return a number of the bits of each parameter with its moments. state: as `Shard.state` returns it."""
    moments = dict(zip((at for group in shard.places for at in group), state["moments"], strict=True))
    return tuple(
        digest_of([parameter, *(value for _, value in sorted(moments.get(at, {}).items()))])
        for at, parameter in enumerate(state["parameters"])
    )


def digest_of(values: Sequence[Any]) -> int:
    """Return a number of the bits of tensors, and of other values."""
    found = xxhash.xxh3_64()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(bytes_over(value.detach().cpu().contiguous()).data)
        else:
            found.update(repr(value).encode())
    return found.intdigest()


@dataclass(frozen=True, slots=True)
class Settings:
    """All that an update depends on beside gradients and state, as it was when the owner's was made.

    groups: hyperparameters. scaled: tensors of a `GradScaler`. flushes: whether subnormal numbers count as 0.
    """

    groups: list[dict[str, Any]]
    scaled: dict[str, Any]
    flushes: bool


def settings_of(optimizer: Any) -> Settings:
    """Return those of the update that an optimizer makes now, or has just made."""
    given = {name: local_of(getattr(optimizer, name)) for name in SCALED if name in optimizer.__dict__}
    scaled = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }
    return Settings(hyperparameters(optimizer), scaled, bool(_SUBNORMAL * _ONE == 0))


class Replica:
    """The copy that is kept of the ward's shard. state: as `Shard.state` returns it."""

    def __init__(self, shard: Shard, state: Any) -> None:
        self._shard = shard
        tensors, moments = _checked(shard, state)
        self.tensors = [
            nn.Parameter(each.detach(), requires_grad=each.is_floating_point()) for each in tensors
        ]
        self.updated = [self.tensors[at] for group in shard.places for at in group]
        (self._optimizer,) = shard.optimizers
        self._twin = twin_of(self._optimizer, [[self.tensors[at] for at in group] for group in shard.places])
        for parameter, values in zip(self.updated, moments, strict=True):
            if values:
                self._twin.state[parameter] = values

    def settings(self) -> Settings:
        """Return those of the update that the owner of the optimizer has just made."""
        return settings_of(self._optimizer)

    def replay(self, gradients: Sequence[Any], settings: Settings) -> None:
        """Make the update of the ward; on any thread, one call at a time.

        gradients: of `updated`; None: that parameter has none.
        """
        for mine, values in zip(self._twin.param_groups, settings.groups, strict=True):
            mine.update(values)
        for name in SCALED:
            self._twin.__dict__.pop(name, None)
        self._twin.__dict__.update(settings.scaled)
        for parameter, gradient in zip(self.updated, gradients, strict=True):
            parameter.grad = gradient
        torch.set_flush_denormal(settings.flushes)  # of this thread alone
        self._twin.step()
        for parameter in self.updated:
            parameter.grad = None

    def state(self) -> Any:
        """Return the copy, as `Shard.state` returns the original."""
        return {
            "names": self._shard.names,
            "parameters": [each.detach() for each in self.tensors],
            "moments": moments_of(self._twin),
        }


# ---- optimizers that cannot be copied


def why_mirrored(optimizers: Sequence[Any]) -> str:
    """Return why no other rank can repeat the updates of these optimizers on plain tensors; "": it can.

    Raises `UserError` for one of which nothing can be kept.
    """
    if len(optimizers) != 1:
        return f"there are {len(optimizers)} optimizers"
    (optimizer,) = optimizers
    what = type(optimizer).__name__
    versions = [each._version for group in optimizer.param_groups for each in group["params"]]
    chosen = [_representatives(group["params"]) for group in optimizer.param_groups]
    sharded = twin_of(optimizer, [[_clone(each) for each in group] for group in chosen])
    plain = twin_of(optimizer, [[nn.Parameter(_sample(each)) for each in group] for group in chosen])
    before = _numbers_of(plain)
    failed = ""
    with torch.random.fork_rng(devices=[]), CONTINUITY.forbidding() as met:
        try:
            for number in range(_PROBES):
                _probe(sharded, number)
                _probe(plain, number)
        except Exception as error:  # noqa: BLE001
            failed = f"{what} cannot be run on a copy: {type(error).__name__}: {error}"
    if versions != [each._version for group in optimizer.param_groups for each in group["params"]]:
        raise UserError(
            f"{what} keeps its parameters outside of param_groups: a copy of it wrote the model's, and no "
            "other rank can have them"
        )
    if met:
        return f"{what} communicates in step() ({met[0]})"
    if failed:
        return failed
    if before != _numbers_of(plain):
        return f"{what} counts in attributes of its own"
    return _other_bits(what, sharded, plain)


def writes_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer changes gradients when it updates."""
    groups = [_representatives(group["params"]) for group in optimizer.param_groups]
    twin = twin_of(optimizer, [[nn.Parameter(_sample(each)) for each in group] for group in groups])
    with torch.random.fork_rng(devices=[]):
        return any(_probe(twin, number) for number in range(_PROBES))


def _representatives(parameters: Sequence[Any]) -> list[Any]:
    """Return the smallest parameter of each kind."""
    found: dict[tuple[Any, ...], Any] = {}
    for each in parameters:
        local = local_of(each)
        kind = (is_sharded(each), local.dim(), local.dtype, local.numel() > 0)
        if kind not in found or local.numel() < local_of(found[kind]).numel():
            found[kind] = each
    return list(found.values())


def _sample(parameter: Any) -> Any:
    """Return a copy of the first rows of what this rank has of a parameter."""
    local = local_of(parameter).detach()
    if local.numel() > _PROBED_MAX:
        local = local[: max(1, _PROBED_MAX * len(local) // local.numel())]
    return local.clone()


def _clone(parameter: Any) -> Any:
    local = _sample(parameter)
    if not is_sharded(parameter):
        return nn.Parameter(local)
    if local.shape != local_of(parameter).shape:
        kind, mesh = type(parameter.data), parameter.device_mesh
        return nn.Parameter(kind.from_local(local, mesh, parameter.placements, run_check=False))
    copy = type(parameter.data).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(copy)


def _probe(optimizer: Any, number: int) -> bool:
    """Make an update with the gradients of a number; return whether it has changed those."""
    draws, given = torch.Generator().manual_seed(number), list[tuple[Any, Any]]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = local_of(parameter)
            gradient = torch.zeros_like(parameter)
            local_of(gradient).copy_(torch.rand(local.shape, generator=draws).to(local.dtype) - 0.5)
            parameter.grad = gradient
            given.append((local_of(gradient), local_of(gradient).clone()))
    optimizer.step()
    return not all(torch.equal(*pair) for pair in given)


def _numbers_of(optimizer: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    return {name: value for name, value in found.items() if not isinstance(value, bool)}  # SGD keeps a flag


def _other_bits(what: str, sharded: Any, plain: Any) -> str:
    of = [each for group in sharded.param_groups for each in group["params"]]
    copies = [each for group in plain.param_groups for each in group["params"]]
    rows = zip(of, copies, moments_of(sharded), moments_of(plain), strict=True)
    for mine, copy, moments, others in rows:
        for name, value in sharded.state.get(mine, {}).items():
            if is_sharded(value) != belongs_to_shard(local_of(value), mine):
                return f"{what} has a state {name!r} that is placed otherwise than its parameter"
        encode(moments, f"the state of {type(sharded).__name__}")
        pairs = [(local_of(mine), copy), *((moments[name], others.get(name)) for name in moments)]
        if moments.keys() != others.keys() or not all(_same_bits(*pair) for pair in pairs):
            return f"{what} ends with other bits on plain tensors than on DTensors"
    return ""


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = (bytes_over(each.detach().contiguous()) for each in (one, other))
    return mine.tobytes() == theirs.tobytes()
