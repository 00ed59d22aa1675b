"""Sampling text from a model, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zbmd.training.config import VOCABULARY
from zbmd.training.gpt import GPT
from zbmd.training.rng import Purpose, stream
from zbmd.training.xp import Array, to_host
from zbmd.transport.errors import UserError

LENGTH_MAX = 1 << 20  # bytes


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

    Each byte is drawn from the `top_k` most likely ones given the last `context` bytes, with odds raised
    to 1 / temperature; temperature 0 takes the most likely byte. An empty prompt stands for a new file.
    params: flat, (layout.size,). Raises `UserError` for arguments out of range, before the first byte.
    """
    if not temperature >= 0.0:
        raise UserError(f"the temperature is {temperature}: it must be 0 or more.")
    if not 1 <= top_k <= VOCABULARY:
        raise UserError(f"top-k is {top_k}: it must be 1 to {VOCABULARY}.")
    if not 0 <= length <= LENGTH_MAX:
        raise UserError(f"the length is {length}: it must be 0 to {LENGTH_MAX} bytes.")
    return _bytes(model, params, prompt, length, temperature, top_k, seed)


def _bytes(
    model: GPT, params: Array, prompt: bytes, length: int, temperature: float, top_k: int, seed: int
) -> Iterator[bytes]:
    context = model.config.context
    random = stream(seed, Purpose.GENERATE)
    text = bytearray(prompt or b"\0")[-context:]
    for _ in range(length):
        tokens = np.frombuffer(bytes(text), dtype=np.uint8)[None]
        logits = to_host(model.logits(params, tokens)[0, -1]).astype(np.float64)
        byte = _draw(logits, temperature, top_k, random)
        text = (text + bytes([byte]))[-context:]
        yield bytes([byte])


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
