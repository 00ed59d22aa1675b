"""Token embedding."""

from __future__ import annotations

from zbmd.training.tape import Parameter, Tape, Tensor
from zbmd.training.xp import Array


def embedding(tape: Tape, tokens: Array, table: Parameter) -> Tensor:
    """Return `table[tokens]`.

    tokens: (rows,), an integer dtype, values below vocabulary; table: (vocabulary, features); result:
    (rows, features).

    The table's gradient is a matrix product with the one-hot tokens: the order of its sums is fixed, which
    scattered additions on a GPU do not promise, and for 256 tokens it is as quick.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        one_hot = xp.zeros((len(tokens), len(table.data)), dtype=dy.dtype)
        one_hot[xp.arange(len(tokens)), tokens] = 1.0
        table.receive(lambda out: xp.matmul(one_hot.T, dy, out=out))

    return tape.record(table.data[tokens], backward, table)
