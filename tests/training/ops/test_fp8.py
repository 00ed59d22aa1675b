"""Rounding to FP8, and delayed scaling, under random sequences of magnitudes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.ops.fp8 import DelayedScaling, Format, ScalingConfig, quantised, scale_for
from zbmd.transport.errors import UserError

FORMATS = pytest.mark.parametrize("form", Format)


@FORMATS
def test_values_are_rounded_to_the_nearest_number(form: Format) -> None:
    """Against all numbers of the format; ties go to the even one."""
    every = np.arange(256, dtype=np.uint8).view(form.dtype).astype(np.float64)
    numbers = np.unique(every[np.isfinite(every)])
    random = np.random.default_rng(0)
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([random.standard_normal(500) * 2.0 ** random.integers(-16, 16, 500), ties])
    wide = values.astype(np.float32)
    found = quantised(wide, 1.0, form)
    # The distance to a neighbour is exact in float64, and no other number is as near.
    off = np.abs(wide.astype(np.float64)[:, None] - numbers)
    least = off == off.min(axis=1, keepdims=True)
    assert (least & (numbers == found.astype(np.float64)[:, None])).any(axis=1).all()
    tied = least.sum(axis=1) > 1
    assert tied.sum() > 100 and (found.view(np.uint8)[tied] % 2 == 0).all()


@FORMATS
def test_what_is_too_large_saturates_and_what_is_not_finite_is_nan(form: Format) -> None:
    values = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, form.largest, 3e38], np.float32)
    found = quantised(values, 4.0, form).astype(np.float32)
    np.testing.assert_array_equal(
        found, [form.largest, -form.largest, np.nan, np.nan, np.nan, form.largest, form.largest]
    )


@FORMATS
@settings(max_examples=200, deadline=None)
@given(most=st.floats(2.0**-40, 2.0**40, width=32), margin=st.integers(0, 3))
def test_a_scale_is_the_largest_power_of_two_that_fits(form: Format, most: float, margin: int) -> None:
    scale = Fraction(scale_for(most, 1.0, form, margin=margin))
    room = Fraction(form.largest) / 2**margin
    assert Fraction(most) * scale <= room < Fraction(most) * scale * 2
    assert scale.numerator == 1 or scale.denominator == 1


MAGNITUDES = st.one_of(
    st.floats(0, 2.0**40, width=32), st.sampled_from([0.0, float("inf"), float("nan"), 1e-40])
)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(MAGNITUDES, MAGNITUDES), max_size=12),
    history=st.integers(1, 4),
    cut=st.integers(0, 12),
)
def test_scales_follow_the_history_and_survive_a_checkpoint(
    steps: list[tuple[float, float]], history: int, cut: int
) -> None:
    """The scale is that of the largest finite magnitude of the last steps; a copy goes on alike."""
    config = ScalingConfig(history=history)
    machine, copy = DelayedScaling(tuple(Format), config), DelayedScaling(tuple(Format), config)
    expected = [1.0, 1.0]
    for number, most in enumerate(steps):
        machine.observe(most)
        if number > cut:
            copy.observe(most)
        elif number == cut:
            copy.restore(machine.arrays())
        recent = steps[max(0, number + 1 - history) : number + 1]
        for tensor, form in enumerate(Format):
            finite = [np.float32(one[tensor]) for one in recent if np.isfinite(one[tensor])]
            expected[tensor] = scale_for(float(max([np.float32(0), *finite])), expected[tensor], form)
        np.testing.assert_array_equal(machine.scales, np.array(expected, np.float32))
    if cut < len(steps):
        assert copy.state.tobytes() == machine.state.tobytes() and copy.step == machine.step


def _damaged(**changes: Any) -> dict[str, Any]:
    return DelayedScaling([Format.E4M3]).arrays() | changes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"fp8_step": np.array(0)}, "found no fp8_state"),
        (_damaged(fp8_state=np.ones((2, 17), np.float32)), r"found \(2, 17\) in float32"),
        (_damaged(fp8_state=np.ones((1, 17))), "in float64"),
        (_damaged(fp8_state=np.full((1, 17), 3, np.float32)), "not powers of two"),
        (_damaged(fp8_state=np.full((1, 17), np.inf, np.float32)), "damaged"),
        (_damaged(fp8_step=np.array(-1)), "damaged"),
    ],
)
def test_a_damaged_state_is_refused(arrays: dict[str, Any], message: str) -> None:
    machine = DelayedScaling([Format.E4M3])
    before = machine.state.tobytes()
    with pytest.raises(UserError, match=message):
        machine.restore(arrays)
    assert machine.state.tobytes() == before


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="expected a history of 1 to 1024 steps"):
        ScalingConfig(history=0)
    with pytest.raises(UserError, match="expected 1 largest magnitudes"):
        DelayedScaling([Format.E4M3]).observe([1.0, 2.0])
