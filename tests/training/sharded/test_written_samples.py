"""Texts that a model writes while it is trained: once for a step, the same for the same weights."""

from __future__ import annotations

from pathlib import Path

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.sharded.samples import SAMPLES_NAME, read_samples, write_sample

MODEL = GPTConfig(context=8, width=16, heads=2, layers=1)


def test_a_step_has_one_text_and_damage_is_left_out(tmp_path: Path) -> None:
    weights, path = GPT(MODEL).init(3), tmp_path / SAMPLES_NAME
    assert not list(read_samples(path))
    for step in (4, 8, 8, 4):  # repeated after a loss
        write_sample(tmp_path, MODEL, weights, step=step, seed=1)
    first, second = read_samples(path)
    assert (first.step, second.step) == (4, 8) and first.text and first.text != second.text
    other = tmp_path / "other"
    other.mkdir()
    write_sample(other, MODEL, weights, step=4, seed=1)
    assert list(read_samples(other / SAMPLES_NAME)) == [first]
    damaged = [b"{", b"[" * 100_000, b'{"step":-1,"text":""}', b"\xff", b'{"step":9}', path.read_bytes()]
    path.write_bytes(b"\n".join(damaged))
    assert list(read_samples(path)) == [first, second]
