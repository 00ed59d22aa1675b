"""Sampling: the same seed gives the same text, and the choices are those that were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from zbmd.training.config import GPTConfig
from zbmd.training.model.generate import generate
from zbmd.training.model.gpt import GPT
from zbmd.transport.errors import UserError

MODEL = GPT(GPTConfig(context=5, width=8, heads=2, layers=1))


def params(seed: int = 0) -> np.ndarray:
    """Weights whose head is not zero, so that bytes differ in likelihood."""
    flat = MODEL.init(seed)
    flat[MODEL.layout.slots[-1].span] = np.random.default_rng(seed).standard_normal(8 * 256) * 3.0
    return flat


def text(**changes: object) -> bytes:
    arguments: dict[str, object] = {"prompt": b"def ", "length": 40} | changes
    return b"".join(generate(MODEL, params(), **arguments))  # type: ignore[arg-type]


def test_a_seed_gives_one_text() -> None:
    assert text(seed=3, temperature=5.0) == text(seed=3, temperature=5.0)
    assert text(seed=3, temperature=5.0) != text(seed=4, temperature=5.0)
    assert len(text()) == 40


def test_temperature_zero_and_one_candidate_take_the_most_likely_byte() -> None:
    expected = bytearray(b"def ")
    for _ in range(12):
        window = np.frombuffer(bytes(expected[-5:]), dtype=np.uint8)[None]
        expected.append(int(MODEL.logits(params(), window)[0, -1].argmax()))
    assert text(temperature=0.0, length=12) == bytes(expected[4:])
    assert text(top_k=1, length=12) == bytes(expected[4:])


def test_no_byte_outside_the_top_k_is_drawn() -> None:
    written = bytearray(b"def ")
    for byte in text(top_k=3, temperature=5.0, length=60):
        window = np.frombuffer(bytes(written[-5:]), dtype=np.uint8)[None]
        likely = np.argsort(-MODEL.logits(params(), window)[0, -1], kind="stable")[:3]
        assert byte in likely
        written.append(byte)


def test_bytes_are_drawn_as_often_as_they_are_likely() -> None:
    window = np.frombuffer(b"def ", dtype=np.uint8)[None]
    logits = MODEL.logits(params(), window)[0, -1].astype(np.float64) / 2.0
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    draws = [text(length=1, seed=seed, top_k=256, temperature=2.0)[0] for seed in range(1500)]
    seen = np.bincount(draws, minlength=256) / len(draws)
    assert np.abs(seen - likely).max() < 0.05


def test_an_empty_prompt_and_a_long_one_work() -> None:
    assert len(text(prompt=b"")) == 40
    assert text(prompt=b"long before def ", seed=1) == text(prompt=b" def ", seed=1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top-k is 0"),
        ({"top_k": 257}, "top-k is 257"),
        ({"length": -1}, "length is -1"),
    ],
)
def test_arguments_out_of_range_are_explained(change: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        text(**change)
