"""Reading with kept keys and values: the same log odds, and the same text, as without."""

from __future__ import annotations

import numpy as np
import pytest

from zbmd.training.config import GPTConfig
from zbmd.training.model.generate import CachedGPT, generate_tokens
from zbmd.training.model.gpt import GPT
from zbmd.transport.errors import LocalProtocolError, UserError

CONFIGS = [
    GPTConfig(context=9, width=16, heads=4, layers=3, vocabulary=31),
    GPTConfig(family="gpt2", activation="gelu", context=9, width=16, heads=2, layers=2, vocabulary=31),
]


def random_params(model: GPT, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(model.layout.size) * 0.3


@pytest.mark.parametrize("config", CONFIGS)
def test_log_odds_are_those_of_the_whole_sequence(config: GPTConfig, seed: int) -> None:
    model, rng = GPT(config), np.random.default_rng(seed)
    params, tokens = random_params(model, seed), rng.integers(0, 31, 9)
    wanted = model.logits(params, tokens[None])[0]
    cached, at = CachedGPT(model, params), 0
    while not cached.is_full:
        count = int(rng.integers(1, 10 - at))
        found = cached.extend(tokens[at : at + count])
        at += count
        np.testing.assert_allclose(found, wanted[at - 1], rtol=1e-10, atol=1e-10)
    with pytest.raises(LocalProtocolError, match="1 tokens do not fit after 9 of 9"):
        cached.extend(tokens[:1])
    cached.forget()
    np.testing.assert_allclose(cached.extend(tokens), wanted[-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_text_is_the_one_without_a_cache(config: GPTConfig) -> None:
    """Also beyond the context."""
    model = GPT(config)
    params, text = random_params(model, 5), [3, 1, 4]
    found = list(generate_tokens(model, params, prompt=text, length=20, temperature=0.0, top_k=31))
    for token in found:
        assert token == int(model.logits(params, np.array([text[-9:]]))[0, -1].argmax())
        text.append(token)


@pytest.mark.parametrize("prompt", [(), (31,), (-1,)])
def test_prompts_that_are_none_are_explained(prompt: tuple[int, ...]) -> None:
    model = GPT(CONFIGS[0])
    with pytest.raises(UserError, match="the prompt needs at least one token, each from 0 to 30"):
        generate_tokens(model, random_params(model, 0), prompt=prompt, length=1, top_k=1)
