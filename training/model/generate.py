"""Generate tokens from a model with a key-value cache; from a model of bytes, text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zbmd.training import ops
from zbmd.training.autograd.array_module import Array, to_host, widened
from zbmd.training.autograd.rng import Purpose, stream
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.config import VOCABULARY
from zbmd.training.model.gpt import GPT, Batch
from zbmd.transport.errors import LocalProtocolError, UserError


class CachedGPT(GPT):
    """`model` with `params`, (layout.size,), reading one sequence of at most `context` tokens with a KV
    cache.

    Each new token costs only its part of the attention. Logits are those of `GPT.logits`, up to the order of
    summation. A model on a device takes `params` there; logits come back as float32.
    """

    def __init__(self, model: GPT, params: Array) -> None:
        super().__init__(model.config, xp=model.xp)
        config = model.config
        self._leaves = self.leaves(params)
        shape = (config.layers, config.heads, config.context, config.width // config.heads)
        dtype = np.float32 if params.dtype.itemsize == 2 else params.dtype
        self._caches: list[Any] = []
        """Of each layer, on a device."""
        if self._ops is ops:
            self._keys: Array = np.empty(shape, dtype)
            self._values: Array = np.empty(shape, dtype)
        else:
            self._caches = [self._ops.cache(*shape[1:]) for _ in range(config.layers)]
        self.read = 0
        """Number of tokens that have been read."""

    @property
    def is_full(self) -> bool:
        """Whether the cache is full: call `forget`, and read the end of the sequence again."""
        return self.read == self.config.context

    def forget(self) -> None:
        """Start another sequence."""
        self.read = 0

    def extend(self, tokens: npt.NDArray[np.integer]) -> Array:
        """Read `tokens`, (count,), and return the logits of the next one, (vocabulary,).

        Raises `LocalProtocolError` for no tokens, and for more than fit.
        """
        if not 0 < len(tokens) <= self.config.context - self.read:
            raise LocalProtocolError(
                f"{len(tokens)} tokens do not fit after {self.read} of {self.config.context}"
            )
        batch = Batch(np.asarray(tokens)[None], offset=self.read)
        logits = self.run(Tape(self.xp, recording=False), self._leaves, batch).data
        self.read += len(tokens)
        last: Array = to_host(logits[-1:])[0]
        return widened(last)

    def _attention(self, tape: Tape, packed: Tensor, batch: Batch, number: int) -> Tensor:
        if self._caches:
            bias = self._bias(packed.data.dtype)
            y = self._ops.cached_attention(packed.data, bias, self._caches[number], known=self.read)
            return tape.record(y, _no_way_back)
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
    raise LocalProtocolError("a pass with a KV cache cannot be differentiated")


LENGTH_MAX = 1 << 20  # tokens


def generate(
    model: GPT,
    params: Array,
    *,
    prompt: bytes,
    length: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[bytes]:
    """Yield `length` single bytes that continue `prompt`; equal arguments give equal text.

    An empty prompt stands for the beginning of a file. Raises `UserError` for a model whose tokens are not
    bytes, and as `generate_tokens`.
    """
    if model.config.vocabulary != VOCABULARY:
        raise UserError(
            f"the model has {model.config.vocabulary} tokens, so they are not bytes: it needs its tokenizer."
        )
    drawn = generate_tokens(
        model,
        params,
        prompt=tuple(prompt or b"\0"),
        length=length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    return (bytes([token]) for token in drawn)


def generate_tokens(
    model: GPT,
    params: Array,
    *,
    prompt: Sequence[int],
    length: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `length` tokens that continue `prompt`, which has at least one; equal arguments give equal
    tokens.

    Each is drawn from the `top_k` most likely ones (all, if there are fewer) given the last `context` tokens,
    with odds raised to 1 / temperature; temperature 0 takes the most likely one. Keys and values are cached
    until the context is full; from then on every position shifts with each token, and everything is
    recomputed. params: flat, (layout.size,), in host memory or on the model's device. Raises `UserError` for
    arguments out of range, before the first token.
    """
    vocabulary = model.config.vocabulary
    if not temperature >= 0.0:
        raise UserError(f"the temperature is {temperature}: it must be 0 or more.")
    if not 1 <= top_k <= vocabulary:
        raise UserError(f"top-k is {top_k}: it must be 1 to {vocabulary}.")
    if not 0 <= length <= LENGTH_MAX:
        raise UserError(f"the length is {length}: it must be 0 to {LENGTH_MAX} tokens.")
    if not prompt or not all(0 <= token < vocabulary for token in prompt):
        raise UserError(f"the prompt needs at least one token, each from 0 to {vocabulary - 1}.")
    return _tokens(CachedGPT(model, params), list(prompt), length, temperature, top_k, seed)


def _tokens(
    cached: CachedGPT, text: list[int], length: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    context, random = cached.config.context, stream(seed, Purpose.GENERATE)
    for number in range(length):
        if number == 0 or cached.is_full:
            cached.forget()
            unread = text[-context:]
        else:
            unread = text[-1:]
        logits = cached.extend(np.array(unread)).astype(np.float64)
        text.append(_draw(logits, temperature, top_k, random))
        yield text[-1]


def _draw(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, random: np.random.Generator
) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    candidates = np.argsort(-logits, kind="stable")[:top_k]
    odds = np.exp((logits[candidates] - logits[candidates[0]]) / temperature)
    cumulative = np.cumsum(odds)
    place = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(candidates[min(int(place), top_k - 1)])
