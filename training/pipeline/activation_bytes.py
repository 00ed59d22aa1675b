"""What a pass holds until it is played back: bytes of activations, found by looking, not by a formula."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Tensor
from zbmd.training.pipeline.part import Pass

OBJECTS_MAX = 100_000
"""Looked at in one pass; a part of a model has a few hundred."""


def held_bytes(done: Pass, apart: Iterable[Array]) -> int:
    """Bytes of the arrays that `done` keeps alive, but for the memory of `apart` (weights, gradients).

    Views count as the array that they are of, each once; what lies in memory that numpy does not own, such
    as a slot of a ring or an arena, is not counted.
    """
    others = {id(_owner(array)) for array in apart}
    owners = {id(owner): owner for owner in map(_owner, _arrays(done))}
    return sum(owner.nbytes for key, owner in owners.items() if key not in others and owner.flags.owndata)


def _owner(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _arrays(done: Pass) -> Iterator[Array]:
    """All arrays that the way back of a pass can reach."""
    left: list[object] = [done.input, done.output, *done.tape.kept(), *done.weight_gradients]
    seen: set[int] = set()
    while left and len(seen) < OBJECTS_MAX:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        match found:
            case np.ndarray():
                yield found
            case Tensor():
                left += (found.data, found.grad)
            case FunctionType():
                left += (cell.cell_contents for cell in found.__closure__ or ())
                left += found.__defaults__ or ()
            case MethodType():
                left.append(found.__func__)
            case functools.partial():
                left += (found.func, *found.args, *found.keywords.values())
            case tuple() | list():
                left += found
            case _:
                pass
