"""Update a state that may lie in a file, run by run: load what is needed, and page it out afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot, padded
from zbmd.training.optim import (
    HeldMatrices,
    OptimizerConfig,
    arrays_of,
    optimizer_for,
    whole_parameters,
)
from zbmd.training.optim.elementwise import AdamWState, Shard, StateArray, slot_blocks
from zbmd.training.redundancy.state_file import StateFile

RUN_ELEMENTS: Final = 1 << 20
"""Parameters that are updated at once if the state is in a file."""


def state_in(state: AdamWState, span: slice) -> AdamWState:
    """Return views of these parameters."""
    return AdamWState(state.weights[span], state.mean[span], state.square[span])


class Paging:
    """Tells `file` which parts of a state, made of `names`, are in use; does nothing without a file."""

    def __init__(self, file: StateFile | None, names: Sequence[StateArray]) -> None:
        self._file, self._names = file, names

    def arrays(self, state: AdamWState) -> list[Array]:
        """Return all arrays of a state, in the order in which it is written."""
        return [getattr(state, name) for name in self._names]

    def bring_in(self, state: AdamWState) -> None:
        """Announce that the state is needed soon."""
        if self._file is not None:
            self._file.will_need(self.arrays(state))

    def let_go(self, old: AdamWState, new: AdamWState) -> None:
        """Note that `new` has been written: add it to the digest, and page both versions out."""
        if self._file is not None:
            self._file.wrote(self.arrays(new))
            self._file.rest([*self.arrays(old), *self.arrays(new)])

    def wrote(self, rest: Array) -> None:
        """Note that the end of a slot has been written, after all runs."""
        if self._file is not None:
            self._file.wrote([rest])


class PagedUpdate:
    """The optimizer of flat arrays of `layout`: run by run if they lie in `file`, otherwise at once.

    The bits are the same. `held` as in `Muon`.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        layout: ParameterLayout,
        file: StateFile | None,
        held: HeldMatrices | None = None,
    ) -> None:
        self.paging = Paging(file, arrays_of(config))
        if file is None:
            self._runs = [slice(0, layout.size)]
            self._optimizers = [optimizer_for(config, layout, held=held)]
            return
        held = HeldMatrices.whole(layout) if held is None else held
        shards = list(_runs_of(layout, whole_parameters(config, layout)))
        self._runs = [span for span, _ in shards]
        self._optimizers = [
            optimizer_for(config, layout, shard=shard, held=held.within(span)) for span, shard in shards
        ]

    def parts_of(self, state: AdamWState) -> Iterator[list[Array]]:
        """Yield views of all of a state, in the order in which `update` writes them."""
        for span in self._runs:
            yield self.paging.arrays(state_in(state, span))

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float,
    ) -> None:
        """Update the state; see `Optimizer`."""
        for number, (span, optimizer) in enumerate(zip(self._runs, self._optimizers, strict=True)):
            for ahead in self._runs[number + 1 : number + 2]:
                self.paging.bring_in(state_in(old, ahead))
            before, behind = state_in(old, span), state_in(new, span)
            optimizer.update(
                before,
                behind,
                grads[span],
                step=step,
                learning_rate=learning_rate,
                grad_scale=grad_scale,
            )
            self.paging.let_go(before, behind)


def _runs_of(layout: ParameterLayout, whole: Sequence[ParameterSlot]) -> Iterator[tuple[slice, Shard]]:
    """Yield runs of at least `RUN_ELEMENTS` parameters, except for the last, and what to update in each.

    No run ends within one of `whole`, which are not in the result: they are updated as a whole.
    """
    begin, held = 0, list[tuple[slice, bool]]()
    for slot in layout.slots:
        for block, decayed in slot_blocks(slot):
            if slot not in whole:
                held.append((slice(block.start - begin, block.stop - begin), decayed))
            at_end = block.stop == slot.offset + padded(slot.size)
            is_long = block.stop - begin >= RUN_ELEMENTS and (at_end or slot not in whole)
            if is_long or block.stop == layout.size:
                yield slice(begin, block.stop), Shard(block.stop - begin, held)
                begin, held = block.stop, []
