"""The byte-bigram table that a model has to beat: how well the previous byte alone predicts the next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zbmd.training.config import VOCABULARY
from zbmd.training.data.corpus import Corpus, Windows

SMOOTHING = 0.1  # added to every count; 0.01 to 1 differ by 0.001 nats on the standard library
WINDOWS_PER_PASS = 4_096


def fit_bigram(corpus: Corpus) -> npt.NDArray[np.float64]:
    """Return log P(next byte | byte), (256, 256) in nats, of all pairs in the corpus' training windows.

    Counts get `SMOOTHING` added (G. J. Lidstone, 1920), so that no pair is impossible.
    """
    counts = np.zeros(VOCABULARY * VOCABULARY, dtype=np.int64)
    count = corpus.split.training_count
    for start in range(0, count, WINDOWS_PER_PASS):
        ids = corpus.split.training_ids(np.arange(start, min(start + WINDOWS_PER_PASS, count)))
        windows = corpus.windows(ids).astype(np.intp)
        pairs = windows[:, :-1] * VOCABULARY + windows[:, 1:]
        counts += np.bincount(pairs.reshape(-1), minlength=VOCABULARY * VOCABULARY)
    table = counts.reshape(VOCABULARY, VOCABULARY) + SMOOTHING
    logs: npt.NDArray[np.float64] = np.log(table / table.sum(axis=1, keepdims=True))
    return logs


def bigram_loss(table: npt.NDArray[np.float64], windows: Windows) -> float:
    """Return the mean loss of `table` on `windows`, (samples, T + 1) uint8, in nats per byte."""
    return float(-table[windows[:, :-1], windows[:, 1:]].mean())
