"""FSDP2 (`fully_shard`) in a resilient loop. What is private of it and used is here: `PRIVATE` names it.

`reset_iter_state()`, new in PyTorch 2.13, leaves the gradients of unsharded parameters behind: a step that is
repeated after a failure in its backward pass would add to them. So they are cleared as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from zbmd.training.torch.fsdp.division import ranks_of_part, ranks_of_replica, rows_of
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
meshes_of_torch: Any = importlib.import_module("torch.distributed.device_mesh")
placements: Any = importlib.import_module("torch.distributed.tensor")
debug: Any = importlib.import_module("torch.distributed.tensor.debug")

PRIVATE: Final = {
    "FSDPModule": ("reset_iter_state", "reshard", "_get_fsdp_state"),
    "FSDPState": ("_fsdp_param_groups", "_is_root"),
    "FSDPParamGroup": (
        *("fsdp_params", "reduce_grads", "all_reduce_grads", "mesh_info", "post_forward_mesh_info"),
        *("gradient_divide_factor", "_reduce_scatter_comm", "_all_reduce_hook"),
    ),
    "FSDPParam": (
        *("sharded_param", "unsharded_accumulated_grad", "all_gather_outputs", "reset_sharded_param"),
        *("sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size", "_sharding_spec"),
        "_module_info",
    ),
    "FSDPMeshInfo": ("mesh", "shard_mesh_size", "shard_mesh_rank", "shard_process_group", "__post_init__"),
    "FSDPParam after an all-gather": ("_unsharded_param",),
    "DTensor": ("_local_tensor", "_spec"),
}
"""Attributes that are used here, by the class that has them, as of PyTorch 2.13."""


_OF_GROUPS: Final = ("_dim_group_names", "_pg_registry")
"""Attributes of a mesh that stay: its process groups are the same objects."""


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
        self.groups = _groups_of(self._modules)
        for each in [each for group in self.groups for each in group.fsdp_params]:
            owner = each._module_info
            if getattr(owner.module, owner.param_name) is not each.sharded_param:
                each.reset_sharded_param()  # it was loaded as another: FSDP2 finds that in its first pass
        self._flags = self.flags
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
        known = {id(each.sharded_param) for group in self.groups for each in group.fsdp_params}
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

    @property
    def flags(self) -> list[tuple[bool, bool]]:
        """Whether the next backward pass reduces the gradients of each group, and whether over replicas."""
        return [(group.reduce_grads, group.all_reduce_grads) for group in self.groups]

    @flags.setter
    def flags(self, flags: Sequence[tuple[bool, bool]]) -> None:
        for group, (reduces, over_replicas) in zip(self.groups, flags, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, over_replicas

    def keep(self) -> None:
        """A step begins: keep whether the next backward pass reduces gradients."""
        self._flags = self.flags

    def reset(self) -> None:
        """Forget a forward or backward pass that has failed."""
        for root in self._roots:
            if root._get_fsdp_state()._is_root:  # else it has not run yet
                root.reset_iter_state()
        self.flags = self._flags
        for group in self.groups:
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
                each.unsharded_accumulated_grad = None

    def distinct(self, parameters: Sequence[Any]) -> int:
        """Return the number of shards of a hybrid mesh of all ranks in order, after which they repeat.

        parameters: all that a rank has. 0: the mesh is another one, or not all are sharded so.
        """
        hybrid = [placements.Replicate, placements.Shard]
        if not all(is_sharded(each) and [*map(type, each.placements)] == hybrid for each in parameters):
            return 0
        meshes = [group.mesh_info.mesh.mesh for group in self.groups]
        ranks = [*range(dist.get_world_size())]
        if not meshes or any(mesh.flatten().tolist() != ranks for mesh in meshes):
            return 0
        sizes = {int(mesh.shape[1]) for mesh in meshes}
        return sizes.pop() if len(sizes) == 1 else 0

    # Another number of ranks.

    def require_divisible(self, models: Sequence[Any], why: str) -> None:
        """Raise `UserError` for what cannot be divided again for another number of ranks."""
        named = [each for model in models for each in model.named_parameters()]
        replica = self.distinct([parameter for _, parameter in named])
        wanted = [*([placements.Replicate()] if replica else []), placements.Shard(0)]
        for name, parameter in named:
            if not is_sharded(parameter) or [*parameter.placements] != wanted:
                raise UserError(
                    f"{why} takes models of which fully_shard has sharded each parameter by rows, over a "
                    f"mesh of one dimension, or of all ranks in order by (replicate, shard): {name} is not"
                )
        if replica and not 1 < replica < dist.get_world_size():
            raise UserError(
                f"{why} takes hybrid meshes of two replicas or more, of two ranks or more each: the shape of "
                f"this one is ({dist.get_world_size() // replica}, {replica}); use a mesh of one dimension"
            )
        for group in self.groups:
            if group.mesh_info.mesh.size() != dist.get_world_size():
                raise UserError(f"{why} takes models that are sharded over all ranks")
            if group.post_forward_mesh_info not in (None, group.mesh_info):
                raise UserError(f"{why} takes reshard_after_forward=True or False, not a number of ranks")
            if group._all_reduce_hook is not None:
                raise UserError(f"{why} takes models without set_all_reduce_hook")

    @property
    def _meshes(self) -> list[Any]:
        found = {id(group.mesh_info.mesh): group.mesh_info.mesh for group in self.groups}
        return [*found.values()]

    def follow(self, replica: int) -> list[Any]:
        """Have the process groups of hybrid meshes follow the number of ranks; return them."""
        found = [mesh.get_group(dim) for mesh in self._meshes for dim in (0, 1)]
        for number, group in enumerate(found):
            group.ranks_of = partial((ranks_of_part, ranks_of_replica)[number % 2], distinct=replica)
        return found

    def divide(self) -> None:
        """Have the shards of this rank of the default group: the same parameters, of zeros.

        What `fully_shard` derived from the number of ranks is derived again; meshes stay the same objects.
        """
        self.reset()
        for mesh in self._meshes:
            _renew(mesh)
        debug._clear_sharding_prop_cache()  # which has results for the meshes as they were
        for group in self.groups:
            group.mesh_info.__post_init__()
            for each in group.fsdp_params:
                _divide(each, group.mesh_info)


def _renew(mesh: Any) -> None:
    """Have a mesh of all ranks be one of those that there are now."""
    ranks, default = dist.get_world_size(), dist.distributed_c10d._get_default_group()
    known = dist.distributed_c10d._world.pg_group_ranks
    known[default] = {rank: rank for rank in range(ranks)}
    if mesh.ndim == 1:
        now = meshes_of_torch.DeviceMesh(
            mesh.device_type, torch.arange(ranks), mesh_dim_names=mesh.mesh_dim_names
        )
        mesh.__dict__.update(now.__dict__)
        return
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for group in groups:
        known[group] = {rank: place for place, rank in enumerate(group.ranks)}
    shape = torch.arange(ranks).view(-1, groups[-1].size())
    now = meshes_of_torch.DeviceMesh(
        mesh.device_type, shape, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False
    )
    made = {name: value for name, value in now.__dict__.items() if name not in _OF_GROUPS}
    mesh.__dict__.update(made)


def _divide(each: Any, info: Any) -> None:
    parameter = each.sharded_param
    rows, *rest = parameter.shape
    begin, stop = rows_of(rows, info.shard_mesh_size, info.shard_mesh_rank)
    longest = -(-rows // info.shard_mesh_size)
    each.sharded_size = torch.Size((stop - begin, *rest))
    each.contiguous_sharded_stride = torch.empty(each.sharded_size, device="meta").stride()
    each.padded_sharded_param_size = torch.Size((longest, *rest))
    spec = parameter._spec
    parameter._spec = type(spec)(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)
    parameter.grad = None
    parameter._local_tensor = parameter._local_tensor.new_zeros(each.sharded_size)
    each.all_gather_outputs = []
    if hasattr(each, "_unsharded_param"):
        del each._unsharded_param  # it has the memory of an all-gather of the old number of ranks
    each.reset_sharded_param()


def _groups_of(modules: Sequence[Any]) -> list[Any]:
    """Return the groups of parameters, each once: modules that were sharded together have them in common."""
    found = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return [*{id(group): group for group in found}.values()]
