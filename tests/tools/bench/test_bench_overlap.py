"""The benchmark of overlap, on synthetic spans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zbmd.tools.lab.bench.training.overlap import REDUCTION, hidden_of, hideable, shared, union
from zbmd.training.autograd._spans import CATEGORIES, TRACK_OPERATION, TRACK_STEP
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.profiler.profiler import open_profiler
from zbmd.training.profiler.ring import RECORD, Spans
from zbmd.transport.errors import UserError

MODEL = GPT(GPTConfig(context=4, width=8, heads=2, layers=1))
MS = 1_000_000


def spans_of(rows: list[tuple[str, int, int, int]]) -> Spans:
    """Return a ring that holds these (category or operation, step, begin ms, end ms)."""
    with open_profiler(Path(), MODEL, sequences=1, environ={"ZBMD_PROFILE": "off"}) as profiler:
        run = profiler.run
    names = ("barrier", REDUCTION)
    records = np.zeros(len(rows), RECORD)
    for record, (what, step, begin, end) in zip(records, rows, strict=True):
        record["begin_ns"], record["end_ns"], record["step"] = begin * MS, end * MS, step
        record["track"] = TRACK_OPERATION if what in names else TRACK_STEP
        record["category"] = (names if what in names else CATEGORIES).index(what)
    return Spans(run, (), names, records)


def test_time_beside_the_backward_pass_is_hidden() -> None:
    a_step = [
        ("forward", 0, 10),
        ("backward", 10, 15),
        ("backward", 15, 20),
        ("barrier", 0, 9),
        ("comm", 20, 24),
    ]
    rows: list[tuple[str, int, int, int]] = []
    for step in range(4):
        at = 100 * step
        rows += [(what, step, at + begin, at + end) for what, begin, end in a_step]
        rows += [(REDUCTION, step, at + 12, at + 14), (REDUCTION, step, at + 18, at + 24)]
    found = hidden_of(spans_of(rows), 100.0)
    assert found.steps == 2, "neither the first step nor the last one counts"
    assert (found.backward_ms, found.reduce_ms, found.hidden_ms, found.waited_ms) == (10, 8, 4, 4)
    assert found.ratio == found.ratio_in_all == 0.5
    with pytest.raises(UserError, match="more --steps"):
        hidden_of(spans_of(rows[:2]), 100.0)


def test_intervals() -> None:
    both = union([0, 5, 3], [4, 6, 5])
    assert both.tolist() == [[0, 6]]
    assert shared(both, union([1, 8], [2, 9])) == 1 and shared(both, union([], [])) == 0


def test_the_last_bucket_cannot_be_hidden() -> None:
    assert hideable(MODEL.config) == 0.0, "it is one bucket"
    assert 0.9 < hideable(GPTConfig(width=256, layers=6)) < 1.0
