"""The boundary of a step: what a repetition of it begins from.

Parameters and moments are not written before the vote. What is, is kept here when a step begins: module
buffers, hyperparameters, the states of scheduler and scaler; and random numbers are drawn from seeds of
(run, step, rank), so that a repetition draws the same.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")

_NUMPY_SEED_MAX: Final = 2**32
COMPARED_MAX: Final = 1 << 16
"""Elements of a buffer that is copied and compared in each step, whatever its version counter says."""


def seed_all(*of: object) -> None:
    """Seed torch, Python and numpy from these: a run's seed, what is drawn, and by whom."""
    text = "/".join(map(str, of))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEED_MAX)


class Boundary:
    """Buffers of the models, and the small state of optimizers and of `others`, which have a `state_dict`."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], others: Sequence[Any]) -> None:
        self._models, self._optimizers, self.others = models, optimizers, others
        self._kept: dict[str, tuple[Any, Any, int]] = {}
        """Buffer, its copy, and the version that was copied."""
        self.changing: list[str] = []
        """Names of the buffers that steps have changed: they are each rank's own."""
        self._groups: list[list[dict[str, Any]]] = []
        self._states: list[Any] = []

    def keep(self) -> None:
        """A step begins: keep what it may change."""
        for name, buffer in self.buffers():
            found = self._kept.get(name)
            if found is None or found[0] is not buffer:
                self._kept[name] = (buffer, buffer.detach().clone(), buffer._version)
            elif self._may_differ(*found):
                found[1].copy_(buffer.detach())
                self._kept[name] = (buffer, found[1], buffer._version)
        self._groups = [hyperparameters(optimizer) for optimizer in self._optimizers]
        self._states = [copy.deepcopy(each.state_dict()) for each in self.others]

    @staticmethod
    def _may_differ(buffer: Any, kept: Any, version: int) -> bool:
        """Whether a buffer may have been written: of large ones torch knows, unless it was through numpy."""
        written: bool = buffer._version != version
        return written or kept.numel() <= COMPARED_MAX

    def buffers(self) -> list[tuple[str, Any]]:
        """Return the buffers of all models, by name."""
        return [
            (f"{number}.{name}", buffer)
            for number, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        ]

    def find_changed(self) -> None:
        """Before a vote: note which buffers the step has changed."""
        for name, found in self._kept.items():
            buffer, kept, _ = found
            if name not in self.changing and self._may_differ(*found) and not torch.equal(buffer, kept):
                self.changing.append(name)

    def go_back(self) -> None:
        """The step is to be repeated."""
        with torch.inference_mode():
            for name, found in self._kept.items():
                buffer, kept, _ = found
                if self._may_differ(*found):
                    buffer.detach().copy_(kept)
                    self._kept[name] = (buffer, kept, buffer._version)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            restore_hyperparameters(optimizer, groups)
            optimizer.zero_grad()
        for each, state in zip(self.others, self._states, strict=True):
            load(each, state)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return copies of the optimizer's groups, without their parameters."""
    return [
        {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def restore_hyperparameters(optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Write hyperparameters into the optimizer: tensors in place, since compiled steps may hold them."""
    if len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"an optimizer has {len(optimizer.param_groups)} groups of parameters here, and {len(groups)} on "
            "the other ranks: make the same ones before zbmd.torch.resilient()"
        )
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for name, value in values.items():
            old = group.get(name)
            if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
                old.detach().copy_(value)
            else:
                group[name] = value


def load(other: Any, state: Any) -> None:
    """Load the state of a scheduler, a scaler or another object."""
    other.load_state_dict(state)
    # Of the step that failed: with them `unscale_` would refuse the repetition.
    per_optimizer = getattr(other, "_per_optimizer_states", None)
    if per_optimizer is not None:
        per_optimizer.clear()
