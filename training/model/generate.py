"""Sampling from a model, token by token; of a model of bytes, text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.rng import Purpose, stream
from zbmd.training.config import VOCABULARY
from zbmd.training.model.gpt import GPT
from zbmd.training.model.kv_cache import CachedGPT
from zbmd.transport.errors import UserError

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
    """Yield `length` single bytes that continue `prompt`; the same arguments give the same text.

    An empty prompt stands for a new file. Raises `UserError` for a model whose tokens are not bytes, and as
    `generate_tokens`.
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
    """Yield `length` tokens that continue `prompt`, which has at least one; same arguments, same tokens.

    Each is drawn from the `top_k` most likely ones (all, if there are fewer) given the last `context` tokens,
    with odds raised to 1 / temperature; temperature 0 takes the most likely one. Keys and values are kept
    until the context is full; from then on every position moves with each token, and all is computed
    anew. params: flat, (layout.size,). Raises `UserError` for arguments out of range, before the first token.
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
    return _tokens(CachedGPT(model, to_host(params)), list(prompt), length, temperature, top_k, seed)


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
