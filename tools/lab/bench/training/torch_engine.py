"""The operators and the training step of our GPT written in PyTorch, eager, for
`zbmd.tools.lab.bench.training.engine`.

In its best documented configuration for a CPU: `scaled_dot_product_attention`, `fused=True` AdamW,
`foreach=True` clipping, gradients set to None.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zbmd.training.config import VOCABULARY, GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.ops.norm import EPSILON

Run = Callable[[], object]


class TorchEngine:
    """The model of `config` and one batch, on this thread's PyTorch."""

    def __init__(self, config: GPTConfig, tokens: npt.NDArray[np.uint8], threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._functional: Any = importlib.import_module("torch.nn.functional")
        self._torch.set_num_threads(threads)
        self.version = str(self._torch.__version__)
        self._config = config
        wide = self._torch.tensor(tokens.astype(np.int64))
        self._inputs, self._targets = wide[:, :-1], wide[:, 1:].reshape(-1)
        self._samples, self._length = self._inputs.shape
        back = np.arange(self._length)[:, None] - np.arange(self._length)
        by_distance = GPT(config).distance_bias[:, np.abs(back)]
        self._mask = self._torch.tensor(np.where(back < 0, -np.inf, by_distance).astype(np.float32))[None]
        self._torch.manual_seed(0)

    def _leaf(self, *shape: int) -> Any:
        return (self._torch.randn(*shape) * 0.1).requires_grad_()

    def operators(self) -> dict[str, Run]:
        """Forward and backward of each operator, at the sizes of the model."""
        config, functional = self._config, self._functional
        rows, width, hidden = self._samples * self._length, self._config.width, 4 * self._config.width
        x, wide, packed = self._leaf(rows, width), self._leaf(rows, hidden), self._leaf(rows, 3 * width)
        logits, table = self._leaf(rows, VOCABULARY), self._leaf(VOCABULARY, width)
        gain, bias, matrix = self._leaf(width), self._leaf(width), self._leaf(hidden, width)
        flat = self._inputs.reshape(-1)

        def both(leaves: list[Any], forward: Callable[[], Any]) -> Run:
            def run() -> None:
                for leaf in leaves:
                    leaf.grad = None
                y = forward()
                y.backward(self._torch.ones_like(y))

            return run

        return {
            "linear": both([x, matrix], lambda: functional.linear(x, matrix)),
            "rms_norm": both([x, gain], lambda: functional.rms_norm(x, (width,), gain, EPSILON)),
            "layer_norm": both([x, gain, bias], lambda: functional.layer_norm(x, (width,), gain, bias)),
            "squared_relu": both([wide], lambda: functional.relu(wide).square()),
            "gelu": both([wide], lambda: functional.gelu(wide, approximate="tanh")),
            "attention": both([packed], lambda: self._attention(packed, config.heads)),
            "cross_entropy": both([logits], lambda: functional.cross_entropy(logits, self._targets)),
            "embedding": both([table], lambda: functional.embedding(flat, table)),
        }

    def step(self) -> Run:
        """One training step: forward, backward, clipping by norm, AdamW."""
        config, torch = self._config, self._torch
        width, hidden = config.width, 4 * config.width
        shapes = [(3 * width, width), (width, width), (hidden, width), (width, hidden)]
        blocks = [[self._leaf(*shape) for shape in shapes] for _ in range(config.layers)]
        gains = [torch.ones(width, requires_grad=True) for _ in range(2 * config.layers + 1)]
        table, head = self._leaf(VOCABULARY, width), self._leaf(VOCABULARY, width)
        parameters = [table, head, *gains, *(weight for block in blocks for weight in block)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        rest = list(range(len(gains)))

        def forward() -> Any:
            linear = self._functional.linear
            x = table[self._inputs.reshape(-1)]
            for index, (qkv, proj, into, out) in enumerate(blocks):
                x = x + linear(
                    self._attention(linear(self._norm(x, gains[2 * index]), qkv), config.heads), proj
                )
                x = x + linear(self._activation(linear(self._norm(x, gains[2 * index + 1]), into)), out)
            logits = linear(self._norm(x, gains[rest[-1]]), head)
            return self._functional.cross_entropy(logits, self._targets)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            forward().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()

        return run

    def _norm(self, x: Any, gain: Any) -> Any:
        return self._functional.rms_norm(x, x.shape[-1:], gain, EPSILON)

    def _activation(self, x: Any) -> Any:
        if self._config.activation == "gelu":
            return self._functional.gelu(x, approximate="tanh")
        return self._functional.relu(x).square()

    def _attention(self, packed: Any, heads: int) -> Any:
        depth = packed.shape[1] // (3 * heads)
        split = packed.view(self._samples, self._length, 3, heads, depth).permute(2, 0, 3, 1, 4)
        mixed = self._functional.scaled_dot_product_attention(
            split[0], split[1], split[2], attn_mask=self._mask, scale=1.0 / math.sqrt(depth)
        )
        return mixed.transpose(1, 2).reshape(packed.shape[0], -1)
