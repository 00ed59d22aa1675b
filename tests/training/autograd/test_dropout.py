"""Random numbers by key, dropout by them, blocks that are computed again: the bits are those of the key."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.array_modules import Witness

from zbmd.training import ops
from zbmd.training.autograd.rng import Noise, random_run, random_words
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.native import _kernels
from zbmd.transport.errors import UserError

Floats = npt.NDArray[np.float64]
SMALL = GPTConfig(context=8, width=16, heads=2, layers=3, dropout=0.2)


def philox(counter: list[int], key: int) -> list[int]:
    """Philox4x32-10 as its paper writes it."""
    words, low, high = counter, key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (right >> 32) ^ words[1] ^ low,
            right & 0xFFFFFFFF,
            (left >> 32) ^ words[3] ^ high,
            left & 0xFFFFFFFF,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_generator_gives_the_answers_of_random123(counter: str, key: str, expected: str) -> None:
    low, high = (int(word, 16) for word in key.split())
    found = philox([int(word, 16) for word in counter.split()], high << 32 | low)
    assert " ".join(f"{word:08x}" for word in found) == expected


def test_the_kernel_is_the_generator() -> None:
    words = np.zeros(4 * 37 + 3, dtype=np.uint32)
    _kernels.random_words(words, 0x299F31D0A4093822, 5, 0x85A308D3, 0x13198A2E, 0x03707344)
    blocks = [philox([5 + i, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822) for i in range(38)]
    assert words.tolist() == [word for block in blocks for word in block][: len(words)]


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**40),
    sample=st.integers(0, 2**40),
    site=st.integers(0, 2**24 - 1),
    count=st.integers(1, 200),
)
def test_a_device_without_kernels_draws_the_same_words(
    seed: int, step: int, sample: int, site: int, count: int
) -> None:
    noise = Noise(seed, step, np.array([sample, 3]))
    words = random_words(noise, site, count)
    assert words.tobytes() == np.ascontiguousarray(random_words(noise, site, count, xp=Witness())).tobytes()
    assert words[1, : count // 2].tolist() == random_words(noise, site, count // 2)[1].tolist()


@given(
    each=st.integers(1, 40),
    samples=st.integers(1, 4),
    begin=st.floats(0, 1),
    end=st.floats(0, 1),
    xp=st.sampled_from([np, Witness()]),
)
def test_a_run_of_words_is_cut_from_those_of_all_samples(
    each: int, samples: int, begin: float, end: float, xp: Any
) -> None:
    noise, last = Noise(7, 3, np.arange(100, 100 + samples)), each * samples - 1
    start = int(begin * last)
    stop = start + 1 + int(end * (last - start))
    run = random_run(noise, 2, each, start, stop, xp=xp)
    assert run.tolist() == random_words(noise, 2, each).reshape(-1)[start:stop].tolist()


def test_words_of_other_seeds_steps_samples_and_sites_differ() -> None:
    noise = Noise(1, 2, np.array([3]))
    others = [Noise(2, 2, noise.samples), Noise(1, 3, noise.samples), Noise(1, 2, np.array([4]))]
    found = [random_words(one, 5, 64).tobytes() for one in (noise, *others)]
    found.append(random_words(noise, 6, 64).tobytes())
    assert len(set(found)) == len(found)


def test_dropout_zeroes_its_part_and_keeps_the_mean() -> None:
    noise = Noise(0, 0, np.arange(40))
    x = Tensor(np.ones((40 * 25, 40), dtype=np.float32))
    tape = Tape(np)
    y = ops.dropout(tape, x, rate=0.3, noise=noise, site=1)
    kept = y.data != 0.0
    assert abs(kept.mean() - 0.7) < 0.01
    np.testing.assert_allclose(y.data[kept], 1 / 0.7, rtol=1e-6)
    mask = y.data.copy()
    tape.backward(y)
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad, mask)


def test_dropout_of_nothing_is_nothing() -> None:
    x = Tensor(np.ones((2, 3)))
    y = ops.dropout(Tape(np), x, rate=0.0, noise=Noise(0, 0, np.arange(2)), site=0)
    np.testing.assert_array_equal(y.data, x.data)


def params_of(model: GPT) -> Floats:
    flat = model.init(3).astype(np.float64)
    for view in model.layout.views(flat):
        view += np.random.default_rng(view.size).standard_normal(view.shape) * 0.2
    return flat


def gradient(
    model: GPT, params: npt.NDArray[np.float64], samples: list[int], step: int
) -> tuple[float, bytes]:
    tokens = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)[samples]
    grads = np.zeros_like(params)
    noise = Noise(7, step, np.array(samples))
    return model.loss_and_grads(params, grads, tokens, global_batch=4, noise=noise), grads.tobytes()


def test_gradients_with_dropout_against_finite_differences() -> None:
    model = GPT(SMALL)
    params, tokens = params_of(model), np.random.default_rng(0).integers(0, 256, (2, 9), dtype=np.uint8)
    noise, grads = Noise(7, 1, np.array([4, 5])), np.zeros_like(params)
    scratch = np.zeros_like(params)
    model.loss_and_grads(params, grads, tokens, global_batch=2, noise=noise)
    for slot in model.layout.slots:
        place = slot.offset + int(np.abs(grads[slot.span]).argmax())
        original, values = params[place], []
        for move in (1e-6, -1e-6):
            params[place] = original + move
            values.append(model.loss_and_grads(params, scratch, tokens, global_batch=2, noise=noise))
        params[place] = original
        assert grads[place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4), slot.name


def test_a_sample_draws_the_same_whoever_computes_it() -> None:
    model = GPT(SMALL)
    params = params_of(model)
    together, _ = gradient(model, params, [2, 5], 1)
    apart = [gradient(model, params, [sample], 1)[0] for sample in (5, 2)]
    assert together == pytest.approx(sum(apart), rel=1e-12)
    assert gradient(model, params, [2, 5], 2)[0] != together


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_computing_blocks_again_changes_no_bit(rate: float) -> None:
    config = GPTConfig(context=8, width=16, heads=2, layers=3, dropout=rate)
    kept, again = GPT(config), GPT(config, recompute=True)
    params = params_of(kept)
    assert gradient(kept, params, [1, 3], 5) == gradient(again, params, [1, 3], 5)


def test_parameters_become_ready_in_the_same_order() -> None:
    orders: list[list[int]] = []
    for recompute in (False, True):
        model, order = GPT(SMALL, recompute=recompute), list[int]()
        params = params_of(model)
        tokens = np.zeros((1, 9), dtype=np.uint8)
        model.loss_and_grads(
            params, np.zeros_like(params), tokens, global_batch=1, on_grad_ready=order.append
        )
        orders.append(order)
    assert orders[0] == orders[1]


def test_a_parameter_shared_by_two_blocks_that_are_computed_again() -> None:
    ready: list[int] = []
    weight = Parameter(np.array([[2.0]]), np.zeros((1, 1)), 0, ready.append)
    tape, x = Tape(np), Tensor(np.array([[3.0]]))
    y = x
    for _ in range(2):
        y = tape.checkpoint(lambda t, z: ops.linear(t, z, weight), y, [weight])
    tape.backward(y)
    assert weight.grad is not None and x.grad is not None
    assert (weight.grad.item(), x.grad.item(), ready) == (12.0, 4.0, [0])


def test_blocks_that_are_computed_again_keep_little() -> None:
    peaks: list[int] = []
    for recompute in (False, True):
        model = GPT(GPTConfig(context=64, width=32, heads=4, layers=8), recompute=recompute)
        params = model.init(0)
        grads, tokens = np.zeros_like(params), np.zeros((4, 65), dtype=np.uint8)
        tracemalloc.start()
        model.loss_and_grads(params, grads, tokens, global_batch=4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 0.4 * peaks[0], peaks


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_are_user_errors(rate: float) -> None:
    with pytest.raises(UserError, match="at least 0 and below 1"):
        GPTConfig(dropout=rate)
