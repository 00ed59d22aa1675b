"""The bigram table against counts made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from zbmd.training.data.corpus import SMOOTHING, Corpus, bigram_loss, fit_bigram, prepare_corpus


def make(directory: Path, data: bytes) -> Corpus:
    (directory / "source").write_bytes(data)
    return Corpus(prepare_corpus(str(directory / "source"), directory), context=4)


def test_the_table_is_counted_on_training_windows_only(tmp_path: Path) -> None:
    corpus = make(tmp_path, b"abab" * 19 + b"cccc" + b"a")  # 20 windows, the last of them held out
    table = fit_bigram(corpus)
    a, b, c = b"abc"
    pairs = {(a, b): 38, (b, a): 37, (b, c): 1}
    for (first, second), count in pairs.items():
        row = sum(n for (start, _), n in pairs.items() if start == first)
        expected = math.log((count + SMOOTHING) / (row + 256 * SMOOTHING))
        assert math.isclose(table[first, second], expected)
    assert np.allclose(table[c], -math.log(256)), "what follows c was seen in held-out text only"
    assert np.allclose(np.exp(table).sum(axis=1), 1.0)


def test_loss_is_the_mean_over_all_targets(tmp_path: Path) -> None:
    corpus = make(tmp_path, b"abab" * 20 + b"a")
    table = fit_bigram(corpus)
    windows = np.frombuffer(b"ababa" + b"babab", dtype=np.uint8).reshape(2, 5)
    a, b = b"ab"
    assert math.isclose(bigram_loss(table, windows), -(table[a, b] + table[b, a]) / 2)
