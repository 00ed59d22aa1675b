"""Operations that a rank carries out alone: their results while the others are absent.

A replacement runs its script from the top, up to the loop that the others are in; a survivor ends the step
that is committed already. Each input stands for those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zbmd.collectives.torch.tensors import Array


class Alone:
    """The methods of a `Communicator` that process groups call, without peers.

    A reduction leaves its input, a gather repeats it in all rows, and of blocks for all ranks a rank gets its
    own. place, size: of the rank in the group that it stands for.
    """

    epoch = 0

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def label(self, text: Callable[[], str]) -> None:
        """Do nothing: nobody else sees this operation."""

    def agree_on(self, text: str, **_: Any) -> None:
        """Do nothing: nobody else calls this."""

    def barrier(self, **_: Any) -> None:
        """Return at once."""

    def all_reduce(self, x: Any, out: Any = None, **_: Any) -> Any:
        """Leave `x`, or copy it to `out`."""
        return x if out is None else _copied(x, out)

    def all_reduce_many(self, arrays: Sequence[Any], **_: Any) -> Sequence[Any]:
        """Leave them."""
        return arrays

    def broadcast(self, x: Any, root: int, **_: Any) -> Any:
        """Leave `x`."""
        return x

    def reduce(self, x: Any, root: int, **_: Any) -> Any:
        """Leave `x`."""
        return x

    def all_gather(self, x: Any, out: Any = None, **_: Any) -> Any:
        """Repeat `x` in each row of `out`, shape (size, *x.shape)."""
        if out is None:
            out = np.empty((self.size, *x.shape), x.dtype)
        out[:] = x.reshape(1, *out.shape[1:])
        return out

    def all_gather_v(self, x: Any, **_: Any) -> Any:
        """Repeat the rows of `x` for each rank."""
        return np.concatenate([x] * self.size)

    def gather(self, x: Any, root: int, out: Any = None, **_: Any) -> Any:
        """As `all_gather`, at the root."""
        return self.all_gather(x, out) if root == self.place else None

    def scatter(self, x: Any, root: int, out: Any = None, **_: Any) -> Any:
        """Copy the own block of `x` to `out`; where there is no `x`, leave it."""
        return out if x is None else _copied(x[self.place], out)

    def reduce_scatter(self, x: Any, out: Any = None, **_: Any) -> Any:
        """Copy the own block of `x`, shape (size, …), to `out`."""
        return _copied(x[self.place], out)

    def reduce_scatter_v(self, x: Array, rows: Sequence[int], out: Any = None, **_: Any) -> Any:
        """Copy the own rows of `x` to `out`."""
        begin = sum(rows[: self.place])
        return _copied(x[begin : begin + rows[self.place]], out)

    def all_to_all(self, x: Any, out: Any = None, **_: Any) -> Any:
        """Copy `x` to `out`."""
        return _copied(x, out)

    def all_to_all_v(
        self, x: Array, sends: Sequence[int], receives: Sequence[int], out: Any = None, **_: Any
    ) -> Any:
        """Fill what comes from each rank with the rows for it, repeated or cut as far as they go."""
        parts, begin = list[Array](), 0
        for sent, received in zip(sends, receives, strict=True):
            parts.append(np.resize(x[begin : begin + sent], (received, *x.shape[1:])))
            begin += sent
        return _copied(np.concatenate(parts), out)


def _copied(x: Any, out: Any) -> Any:
    if out is None:
        return x.copy()
    out[...] = x.reshape(out.shape)
    return out
