"""The memory of a graph in one arena: when each value is alive, and where it lies.

Values that nodes write share the arena; weights, inputs and outputs have memory of their own. Offsets are
chosen by size, the largest first, each at the lowest place that is free while it is alive (Y. Pisarchyk, J.
Lee, "Efficient memory management for deep neural net inference", 2020, arXiv:2001.03288).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from zbmd.training.model.graph.ir import ELEMENTWISE, Graph, Node

ALIGNMENT: Final = 256
"""Bytes: as `cudaMalloc` aligns."""
_IN_PLACE: Final = ELEMENTWISE | {"cross_entropy_both", "elements", "part_slopes"}


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Values that take each other's place. start, end: the first and last node that they are alive at."""

    values: tuple[int, ...]
    offset: int
    nbytes: int
    start: int
    end: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The offset of each value. live_bytes: the most that is alive at once, below which no plan can go.

    separate_bytes: of all values, each in memory of its own.
    """

    placements: tuple[Placement, ...]
    arena_bytes: int
    live_bytes: int
    separate_bytes: int

    def offsets(self) -> dict[int, int]:
        """Return where each value begins."""
        return {number: one.offset for one in self.placements for number in one.values}


class _Buffer:
    """Values in one place, and when they are alive."""

    __slots__ = ("end", "nbytes", "start", "values")

    def __init__(self, value: int, nbytes: int, start: int, end: int) -> None:
        self.values, self.nbytes, self.start, self.end = [value], nbytes, start, end


def plan_memory(graph: Graph) -> MemoryPlan:
    """Return a plan for all values that nodes write and that are not outputs."""
    return _plan_of(graph, _buffers(graph))


def plan_passes(graph: Graph) -> tuple[MemoryPlan, MemoryPlan]:
    """Return a plan of what one pass keeps for a later one, and one of what is alive within one pass alone.

    Only the first is held between passes: the memory of the second may be used by anything meanwhile.
    """
    ends, buffers = graph.pass_ends(), _buffers(graph)
    kept = [one for one in buffers if any(one.start < end <= one.end for end in ends)]
    apart = {id(one) for one in kept}
    return _plan_of(graph, kept), _plan_of(graph, [one for one in buffers if id(one) not in apart])


def _plan_of(graph: Graph, buffers: list[_Buffer]) -> MemoryPlan:
    placements, arena = _place(buffers)
    live = np.zeros(len(graph.nodes) + 1, np.int64)
    for one in buffers:
        live[one.start] += one.nbytes
        live[one.end + 1] -= one.nbytes
    separate = sum(_rounded(graph.values[number].nbytes) for one in buffers for number in one.values)
    return MemoryPlan(
        placements=tuple(placements),
        arena_bytes=arena,
        live_bytes=int(np.cumsum(live).max(initial=0)),
        separate_bytes=separate,
    )


def _rounded(nbytes: int) -> int:
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT


def _buffers(graph: Graph) -> list[_Buffer]:
    """Return the buffers, an element-wise output in the place of an input that ends there."""
    uses, kept = graph.uses(), set(graph.outputs.values())
    of_value: dict[int, _Buffer] = {}
    for place, node in enumerate(graph.nodes):
        for number in node.outputs:
            if number in kept:
                continue
            end, nbytes = max(uses.get(number, [place])), _rounded(graph.values[number].nbytes)
            reused = _replaced(graph, node, number, place, of_value)
            if reused is None:
                of_value[number] = _Buffer(number, nbytes, place, end)
            else:
                reused.values.append(number)
                reused.end, of_value[number] = end, reused
    return list(dict.fromkeys(of_value.values()))


def _replaced(
    graph: Graph, node: Node, made: int, place: int, of_value: dict[int, _Buffer]
) -> _Buffer | None:
    """Return the buffer of an input like the output `made`, if `node` may overwrite it: its last reader."""
    if node.op not in _IN_PLACE:
        return None
    wanted = graph.values[made]
    for number in node.inputs:
        found, value = of_value.get(number), graph.values[number]
        is_free = found is not None and found.end == place and not set(found.values) & set(node.outputs)
        if is_free and (value.shape, value.dtype) == (wanted.shape, wanted.dtype):
            return found
    return None


def _place(buffers: list[_Buffer]) -> tuple[list[Placement], int]:
    order = sorted(buffers, key=lambda one: (-one.nbytes, one.start))
    table = np.zeros((len(order), 4), np.int64)  # start, end, offset, where it ends
    found: list[Placement] = []
    for count, one in enumerate(order):
        known = table[:count]
        beside = known[(known[:, 0] <= one.end) & (known[:, 1] >= one.start)]
        offset = 0
        for _, _, low, high in beside[np.argsort(beside[:, 2], kind="stable")].tolist():
            if low - offset >= one.nbytes:
                break
            offset = max(offset, high)
        table[count] = one.start, one.end, offset, offset + one.nbytes
        found.append(
            Placement(
                values=tuple(one.values), offset=offset, nbytes=one.nbytes, start=one.start, end=one.end
            )
        )
    return found, int(table[:, 3].max(initial=0))
