"""The elementwise optimizers on a device: one launch over flat arrays, in place, with numpy's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.optim import OptimizerConfig
from zbmd.training.optim.elementwise import AdamWConfig, LionConfig, SGDConfig
from zbmd.transport.errors import UserError

SPAN: Final = np.dtype([("start", "<i8"), ("stop", "<i8"), ("keep", "<f4"), ("unused", "<f4")])
"""As in optimizers.cu."""


def require_kernel(config: OptimizerConfig) -> None:
    """Raise `UserError` for an optimizer that has no kernel."""
    if not isinstance(config, AdamWConfig | LionConfig | SGDConfig):
        raise UserError("--optimizer muon has no CUDA kernel: choose adamw, lion or sgd, or --device cpu.")


class DeviceOptimizer:
    """The optimizer of `config` for flat arrays. Raises `UserError` without a kernel for it.

    blocks: the elements that it updates, and whether their weights decay; see `update_blocks`.
    """

    def __init__(
        self, config: OptimizerConfig, blocks: Sequence[tuple[slice, bool]], executor: Executor
    ) -> None:
        require_kernel(config)
        assert isinstance(config, AdamWConfig | LionConfig | SGDConfig)
        self._config, self._executor = config, executor
        self._spans = np.zeros(len(blocks), SPAN)
        self._spans["start"] = [span.start for span, _ in blocks]
        self._spans["stop"] = [span.stop for span, _ in blocks]
        self._decayed = np.array([decayed for _, decayed in blocks])

    def update(
        self,
        arrays: list[DeviceArray],
        narrow: DeviceArray,
        grads: DeviceArray,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float,
    ) -> None:
        """Replace weights and moments, `arrays`, by those after `step`, and `narrow` by the rounded weights.

        grads: bf16 or float32. The rest is as in `AdamW.update`.
        """
        run, config = self._executor, self._config
        self._spans["keep"] = np.where(self._decayed, 1.0 - learning_rate * config.weight_decay, 1.0)
        spans = run.upload(self._spans.view(np.uint8))
        numbers = run.upload(np.array(self._numbers(step, learning_rate, grad_scale), np.float32))
        outputs = (*map(Out, arrays), Out(narrow))
        name = f"{self._name}_{grads.kind}"
        run.launch(name, len(self._spans), *outputs, *map(Out, arrays), grads, spans, numbers)

    @property
    def _name(self) -> str:
        match self._config:
            case AdamWConfig():
                return "adamw"
            case LionConfig():
                return "lion"
            case SGDConfig(nesterov=nesterov):
                return "nesterov" if nesterov else "sgd"

    def _numbers(self, step: int, learning_rate: float, grad_scale: float) -> list[float]:
        """Return the structure that the kernel reads."""
        config = self._config
        if isinstance(config, SGDConfig):
            return [config.momentum, 0.0, 1.0 - config.momentum, 1.0, grad_scale, learning_rate]
        beta1, beta2 = config.beta1, config.beta2
        numbers = [beta1, beta2, 1.0 - beta1, 1.0 - beta2, grad_scale]
        if isinstance(config, LionConfig):
            return [*numbers, learning_rate]
        correction_1, correction_2 = 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)
        root = math.sqrt(correction_2)
        return [*numbers, learning_rate * root / correction_1, config.epsilon * root]
