"""FSDP2 (`fully_shard`) in a resilient loop. What is private of it and used is here: `PRIVATE` names it.

`reset_iter_state()`, new in PyTorch 2.13, leaves the gradients of unsharded parameters behind: a step that is
repeated after a failure in its backward pass would add to them. So they are cleared as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")

PRIVATE: Final = {
    "FSDPModule": ("reset_iter_state", "reshard", "_get_fsdp_state"),
    "FSDPState": ("_fsdp_param_groups", "_is_root"),
    "FSDPParamGroup": ("fsdp_params", "reduce_grads", "all_reduce_grads"),
    "FSDPParam": ("sharded_param", "unsharded_accumulated_grad"),
    "FSDPParam after an all-gather": ("_unsharded_param",),
    "DTensor": ("_local_tensor",),
}
"""Attributes that are used here, by the class that has them, as of PyTorch 2.13."""


def is_sharded(tensor: Any) -> bool:
    """Return whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Any) -> Any:
    """Return the part of a tensor that this rank has: of a DTensor its shard, of others all."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def has_shards(models: Sequence[Any]) -> bool:
    """Return whether a parameter of the models is sharded."""
    return any(is_sharded(parameter) for model in models for parameter in model.parameters())


class ShardedModules:
    """The modules of the models that `fully_shard` was applied to.

    Raises `UserError` for a PyTorch before 2.13, and for parameters that something else has sharded.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._modules: list[Any] = []
        self._roots: list[Any] = []
        for model in models:
            self._find(model, below=False)
        missing = [
            name for module in self._modules for name in PRIVATE["FSDPModule"] if not hasattr(module, name)
        ]
        if missing:
            raise UserError(
                f"resilient loops over FSDP2 need PyTorch 2.13: fully_shard of {torch.__version__} has no "
                f"{missing[0]}"
            )
        for module in self._modules:
            module.reshard()  # a forward pass without a backward pass leaves parameters whole
        self._groups = [group for module in self._modules for group in _groups_of(module)]
        self._flags = self._found_flags()
        self._require_supported(models)

    def _find(self, module: Any, *, below: bool) -> None:
        if hasattr(module, "_get_fsdp_state"):
            self._modules.append(module)
            if not below:
                self._roots.append(module)
            below = True
        for child in module.children():
            self._find(child, below=below)

    def _require_supported(self, models: Sequence[Any]) -> None:
        known = {id(each.sharded_param) for group in self._groups for each in group.fsdp_params}
        for model in models:
            for name, parameter in model.named_parameters():
                if not is_sharded(parameter):
                    continue
                kinds = [type(placement).__name__ for placement in parameter.placements]
                if id(parameter) not in known or kinds not in (["Shard"], ["Replicate", "Shard"]):
                    raise UserError(
                        f"{name} is a DTensor placed as {kinds}: resilient loops take models that "
                        "fully_shard alone has sharded, over a mesh of one dimension or (replicate, "
                        "shard); for tensor parallelism catch the error and initialise again, see "
                        "docs/GUIDE_TORCH.md"
                    )

    def _found_flags(self) -> list[tuple[bool, bool]]:
        return [(group.reduce_grads, group.all_reduce_grads) for group in self._groups]

    def keep(self) -> None:
        """A step begins: keep whether the next backward pass reduces gradients."""
        self._flags = self._found_flags()

    def reset(self) -> None:
        """Forget a forward or backward pass that has failed."""
        for root in self._roots:
            if root._get_fsdp_state()._is_root:  # else it has not run yet
                root.reset_iter_state()
        for group, flags in zip(self._groups, self._flags, strict=True):
            group.reduce_grads, group.all_reduce_grads = flags
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
                each.unsharded_accumulated_grad = None


def _groups_of(module: Any) -> list[Any]:
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups
