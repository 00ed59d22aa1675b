"""Floating-point operations of a model's matrix products, counted from its shapes, a unit at a time.

A product of (m, k) by (k, n) has 2 m k n. Backwards there are two of that size for each. Causal attention
computes each pair of a query and a key that it may see, T (T + 1) / 2 of them: two products forwards, four
backwards. All else (norms, activations, softmax, tables that are looked up) is not counted, as in A.
Chowdhery and others, "PaLM: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B,
which counts all T² pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.training.model.gpt import GPT

TABLES = frozenset({"embed.weight", "positions.weight"})
"""Parameters that the first unit looks up; in a tied head the first of them is a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFlops:
    """Of one pass of a unit over one logical shard, on this rank.

    attention: the part of `forward` that is attention. again: what the backward pass computes a second time
    on its own, the scores of attention.
    """

    name: str
    forward: int
    attention: int
    backward: int
    again: int


def unit_flops(model: GPT, *, sequences: int, length: int) -> tuple[UnitFlops, ...]:
    """Of each unit of `model` (embedding, blocks, head), for `sequences` of `length` tokens.

    Of a model that is cut over ranks it is this rank's part: `model.layout` says what that is.
    """
    slots, rows, last = model.layout.slots, sequences * length, model.config.layers + 1
    made: list[UnitFlops] = []
    for number, name in enumerate(model.unit_names):
        shapes = {slots[index].name: slots[index].shape for index in model.unit_parameters(number)}
        linear = sum(
            2 * rows * shape[0] * shape[1]
            for one, shape in shapes.items()
            if len(shape) == 2 and (number == last or one not in TABLES)
        )
        packed = shapes.get(f"{name}.attn.qkv.weight", (0, 0))[1]
        product = 2 * sequences * (length * (length + 1) // 2) * (packed // 3)
        made.append(
            UnitFlops(
                name=name,
                forward=linear + 2 * product,
                attention=2 * product,
                backward=2 * linear + 4 * product,
                again=product,
            )
        )
    return tuple(made)
