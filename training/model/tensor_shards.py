"""Divide the parameters of a GPT for tensor parallelism.

Layers that read the residual stream are divided by columns (by heads for attention), those that write to it
by rows, token tables by the vocabulary. Norms, positions, and biases that are added to the residual stream
are whole on all ranks. M. Shoeybi and others, "Megatron-LM", 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import parameter_shapes
from zbmd.transport.errors import UserError

# By the end of a parameter's name: the axis that is cut, and how many matrices lie side by side along it.
_CUTS = {
    "embed.weight": (0, 1),
    "attn.qkv.weight": (1, 3),
    "attn.qkv.bias": (0, 3),
    "attn.proj.weight": (0, 1),
    "mlp.in.weight": (1, 1),
    "mlp.in.bias": (0, 1),
    "mlp.out.weight": (0, 1),
    "head.weight": (1, 1),
}


@dataclass(frozen=True, slots=True)
class TensorShards:
    """The slices of a model's parameters that `parts` ranks hold.

    Raises `UserError` if heads, positions or tokens cannot be divided over so many ranks.
    """

    config: GPTConfig
    parts: int

    def __post_init__(self) -> None:
        for what, count in (("heads", self.config.heads), ("positions", self.config.context)):
            if count % self.parts:
                raise UserError(
                    f"the model's {count} {what} cannot be divided over {self.parts} tensor-parallel ranks: "
                    f"choose a number of {what} that {self.parts} divides, or another tp in the mesh."
                )
        if self.config.vocabulary < self.parts:
            raise UserError(
                f"a vocabulary of {self.config.vocabulary} tokens cannot be divided over {self.parts} ranks."
            )

    @property
    def whole(self) -> ParameterLayout:
        """Return the layout of the whole model."""
        return ParameterLayout.of(parameter_shapes(self.config))

    def layout(self, part: int) -> ParameterLayout:
        """Return the layout of what rank `part` holds."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in parameter_shapes(self.config).items():
            axis, beside = cut_of(name)
            cut = list(shape)
            if beside:
                start, stop = span_of(shape[axis] // beside, part, self.parts)
                cut[axis] = beside * (stop - start)
            shapes[name] = tuple(cut)
        return ParameterLayout.of(shapes)

    def tokens(self, part: int) -> tuple[int, int]:
        """Return the range of tokens whose rows of the tables rank `part` holds."""
        return span_of(self.config.vocabulary, part, self.parts)

    def piece(self, slot: ParameterSlot, part: int) -> ParameterSlice:
        """Return the slice of the whole parameter `slot` that rank `part` holds."""
        axis, beside = cut_of(slot.name)
        if not beside:
            return flat_slice(slot.size, 0, slot.size)
        each = slot.shape[axis] // beside
        outer, inner = beside * prod(slot.shape[:axis]), prod(slot.shape[axis + 1 :])
        return ParameterSlice(outer, each, inner, *span_of(each, part, self.parts))

    def cut(self, flat: Array, part: int) -> Array:
        """Return what rank `part` holds of a whole flat array, (whole.size,): (layout(part).size,), a
        copy."""
        layout = self.layout(part)
        made: Array = np.zeros(layout.size, dtype=flat.dtype)
        for slot, view, whole in zip(layout.slots, layout.views(made), self.whole.views(flat), strict=True):
            view[...] = self._part_of(slot.name, whole, part).reshape(view.shape)
        return made

    def joined(self, flats: Sequence[Array]) -> Array:
        """Return the whole flat array, given what all ranks hold, in order; shared parameters are the first
        one's.
        """
        whole = self.whole
        made: Array = np.zeros(whole.size, dtype=flats[0].dtype)
        views = whole.views(made)
        for part in reversed(range(self.parts)):
            for slot, view, own in zip(whole.slots, views, self.layout(part).views(flats[part]), strict=True):
                target = self._part_of(slot.name, view, part)
                target[...] = own.reshape(target.shape)
        return made

    def _part_of(self, name: str, whole: Array, part: int) -> Array:
        """Return the view of a whole parameter that rank `part` holds, with an extra axis for adjacent
        matrices.
        """
        axis, beside = cut_of(name)
        if not beside:
            return whole
        each = whole.shape[axis] // beside
        apart = whole.reshape(*whole.shape[:axis], beside, each, *whole.shape[axis + 1 :])
        view: Array = apart[(slice(None),) * (axis + 1) + (slice(*span_of(each, part, self.parts)),)]
        return view


def cut_of(name: str) -> tuple[int, int]:
    """Return the axis along which parameter `name` is divided, and the adjacent matrices there; 0: it is
    whole.
    """
    found = (cut for ending, cut in _CUTS.items() if name == ending or name.endswith(f".{ending}"))
    return next(found, (0, 0))


def span_of(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range of `count` items that part `part` has. Ranges differ by one at most."""
    return part * count // parts, (part + 1) * count // parts
