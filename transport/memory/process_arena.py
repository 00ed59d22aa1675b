"""`zbmd.empty` and `zbmd.from_array`: arrays in the arena of the worker that this process has joined as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena

_joined: list[Arena] = []


def arena_joined(arena: Arena) -> None:
    """A worker of this process may be allocated from."""
    _joined.append(arena)


def arena_left(arena: Arena) -> None:
    """It has left; its arrays live on, but nobody else sees them. Idempotent."""
    if arena in _joined:
        _joined.remove(arena)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """An uninitialised C-contiguous array, 64-byte aligned, that the other ranks of this host can read.

    Collectives read it in place. Its memory returns to the arena when the array and all its views are gone.
    Raises `ArenaFull` if there is no room for it, and `UserError` if this process has not joined a job.
    """
    return _arena("empty").empty(shape, dtype)


def from_array(array: NDArray[Any]) -> NDArray[Any]:
    """A copy of `array` as `empty` makes them; raises as it does."""
    return _arena("from_array").from_array(array)


def _arena(function: str) -> Arena:
    if not _joined:
        raise UserError(
            f"zbmd.{function} makes arrays that the other ranks can read, and this process has not joined a "
            "job. Call it inside `async with zbmd.join():`; outside of one, numpy's own arrays will do."
        )
    if len(_joined) > 1:
        raise UserError(
            f"zbmd.{function} does not know which of the {len(_joined)} workers of this process is meant. "
            f"Say so: worker.segment.arena.{function}(...)."
        )
    return _joined[0]
