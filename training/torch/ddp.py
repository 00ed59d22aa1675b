"""`DistributedDataParallel` in a resilient loop. What is used of it is private: `REDUCER` names it.

DDP changes its buckets after the first step, to the order in which gradients came. A replacement would begin
with others, and its calls would not match; so all ranks install buckets that depend on the model alone, those
that DDP itself makes of parameters in reverse order. After a step that has failed, the reducer is reset.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES
from zbmd.collectives.torch.tensors import TensorBuffer
from zbmd.collectives.torch.work import WAITS
from zbmd.training.step.reduction import AccumulationPlan, ShardSum, all_reduce_partials
from zbmd.training.torch.fsdp.replica import digest_of
from zbmd.training.torch.shares import Shares
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
parallel: Any = importlib.import_module("torch.nn.parallel")

REDUCER: Final = (
    "_reset_state",
    "_push_all_rebuilt_params",
    "_rebuild_buckets",
    "_get_zeros_like_grad_buckets",
)
"""Methods of the reducer that are used here, as of PyTorch 2.6 to 2.13."""


class KeptBuckets:
    """The reducers of models, which keep their buckets. optimizers: of their parameters."""

    def __init__(self, models: list[Any], optimizers: Sequence[Any]) -> None:
        self._optimizers, self._all = optimizers, models
        found = [each for model in models for each in model.modules()]
        self._models = [each for each in found if isinstance(each, parallel.DistributedDataParallel)]
        for model in self._models:
            missing = [name for name in REDUCER if not hasattr(model.reducer, name)]
            if missing:
                raise UserError(
                    f"the reducer of PyTorch {torch.__version__} has no {missing[0]}: resilient loops over "
                    "DDP are made for PyTorch 2.6 to 2.13"
                )
        self._flags = self.flags
        self._plans = [_plan_of(model) for model in self._models]
        self._are_checked = False
        self._install()

    @property
    def equal(self) -> list[tuple[str, Any]]:
        """All that is equal on all ranks, by name: parameters, and their moments in the optimizers.

        DDP keeps those of its models equal. Of others a replacement takes what a survivor has.
        """
        found = dict[int, tuple[str, Any]]()
        for models in ([each.module for each in self._models], self._all):
            for number, model in enumerate(models):
                for name, parameter in model.named_parameters():
                    named = f"{number}.{name}" if len(models) > 1 else name
                    found.setdefault(id(parameter), (named, parameter))
        for model in self._models:
            for name, parameter in model.module.named_parameters():
                if name in model.parameters_to_ignore:
                    found.pop(id(parameter), None)
        moments = [
            (f"{moment} of {found[id(each)][0]}", value)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in found
            for moment, value in sorted(optimizer.state.get(each, {}).items())
        ]
        return [*found.values(), *moments]

    def digests(self) -> tuple[int, ...]:
        """Return a number of the bits of each of these."""
        return tuple(digest_of([value]) for _, value in self.equal)

    def name_of(self, number: int) -> str:
        """Return the name of one of these, by its number in `digests`."""
        equal = self.equal
        return equal[number][0] if number < len(equal) else "a moment that not all ranks have"

    @property
    def learn(self) -> bool:
        """Whether a model learns in its first backward pass, with other calls, how its graph looks."""
        return any(model.static_graph for model in self._models)

    @property
    def flags(self) -> list[bool]:
        """Whether the next forward pass of each model sends the buffers of rank 0 to all."""
        return [bool(model.require_forward_param_sync) for model in self._models]

    def keep(self) -> None:
        """A step begins."""
        self._flags = self.flags

    def reset(self, flags: Sequence[bool] = ()) -> None:
        """Forget a backward pass that has failed. flags: of the survivors, on a replacement."""
        for model, flag in zip(self._models, flags or self._flags, strict=True):
            model.require_forward_param_sync = flag
            model.reducer._reset_state()
            # The reducer would make its buckets again in the next step, by calls that others may not make.
            model._has_rebuilt_buckets = False
        self._install()

    def _install(self) -> None:
        for model, plan in zip(self._models, self._plans, strict=True):
            reducer = model.reducer
            if plan is None or (model._has_rebuilt_buckets and buckets_of(model) == plan):
                continue
            answers = (
                torch.tensor([*(index for bucket in plan for index in bucket), len(plan)], dtype=torch.int32),
                torch.tensor([len(bucket) for bucket in plan], dtype=torch.int32),
            )
            reducer._push_all_rebuilt_params()
            with CONTINUITY.answering(answers):
                model._has_rebuilt_buckets = bool(reducer._rebuild_buckets())
            # PyTorch tells the buckets with zeros of all gradients, which takes long: once is enough.
            if not self._are_checked and buckets_of(model) != plan:
                raise LocalProtocolError(f"DDP has buckets {buckets_of(model)}, and {plan} were installed")
        self._are_checked = True


def _plan_of(model: Any) -> list[list[int]] | None:
    """Return the indices of the parameters in each bucket; None if DDP never changes its buckets."""
    if model.find_unused_parameters and not model.static_graph:
        return None
    parameters = _trained(model)
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap]
    indices, _ = dist._compute_bucket_assignment_by_size(parameters, limits)
    return [list(bucket) for bucket in reversed(indices)]


def buckets_of(model: Any) -> list[list[int]]:
    """Return the indices of the parameters in each bucket that the reducer has."""
    index = {id(parameter): number for number, parameter in enumerate(_trained(model))}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def _trained(model: Any) -> list[Any]:
    ignored = model.parameters_to_ignore
    return [
        each for name, each in model.module.named_parameters() if each.requires_grad and name not in ignored
    ]


class ReplicatedShares(Shares):
    """Those of DDP models, whose gradients are summed along a tree.

    Whichever ranks compute them, the bits are the same. A rank makes one forward and backward pass for each
    of its own shares, one after the other; the hook of DDP's reducer has the gradients of each pass, and in
    the last one it reduces what this rank has with the others'.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], shares: int, why: str) -> None:
        super().__init__(shares, why)
        self._plan = AccumulationPlan.of(1, 0, 1)
        """The order in which the gradients of this rank's shares are added."""
        self._optimizers = optimizers
        found = [each for model in models for each in model.modules()]
        self._models = [each for each in found if isinstance(each, parallel.DistributedDataParallel)]
        self._partials: dict[tuple[int, int], list[Any]] = {}

    def check(self) -> None:
        """Raise `UserError` for models whose passes differ, or whose gradients do not pass the reducer."""
        known = {id(each) for model in self._models for each in _trained(model)}
        updated = [each for one in self._optimizers for group in one.param_groups for each in group["params"]]
        if not all(id(each) in known for each in updated if each.requires_grad):
            raise UserError(
                f"{self.why} takes models in DistributedDataParallel, with all that is updated in them"
            )
        for model in self._models:
            if model.static_graph or model.find_unused_parameters:
                raise UserError(
                    f"{self.why} has no static_graph and no find_unused_parameters: the passes over several "
                    "shares of a batch have to be alike"
                )
            if model.process_group.size() != dist.get_world_size():
                raise UserError(f"{self.why} takes models over the default process group")

    def assign(self, rank: int, ranks: int) -> None:
        """Divide the shares; see `Shares`."""
        was_on = self.is_on
        super().assign(rank, ranks)
        self._sums = ShardSum.of(self.shares, ranks)
        self._plan = self._sums.plan(rank)
        self._partials.clear()
        if was_on:
            return
        for number, model in enumerate(self._models):
            # DDP refuses a hook whose annotations are text, as all are here.
            hook = lambda state, bucket: self._hook(state, bucket)  # noqa: E731, PLW0108
            try:
                model.register_comm_hook(number, hook)
            except RuntimeError as error:
                raise UserError(f"a model has a communication hook of its own: {error}") from error

    def begin(self) -> None:
        """A pass begins: its plan says what it overwrites."""

    def _hook(self, model: int, bucket: Any) -> Any:
        tensor = bucket.buffer()
        home = tensor.cpu()  # itself, unless it is on a device
        buffer = TensorBuffer(home, numbers=True)
        partials = self._partials.setdefault((model, bucket.index()), [])
        partials += [np.empty_like(buffer.array) for _ in range(self._plan.buffers - len(partials))]
        leaf = self._plan.leaves[self.at]
        partials[leaf.buffer][:] = buffer.array
        self._plan.perform(leaf.additions, partials, slice(None))
        if self.is_last:
            sums = {node: partials[number] for node, number in self._plan.partials.items()}
            self._reduce(sums, buffer.array)
            buffer.bring_home()
            home.div_(self.shares)
            if not tensor.is_cpu:
                tensor.copy_(home)
        done = torch.futures.Future()
        done.set_result(tensor)
        return done

    def _reduce(self, partials: dict[Any, Any], out: Any) -> None:
        if len(self._sums.ranges) == 1:
            (whole,) = partials.values()
            out[:] = whole
            return
        default, sums = CONTINUITY.groups[0], self._sums
        end_ns = now_ns() + round(default.limit_s * 1e9)
        try:
            with WAITS.waiting():
                default.made.submit(
                    lambda c: all_reduce_partials(c, partials, out, sums, deadline_ns=end_ns)
                ).result()
        except LOSSES as error:
            CONTINUITY.note(error)
            raise
