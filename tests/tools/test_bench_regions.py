"""The benchmark of regions measures what it says, with a real peer, and leaves nothing."""

from __future__ import annotations

from zbmd.tools.bench_regions import iterations_of, measure


def test_it_measures_each_size_as_often_as_it_says() -> None:
    sizes = (8, 1 << 20)
    rows = measure(sizes)
    assert tuple(row.nbytes for row in rows) == sizes
    for row in rows:
        for samples in (row.put, row.staged, row.memcpy):
            assert len(samples) == iterations_of(row.nbytes) and min(samples) > 0
