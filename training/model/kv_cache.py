"""A GPT that reads a sequence piece by piece, and keeps the keys and values of what it has read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch
from zbmd.transport.errors import LocalProtocolError


class CachedGPT(GPT):
    """`model` with `params`, (layout.size,), reading one sequence of at most `context` tokens.

    What has been read costs a token nothing but its part of the attention. Log odds are those of
    `GPT.logits`, but for the order of sums. For the numpy device.
    """

    def __init__(self, model: GPT, params: Array) -> None:
        super().__init__(model.config)
        config = model.config
        self._leaves = self.leaves(params)
        shape = (config.layers, config.heads, config.context, config.width // config.heads)
        dtype = np.float32 if params.dtype.itemsize == 2 else params.dtype
        self._keys: Array = np.empty(shape, dtype)
        self._values: Array = np.empty(shape, dtype)
        self.read = 0
        """How many tokens have been read."""

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another token: `forget`, and read the end of the sequence anew."""
        return self.read == self.config.context

    def forget(self) -> None:
        """Begin with another sequence."""
        self.read = 0

    def extend(self, tokens: npt.NDArray[np.integer]) -> Array:
        """Read `tokens`, (count,), and return log odds of the one behind, (vocabulary,).

        Raises `LocalProtocolError` for none, and for more than there is room for.
        """
        if not 0 < len(tokens) <= self.config.context - self.read:
            raise LocalProtocolError(
                f"{len(tokens)} tokens cannot be read behind {self.read} of {self.config.context}"
            )
        batch = Batch(np.asarray(tokens)[None], offset=self.read)
        logits = self.run(Tape(np, recording=False), self._leaves, batch).data
        self.read += len(tokens)
        last: Array = logits[-1]
        return last

    def _attention(self, tape: Tape, packed: Tensor, batch: Batch, number: int) -> Tensor:
        count, heads = len(packed.data), self.config.heads
        q, keys, values = packed.data.reshape(count, 3, heads, -1).transpose(1, 2, 0, 3)
        known, stop = self.read, self.read + count
        self._keys[number, :, known:stop] = keys
        self._values[number, :, known:stop] = values
        scores = q @ self._keys[number, :, :stop].swapaxes(-1, -2)
        scores *= 1.0 / math.sqrt(q.shape[-1])
        back = np.arange(known, stop)[:, None] - np.arange(stop)
        scores += self._bias(packed.data.dtype)[:, np.abs(back)]
        scores[:, back < 0] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ self._values[number, :, :stop]
        mixed /= scores.sum(axis=-1, keepdims=True)
        return tape.record(np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(count, -1), _no_way_back)


def _no_way_back(_: Array) -> None:
    raise LocalProtocolError("what is read with a cache is not differentiated")
