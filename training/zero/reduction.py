"""Gradients whose state is sharded: their sum over all ranks that divide the data, and their norm.

The ranks that share one state scatter and fold their partial sums: each then has the sum of their logical
shards, of its part. Where other ranks hold the same shard, along `dp`, these sums are all-reduced among them.
Both follow one tree over all logical shards, so the bits do not depend on how the mesh divides them. (Hybrid
sharding: Y. Zhao and others, "PyTorch FSDP", 2023, arXiv:2304.11277, section 3.2.2.)

The norm has the bits of that of a whole gradient: without tensor parallelism those of `global_norm` over the
flat array of the whole model, and with it those of the sum over parameters, and of each over the ranks along
`tp`: on a mesh with sharded state as on one without.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, Node, assign_shards
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.training.autograd.array_module import Array
from zbmd.training.job.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh, MeshGroups
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import PartOfGPT, cut_of
from zbmd.training.optim.clip import (
    Pieces,
    Squared,
    norm_from,
    pieces_length,
    pieces_of,
    squared,
    squares_from,
)
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.step.reduction import ShardSum, all_reduce_partials, state_sums
from zbmd.training.zero.layout import ShardLayout, shards_of
from zbmd.transport.errors import LocalProtocolError

FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


class ShardedReduction:
    """The reductions of one view, over `groups`, of gradients that `shards` logical shards add up to.

    assignment: the shards of each place among those that divide the data; empty: even ones. sums: what the
    ranks that share this rank's state hold of the shards, and how they add them up.
    """

    def __init__(self, groups: MeshGroups, shards: int, assignment: Assignment = ()) -> None:
        mesh = groups.mesh
        if groups.sharding is None:
            raise LocalProtocolError("a state is sharded along an axis: the mesh needs a group there")
        self._sharding, self._replicas = groups.sharding, groups.replicas
        states = mesh.size(DATA_AXIS) if mesh.has_shards_alike else 1
        place = groups.place(DATA_AXIS) if mesh.has_shards_alike else 0
        every = state_sums(shards, assignment or assign_shards(shards, mesh.data_ranks), states)
        self.sums = every[place]
        of_states = tuple((sums.ranges[0][0], sums.ranges[-1][1]) for sums in every)
        self._among_replicas = ShardSum.over(shards, of_states)

    @property
    def has_replicas(self) -> bool:
        """Return whether other ranks hold the same shard, so that `submit` needs room for the sum."""
        return self._replicas is not None

    def submit(self, sent: Sequence[Array], received: Sequence[Array], out: Array | None) -> Future[Array]:
        """Return the future sum of all shards, of this rank's part: (part,).

        sent: this rank's partial sums, (ranks, part); received: as much room; out: (part,), with replicas.
        The arrays are in use until the future is done.
        """
        sharding, replicas, sums = self._sharding, self._replicas, self.sums
        end_ns = sharding.deadline_ns()

        def scattered(communicator: Communicator) -> dict[Node, Array]:
            for array, into in zip(sent, received, strict=True):
                communicator.all_to_all(array, into, deadline_ns=end_ns)
            return sums.fold(received)

        def alone(communicator: Communicator) -> Array:
            (total,) = scattered(communicator).values()
            return total

        if replicas is None:
            return sharding.submit(alone)
        assert out is not None, "the sum of several has room of its own"
        among, total = self._among_replicas, out

        def all_reduced(partials: dict[Node, Array]) -> Future[Array]:
            return replicas.submit(
                lambda c: all_reduce_partials(c, partials, total, among, deadline_ns=end_ns)
            )

        return _then(sharding.submit(scattered), all_reduced)


def _then(first: Future[FirstT], begin: Callable[[FirstT], Future[SecondT]]) -> Future[SecondT]:
    """Return the end of what `begin` starts with the result of `first`, or the failure of either."""
    ended: Future[SecondT] = Future()

    def second_done(second: Future[SecondT]) -> None:
        if not _failed(second, ended):
            ended.set_result(second.result())

    def first_done(done: Future[FirstT]) -> None:
        if _failed(done, ended):
            return
        try:
            second = begin(done.result())
        except BaseException as error:  # noqa: BLE001 -- who waits for the end gets it
            ended.set_exception(error)
        else:
            second.add_done_callback(second_done)

    first.add_done_callback(first_done)
    return ended


def _failed(done: Future[FirstT], ended: Future[SecondT]) -> bool:
    """Pass a failure on; return whether it was one."""
    if done.cancelled():
        ended.cancel()
        return True
    error = done.exception()
    if error is not None:
        ended.set_exception(error)
    return error is not None


_FLOAT32: np.dtype[np.floating] = np.dtype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements of the gradient in one rank's shard: `at` of its part of `unit`.

    They are the elements `span` of the array that `parameter` and `slice_` name: with tensor parallelism a
    rank's slice of a parameter, without it the whole model. size: of that array, if it is known.
    """

    unit: int
    at: slice
    span: slice
    parameter: int = 0
    slice_: int = 0
    size: int = sys.maxsize

    @property
    def length(self) -> int:
        """Return how many numbers stand for it."""
        return pieces_length(self.span, size=self.size)


class ShardedNorm:
    """The norm over all ranks of `mesh`, on which the stages of `model` have the layers `cuts`.

    `model` is any rank's part along `tp`. Ranks exchange `pieces`, of which `lengths` are the lengths.
    """

    def __init__(self, mesh: Mesh, model: GPT, cuts: Sequence[range], *, square: Squared = squared) -> None:
        self._square = square
        self._mesh, parts = mesh, mesh.size(TENSOR_AXIS)
        models = [PartOfGPT(model.config, part, parts) for part in range(parts)] if parts > 1 else [model]
        order = {slot.name: index for index, slot in enumerate(model.layout.slots)}
        stages, ranks = mesh.size(PIPELINE_AXIS), mesh.size(mesh.sharded_axis)
        held = {
            (stage, part): OwnParts(one, cuts, stages=stages, stage=stage)
            for stage in range(stages)
            for part, one in enumerate(models)
        }
        layouts = {place: shards_of(own, ranks) for place, own in held.items()}
        self.runs: list[list[Run]] = []
        """Of each rank, in the order of its pieces."""
        for rank in range(mesh.world_size):
            here = mesh.coordinates(rank)
            place, part = here.get(mesh.sharded_axis, 0), here.get(TENSOR_AXIS, 0)
            if mesh.has_shards_alike and here.get(DATA_AXIS, 0):  # the first of equal shards counts
                self.runs.append([])
                continue
            own = held[here.get(PIPELINE_AXIS, 0), part]
            shards = layouts[own.stage, part]
            found = (
                _runs_of_model(own, shards, place)
                if parts == 1
                else _runs_of_slices(shards, place, part, order)
            )
            self.runs.append(list(found))
        self.lengths = [sum(run.length for run in runs) for runs in self.runs]

    def pieces(self, rank: int, gradients: Sequence[Array]) -> Pieces:
        """Return what other ranks need of `rank`, from its parts of the gradients of units."""
        made = [pieces_of(gradients[run.unit][run.at], run.span, size=run.size) for run in self.runs[rank]]
        return np.concatenate([np.zeros(0), *made])

    def norm(self, every: Sequence[Pieces]) -> float:
        """Return the norm from the pieces of all ranks. Raises `TrainingDiverged` if it is not finite."""
        found: dict[int, dict[int, list[tuple[Run, Pieces]]]] = defaultdict(lambda: defaultdict(list))
        for _, run, values in self._told(every):
            found[run.parameter][run.slice_].append((run, values))
        total = 0.0
        for _, slices in sorted(found.items()):
            squares = 0.0
            for _, runs in sorted(slices.items()):
                runs.sort(key=lambda one: one[0].span.start)
                told = [(run.span, values) for run, values in runs]
                squares += squares_from(told, _FLOAT32, size=runs[0][0].size, square=self._square)
            total += squares
        return norm_from(total)

    def not_finite(self, every: Sequence[Pieces]) -> tuple[int, int, int] | None:
        """Return stage, unit and rank of the first gradient, as the backward pass goes, that is not finite.

        `every`: the pieces of all ranks; the rank is one that sums it. None if every piece is finite, and
        their sum alone is too large.
        """
        seen = [
            (self._mesh.coordinates(rank).get(PIPELINE_AXIS, 0), run.unit, rank)
            for rank, run, values in self._told(every)
            if not np.isfinite(values).all()
        ]
        return max(seen, key=lambda one: (one[0], one[1], -one[2]), default=None)

    def _told(self, every: Sequence[Pieces]) -> Iterator[tuple[int, Run, Pieces]]:
        for rank, (runs, pieces) in enumerate(zip(self.runs, every, strict=True)):
            at = 0
            for run in runs:
                yield rank, run, pieces[at : at + run.length]
                at += run.length


def _runs_of_model(own: OwnParts, shards: ShardLayout, place: int) -> Iterator[Run]:
    """Yield the runs of a rank in the flat array of the whole model."""
    for number, unit in enumerate(shards.units):
        held = unit.of_rank(place)
        for part, span in own.spans.items():
            start, stop = max(held.start, span.start), min(held.stop, span.stop)
            if start < stop:
                moved = own.every[part].span.start - span.start
                at = slice(start - held.start, stop - held.start)
                yield Run(unit=number, at=at, span=slice(start + moved, stop + moved))


def _runs_of_slices(shards: ShardLayout, place: int, part: int, order: dict[str, int]) -> Iterator[Run]:
    """Yield the runs of a rank in its slices of parameters; what is whole on all ranks counts once."""
    for number, unit in enumerate(shards.units):
        held = unit.of_rank(place)
        for slot in shards.layout.slots[unit.parameters]:
            cut = unit.cut_of(slot, place)
            if cut is not None and (part == 0 or cut_of(slot.name)[1]):
                start = slot.offset + cut.start - held.start
                yield Run(
                    unit=number,
                    at=slice(start, start + cut.stop - cut.start),
                    span=slice(cut.start, cut.stop),
                    parameter=order[slot.name],
                    slice_=part,
                    size=slot.size,
                )
