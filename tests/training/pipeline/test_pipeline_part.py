"""Parts of a model do, operation by operation, what the whole does: the same bits."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.config import Activation, GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import NORM_BLOCK, TrainingDiverged, global_norm, norm_of, pieces_of
from zbmd.training.pipeline.part import GPTPart, Pass, layers_in
from zbmd.training.pipeline.passes import held_bytes
from zbmd.transport.errors import RemoteProtocolError

CONFIG = GPTConfig(context=8, width=16, heads=2, layers=3)


@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 5), (0, 2, 4, 5), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize(("splits", "recompute"), [(False, False), (True, False), (True, True)])
def test_parts_give_the_loss_and_the_gradient_of_the_whole(
    cuts: tuple[int, ...], splits: bool, recompute: bool
) -> None:
    model = GPT(CONFIG, recompute=recompute)
    assert cuts[-1] == layers_in(CONFIG)
    params = model.init(3)
    params += np.float32(0.01)
    tokens = np.random.default_rng(1).integers(0, 256, (2, CONFIG.context + 1))
    wanted = np.zeros_like(params)
    loss = model.loss_and_grads(params, wanted, tokens, global_batch=4)

    found = np.zeros_like(params)
    parts = [GPTPart(model, range(start, end)) for start, end in pairwise(cuts)]
    assert parts[0].span.start == 0
    assert parts[-1].span.stop == model.layout.size
    assert all(one.span.stop == other.span.start for one, other in pairwise(parts))
    batch, passes = model.batch(tokens, global_batch=4), list[Pass]()
    passed: np.ndarray | None = None
    for part in parts:
        done = part.forward(params[part.span], found[part.span], batch, passed, splits=splits)
        passes.append(done)
        passed = done.output.data.copy()
    assert passed is not None
    assert float(passed) == loss
    gradient: np.ndarray | None = None
    for part, done in zip(reversed(parts), reversed(passes), strict=True):
        given, gradient = gradient, part.backward(done, gradient)
        if given is not None and gradient is not None:
            assert not np.shares_memory(given, gradient)
        if given is not None and not splits:
            given[:] = np.nan  # its memory is the sender's again; else only behind the weights' gradients
    assert gradient is None
    if splits:
        assert not found.any(), "nothing is written before its turn"
        for part, done in zip(parts, passes, strict=True):
            part.weight_gradient(done)
    padding = np.ones(len(params), bool)
    for slot in model.layout.slots:
        padding[slot.span] = False
    assert np.array_equal(found[~padding].view(np.uint32), wanted[~padding].view(np.uint32))


@pytest.mark.parametrize(("activation", "recompute"), [("relu2", False), ("gelu", False), ("relu2", True)])
def test_bytes_that_a_pass_holds_are_those_that_are_alive(activation: Activation, recompute: bool) -> None:
    config = GPTConfig(context=64, width=64, heads=2, layers=2, activation=activation)
    model = GPT(config, recompute=recompute)
    batch = model.batch(np.zeros((4, 65), np.uint8), global_batch=4)
    for layers in (range(2), range(2, 4)):
        part = GPTPart(model, layers)
        params = model.init(0)[part.span].copy()
        grads, came = np.zeros_like(params), np.zeros((4 * 64, 64), np.float32)
        taken = None if part.is_first else came
        part.forward(params, grads, batch, taken)  # what is made once is there
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            held = [part.forward(params, grads, batch, taken) for _ in range(3)]
            alive = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        found = sum(held_bytes(one, (params, grads, came)) for one in held)
        assert 0.94 * alive < found <= alive, "the rest are Python's own objects"


@settings(max_examples=60, deadline=None)
@given(draw=st.data(), size=st.integers(1, 4 * NORM_BLOCK), seed=st.integers(0, 2**32 - 1))
def test_a_norm_from_pieces_has_the_bits_of_the_whole(draw: st.DataObject, size: int, seed: int) -> None:
    near = st.builds(lambda block, off: block * NORM_BLOCK + off, st.integers(0, 4), st.integers(-2, 2))
    inner = draw.draw(st.lists(st.one_of(st.integers(0, size), near), max_size=6))
    cuts = sorted({0, size, *(cut for cut in inner if 0 < cut < size)})
    grads = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    pieces = [(slice(a, b), pieces_of(grads[a:b], slice(a, b))) for a, b in pairwise(cuts)]
    assert norm_of(pieces, grads.dtype) == global_norm(grads, xp=np)


def test_pieces_that_are_none_are_told() -> None:
    span = slice(0, NORM_BLOCK)
    with pytest.raises(RemoteProtocolError, match="3 pieces"):
        norm_of([(span, np.zeros(3))], np.dtype(np.float32))
    with pytest.raises(TrainingDiverged, match="nan"):
        norm_of([(span, np.array([np.nan]))], np.dtype(np.float32))
