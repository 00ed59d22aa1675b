"""Token embedding."""

from __future__ import annotations

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.native import _kernels
from zbmd.training.ops.native import as_indices, has_kernels


def embedding(tape: Tape, tokens: Array, table: Parameter) -> Tensor:
    """Return `table[tokens]`.

    tokens: (rows,), an integer dtype, values below vocabulary; table: (vocabulary, features); result:
    (rows, features).

    The order of the sums in the table's gradient is fixed: the rows' order by the kernel, and where there is
    none that of a matrix product with the one-hot tokens, since scattered additions on a GPU promise none.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        if has_kernels(xp, dy):
            table.receive(lambda out: _kernels.embedding_grad(out, dy, as_indices(tokens)), lasting=True)
            return
        one_hot = xp.zeros((len(tokens), len(table.stored)), dtype=dy.dtype)
        one_hot[xp.arange(len(tokens)), tokens] = 1.0
        table.receive(lambda out: xp.matmul(one_hot.T, dy, out=out), lasting=True)

    return tape.record(table.rows(tokens), backward, table)
