"""The gradients of FSDP2 models, summed over several shares of a batch.

Each pass of a step gathers parameters and reduces gradients over all ranks, so all make as many passes as the
rank with most shares: those of the others that have no share count nothing. The sums of all passes but the
last are kept, one shard each, and added in the last one, before anything that the script does with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbmd.training.torch.fsdp.modules import ShardedModules
from zbmd.training.torch.shares import Shares
from zbmd.transport.errors import UserError


class ShardedShares(Shares):
    """Those of models with `modules`."""

    are_alone = False

    def __init__(self, models: Sequence[Any], modules: ShardedModules, shares: int, why: str) -> None:
        super().__init__(shares, why)
        self._models, self._modules = models, modules
        self._sums: dict[int, Any] = {}
        """By the number of the parameter group, of the passes of a step that have ended."""

    def check(self) -> None:
        """Raise `UserError` for what cannot be divided again."""
        self._modules.require_divisible(self._models, self.why)

    def assign(self, rank: int, ranks: int) -> None:
        """Divide the shares; see `Shares`."""
        if not self.is_on:
            for number, group in enumerate(self._modules.groups):
                group._reduce_scatter_comm = _Idling(group._reduce_scatter_comm, self)
                group._all_reduce_hook = self._hook(number, group)
        super().assign(rank, ranks)
        self._sums.clear()

    def begin(self) -> None:
        """A pass begins: the first one of a step adds to nothing."""
        if not self.at:
            self._sums.clear()

    def _hook(self, number: int, group: Any) -> Any:
        """Return what is called with the reduced gradients of a group, before they become those of shards."""

        def reduced(gradients: Any) -> None:
            if not self.is_on:
                return
            kept = self._sums.get(number)
            if kept is not None and kept.shape != gradients.shape:
                raise UserError(
                    f"{self.why}: a parameter has a gradient in one share of a batch, none in another: the "
                    "passes over all shares have to be alike"
                )
            if self.is_last:
                if kept is not None:
                    gradients.add_(self._sums.pop(number))
                if group.gradient_divide_factor is None:  # they are divided by the number of ranks
                    gradients.mul_(self.ranks / self.shares)
            elif kept is None:
                self._sums[number] = gradients.detach().clone()
            else:
                kept.add_(gradients)

        return reduced


class _Idling:
    """A reduce-scatter in the place of `inner`, to which passes that count nothing give zeros."""

    def __init__(self, inner: Any, shares: Shares) -> None:
        self._inner, self._shares = inner, shares

    def allocate(self, *args: Any, **options: Any) -> Any:
        """Return memory for gradients."""
        return self._inner.allocate(*args, **options)

    def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        if self._shares.is_idle:
            input_tensor.zero_()
        return self._inner(output_tensor, input_tensor, *args, **options)
