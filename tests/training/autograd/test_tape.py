"""The tape: gradients go where the caller said, each parameter is final once, and misuse is refused."""

from __future__ import annotations

import numpy as np
import pytest

from zbmd.training import ops
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.transport.errors import LocalProtocolError


def total(tape: Tape, x: Tensor) -> Tensor:
    """The sum of all elements."""
    return tape.record(np.asarray(x.data.sum()), lambda dy: x.accumulate(np.full_like(x.data, dy)))


def parameter(data: np.ndarray, index: int = 0, ready: list[int] | None = None) -> Parameter:
    grad = np.full_like(data, np.nan)
    return Parameter(data, grad, index, None if ready is None else ready.append)


def test_a_gradient_is_written_to_the_callers_memory() -> None:
    weight = parameter(np.ones((3, 2)))
    memory = weight.grad
    tape = Tape(np)
    x = np.arange(12.0).reshape(4, 3)
    tape.backward(total(tape, ops.linear(tape, Tensor(x), weight)))
    assert weight.grad is memory
    np.testing.assert_array_equal(weight.grad, np.repeat(x.sum(0)[:, None], 2, axis=1))


def test_a_parameter_used_twice_gets_the_sum_and_is_final_once() -> None:
    ready: list[int] = []
    weight = parameter(np.eye(3) * 2.0, 7, ready)
    tape = Tape(np)
    x = np.arange(3.0)[None]
    once = ops.linear(tape, Tensor(x), weight)
    tape.backward(total(tape, ops.linear(tape, once, weight)))
    assert weight.grad is not None
    # y = sum(x W W): dW = x^T 1 W^T + (x W)^T 1
    expected = x.T @ (np.ones((1, 3)) @ weight.data.T) + (x @ weight.data).T @ np.ones((1, 3))
    np.testing.assert_allclose(weight.grad, expected)
    assert ready == [7]


def test_a_value_used_twice_gets_both_gradients() -> None:
    weight = parameter(np.eye(2))
    tape = Tape(np)
    x = ops.linear(tape, Tensor(np.array([[1.0, 2.0]])), weight)
    doubled = tape.record(x.data * 2.0, lambda dy: x.accumulate(dy * 2.0))
    both = tape.record(x.data + doubled.data, lambda dy: (x.accumulate(dy.copy()), doubled.accumulate(dy))[0])
    tape.backward(total(tape, both))
    np.testing.assert_array_equal(weight.grad, np.array([[3.0, 3.0], [6.0, 6.0]]))


def test_parameters_become_final_from_the_last_to_the_first() -> None:
    ready: list[int] = []
    weights = [parameter(np.eye(2), index, ready) for index in range(4)]
    tape = Tape(np)
    x = Tensor(np.ones((1, 2)))
    for weight in weights:
        x = ops.linear(tape, x, weight)
    tape.backward(total(tape, x))
    assert ready == [3, 2, 1, 0]


def test_a_tape_plays_once() -> None:
    tape = Tape(np)
    loss = total(tape, ops.linear(tape, Tensor(np.ones((1, 2))), parameter(np.eye(2))))
    tape.backward(loss)
    with pytest.raises(LocalProtocolError, match="played before"):
        tape.backward(loss)


def test_a_parameter_that_the_loss_does_not_see_is_refused() -> None:
    tape = Tape(np)
    seen = ops.linear(tape, Tensor(np.ones((1, 2))), parameter(np.eye(2), 0))
    ops.linear(tape, Tensor(np.ones((1, 2))), parameter(np.eye(2), 1))
    with pytest.raises(LocalProtocolError, match=r"parameter 1 .* does not depend on it"):
        tape.backward(total(tape, seen))


def test_an_op_that_gives_a_gradient_too_many_is_refused() -> None:
    weight = parameter(np.eye(2))
    tape = Tape(np)

    def backward(dy: np.ndarray) -> None:
        for _ in range(2):
            weight.receive(lambda out: np.copyto(out, dy))

    with pytest.raises(LocalProtocolError, match="unexpected gradient"):
        tape.backward(tape.record(weight.data, backward, weight))


def test_a_silent_tape_keeps_nothing() -> None:
    tape = Tape(np, recording=False)
    loss = total(tape, ops.linear(tape, Tensor(np.ones((1, 2))), parameter(np.eye(2))))
    assert loss.data == 2.0 * 1.0
    with pytest.raises(LocalProtocolError, match="the tape is empty"):
        tape.backward(loss)
