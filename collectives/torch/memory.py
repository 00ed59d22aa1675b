"""Tensors in the arena: memory that all ranks of this host have mapped.

A collective reads the tensors of all ranks where they lie if all of them are there; ordinary tensors are
copied by the kernel, or through the arena. `use_arena` has the buffers of DDP's gradients and FSDP2's
parameters there. Needs PyTorch; imported by `zbmd.torch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
import structlog

from zbmd.collectives.torch.tensors import bytes_over
from zbmd.collectives.torch.world import world
from zbmd.transport.errors import ArenaFull, UserError
from zbmd.transport.memory.arena import Arena

torch: Any = importlib.import_module("torch")

log: Final = structlog.stdlib.get_logger("zbmd.collectives.torch")

ModelT = TypeVar("ModelT")


def arena() -> Arena | None:
    """Return the arena of this process; None before it has joined its job."""
    worker = world().worker
    return None if worker is None else worker.segment.arena


def empty(*size: Any, dtype: Any = None) -> Any:
    """Return an uninitialised contiguous tensor in the arena, as `torch.empty(*size, dtype=dtype)`.

    Collectives among ranks of a host read it in place. Its memory returns to the arena when the tensor and
    its views are gone; its storage cannot be resized. Raises `ArenaFull` if there is no room for it (raise
    --arena), and `UserError` before `init_process_group`.
    """
    place = arena()
    if place is None:
        raise UserError(
            "zbmd.torch.empty: this process has no arena yet: call init_process_group('zbmd') first"
        )
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    dtype = dtype or torch.get_default_dtype()
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    memory = place.empty(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def empty_if_there_is_room(count: int, dtype: Any) -> Any:
    """Return a flat tensor in the arena, or in ordinary memory if that is full or not there yet."""
    try:
        return empty(count, dtype=dtype)
    except (ArenaFull, UserError) as error:
        log.info("a buffer of a collective lies outside the arena", why=str(error))
        return torch.empty(count, dtype=dtype)


def use_arena(model: ModelT) -> ModelT:
    """Have the buffers in which a model communicates lie in the arena; return the model.

    model: `DistributedDataParallel` with `gradient_as_bucket_view=True`, or a module with `fully_shard`. The
    arena takes the gradients of DDP, or twice the parameters of the largest group of FSDP2 (`--arena`);
    what has no room stays in ordinary memory. The bits are the same. Raises `UserError` for another model,
    and for one over another backend than zbmd.
    """
    given: Any = model
    if isinstance(given, torch.nn.parallel.DistributedDataParallel):
        _use_for_buckets(given)
        return model
    fully_shard: Any = importlib.import_module("torch.distributed.fsdp")
    sharded = [module for module in given.modules() if isinstance(module, fully_shard.FSDPModule)]
    if not sharded:
        raise UserError(
            f"zbmd.torch.use_arena: expected DistributedDataParallel or a module with fully_shard, got "
            f"{type(given).__name__}; zbmd.torch.empty makes single tensors"
        )
    for module in sharded:
        module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def _use_for_buckets(model: Any) -> None:
    if not model.gradient_as_bucket_view:
        raise UserError(
            "zbmd.torch.use_arena: DistributedDataParallel keeps gradients apart from its buckets; make it "
            "with gradient_as_bucket_view=True"
        )
    if not hasattr(model.process_group, "buckets"):
        raise UserError(
            "zbmd.torch.use_arena: the model's process group is of another backend; make it with "
            "init_process_group('zbmd')"
        )
    model.process_group.buckets = Buckets(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        model.process_group.buckets,
    )


class Buckets:
    """Moves buckets of gradients of one model to the arena, each when it is reduced for the second time.

    PyTorch makes the buckets, in C++, and again after the first step. Of a bucket there are the flat tensor
    that is reduced, and the gradients, which are views of it: all of them are given other memory, and remain
    the tensors that they are. parameters: whose gradients. before: those of another model of the group.
    """

    def __init__(self, parameters: Sequence[Any], before: Buckets | None = None) -> None:
        self._parameters = parameters
        self._before = before
        self._seen: set[tuple[int, int]] = set()
        self.moved: dict[int, Any] = {}
        """One parameter of each bucket that has been moved, by the address of the bucket."""

    def take(self, bucket: Any) -> None:
        """Move a tensor that is about to be reduced, if it is a bucket of the model."""
        if self._before is not None:
            self._before.take(bucket)
        place = bucket.data_ptr(), bucket.numel()
        if place not in self._seen:
            self._seen.add(place)
            return
        memory, begin = arena(), bucket.untyped_storage().data_ptr()
        if memory is None or memory.offset_of(bytes_over(bucket)) is not None:
            self._require_views(begin)
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        views = [each for each in gradients if each.untyped_storage().data_ptr() == begin]
        # Not all of them: it is no bucket, or the gradients that are left are known to C++ alone.
        if sum(each.numel() for each in views) != bucket.numel():
            return
        try:
            made = empty(bucket.numel(), dtype=bucket.dtype)
        except ArenaFull as error:
            log.info("a bucket of gradients lies outside the arena", why=str(error))
            return
        with torch.no_grad():
            made.copy_(bucket)
            for each in (bucket, *views):
                each.set_(made.untyped_storage(), each.storage_offset(), each.size(), each.stride())
        self.moved[made.data_ptr()] = next(each for each in self._parameters if each.grad is views[0])

    def _require_views(self, begin: int) -> None:
        """Raise `UserError` if a gradient of a bucket that has been moved is not a view of it any more."""
        gradient = self.moved[begin].grad if begin in self.moved else None
        if gradient is not None and gradient.untyped_storage().data_ptr() != begin:
            raise UserError(
                "zbmd.torch.use_arena: this version of PyTorch keeps gradients apart from the bucket that "
                "was moved; train without use_arena"
            )
