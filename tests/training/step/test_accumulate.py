"""Accumulation in tree order: the same bits as the reference, for every range of shards."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.algorithms.shard_tree import reduce_shards, shard_tree_nodes
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.step.reduction import AccumulationPlan, Buckets


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    shards = draw(st.integers(1, 40))
    lo = draw(st.integers(0, shards))
    return shards, lo, draw(st.integers(lo, shards))


@given(ranges())
def test_partials_have_the_reference_bits(case: tuple[int, int, int]) -> None:
    shards, lo, hi = case
    gradients = np.random.default_rng(0).standard_normal((shards, 7)).astype(np.float32)
    plan = AccumulationPlan.of(shards, lo, hi)
    buffers = [np.full(7, np.nan, np.float32) for _ in range(plan.buffers)]
    for leaf in plan.leaves:
        buffers[leaf.buffer][:] = gradients[leaf.shard]
        for span in (slice(0, 3), slice(3, 7)):
            plan.perform(leaf.additions, buffers, span)
    assert [leaf.shard for leaf in plan.leaves] == list(range(lo, hi))
    assert list(plan.partials) == shard_tree_nodes(shards, lo, hi)
    for (first, end), buffer in plan.partials.items():
        assert buffers[buffer].tobytes() == reduce_shards(list(gradients[first:end])).tobytes()


@given(st.integers(1, 1 << 12))
def test_a_plan_needs_few_buffers(shards: int) -> None:
    assert AccumulationPlan.of(shards, 0, shards).buffers <= shards.bit_length() + 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 400))
def test_buckets_cover_the_layout_once_and_are_ready_once(sizes: list[int], bucket_elements: int) -> None:
    layout = ParameterLayout.of({f"p{i}": (size,) for i, size in enumerate(sizes)})
    buckets = Buckets(layout, bucket_elements=bucket_elements)
    covered = sorted((span.start, span.stop) for span in buckets.spans)
    assert covered[0][0] == 0 and covered[-1][1] == layout.size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(covered))
    for _ in range(2):
        buckets.begin()
        ready = [buckets.ready(index) for index in reversed(range(len(sizes)))]
        assert [span for span in ready if span is not None] == buckets.spans
