"""A mesh of ranks: named axes such as `dp × fsdp × pp × tp`, coordinates, and the groups along them.

Ranks along `dp` and `fsdp` divide the data. A state is sharded along `fsdp`, or along `dp` in a mesh without
`fsdp`; ranks that differ only in their place along `dp` beside `fsdp` hold the same shard.

Ranks are numbered with the last axis running fastest, so ranks that differ only in it are neighbours: put the
axis with most traffic last (`tp`), the one with least first (`dp`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import ParallelGPT
from zbmd.transport.errors import LocalProtocolError, PeerLost, UserError


class WrongWorldSize(UserError):
    """The job has another number of ranks than what it was asked to do needs."""


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's groups along the axes of a mesh; None for an axis of one rank, unless one was asked for.

    data: the ranks that divide the data, in the order of their places; sharding: those that may share one
    state; replicas: those that hold the same shard of it. In a mesh without `fsdp`, `sharding` is `data`.
    """

    world: Group
    mesh: Mesh
    data: Group | None
    pipeline: Group | None
    tensor: Group | None
    sharding: Group | None
    replicas: Group | None = None

    @classmethod
    async def of(cls, world: Group, mesh: Mesh, *, always: Sequence[str] = ()) -> MeshGroups:
        """Make the groups; called by all members of `world` together. always: axes with one of one rank, too.

        Raises `UserError` for a mesh with other axes than dp, fsdp, pp and tp, or one that does not fit the
        group, and as `Group.subgroup`.
        """
        require_axes(mesh)
        if mesh.world_size != world.size:
            raise WrongWorldSize(f"the mesh {mesh} has {mesh.world_size} ranks, and there are {world.size}.")
        made = dict[tuple[str, ...], Group | None]()
        try:
            wanted = [mesh.data_axes, (PIPELINE_AXIS,), (TENSOR_AXIS,), *((axis,) for axis in mesh.data_axes)]
            for axes in dict.fromkeys(wanted):
                along = [axis for axis in axes if axis in mesh.axes]
                ranks = sorted(mesh.group_of(world.rank, *along), key=mesh.data_place) if along else []
                is_wanted = len(ranks) > 1 or any(axis in always for axis in along)
                made[axes] = await world.subgroup(ranks) if is_wanted else None
        except BaseException:
            for group in made.values():
                if group is not None:
                    await group.close()
            raise
        return cls(
            world,
            mesh,
            data=made[mesh.data_axes],
            pipeline=made[PIPELINE_AXIS,],
            tensor=made[TENSOR_AXIS,],
            sharding=made[mesh.sharded_axis,],
            replicas=made[DATA_AXIS,] if mesh.has_shards_alike else None,
        )

    @classmethod
    def along_data(cls, world: Group) -> MeshGroups:
        """Return those of a mesh of `dp` alone: its group is `world`, and no other is made."""
        mesh = Mesh.of(world.size, {DATA_AXIS: world.size})
        return cls(world, mesh, data=world, pipeline=None, tensor=None, sharding=world)

    @property
    def worker(self) -> Worker:
        """Return the worker of the groups."""
        if self.world.home is None:
            raise LocalProtocolError("MeshGroups needs a group from zbmd.group")
        return self.world.home.worker

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.mesh.size(axis)

    def place(self, axis: str) -> int:
        """Return the coordinate of this rank on an axis."""
        here = self.mesh.coordinates(self.world.rank)
        return here.get(axis, 0)

    @property
    def data_place(self) -> int:
        """Return the place of this rank among those that divide the data."""
        return self.mesh.data_place(self.world.rank)

    def require_members(self) -> None:
        """Raise `PeerLost` if a member is lost."""
        lost = self.worker.segment.lost_mask()
        for member in self.world.members:
            if lost >> member & 1:
                raise PeerLost(member, "wait for the next view, and go on from what all hold")

    def give_up(self) -> None:
        """End running operations in all groups, and notify their members: a lost rank is only in some of
        them.

        Returns once they are drained. Ranks that wait for this rank, now or later, get an abort.
        """
        groups = self.every
        for group in groups:
            group.abort()
        for group in groups:
            group.give_up()

    async def close(self) -> None:
        """Close the groups, except the world's."""
        for group in self.every:
            if group is not self.world:
                await group.close()

    @property
    def every(self) -> list[Group]:
        """Return all groups, each once, the world's first."""
        found = (self.world, self.data, self.pipeline, self.tensor, self.sharding, self.replicas)
        return list({id(group): group for group in found if group is not None}.values())

    def model(self, config: GPTConfig, *, xp: ModuleType = np, recompute: bool = False) -> GPT:
        """Return this rank's part of the model, of all stages. xp: what it computes with."""
        if self.tensor is None:
            return GPT(config, xp=xp, recompute=recompute)
        return ParallelGPT(config, self.tensor, xp=xp, recompute=recompute)


DATA_AXIS, SHARDED_AXIS, PIPELINE_AXIS, TENSOR_AXIS = "dp", "fsdp", "pp", "tp"
AXES = (DATA_AXIS, SHARDED_AXIS, PIPELINE_AXIS, TENSOR_AXIS)


def require_axes(mesh: Mesh) -> None:
    """Raise `UserError` for an unknown axis."""
    strange = [axis for axis in mesh.axes if axis not in AXES]
    if strange:
        raise UserError(
            f"unknown mesh axis {', '.join(strange)}; valid axes: dp, fsdp, pp, tp (data parallelism with "
            "whole and with sharded states, pipeline and tensor parallelism)."
        )


AXES_MAX = 8
_AXIS = re.compile(r"([a-z][a-z0-9_]{0,15})=([0-9]{1,9}|-1)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes. Make one with `Mesh.of` or `Mesh.parse`."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, world_size: int, sizes: Mapping[str, int]) -> Mesh:
        """Return the mesh of `world_size` ranks with these axes, in order; one size may be -1, to infer it.

        Raises `UserError` if it does not have all ranks.
        """
        if not 1 <= len(sizes) <= AXES_MAX:
            raise UserError(f"a mesh has 1 to {AXES_MAX} axes, not {len(sizes)}.")
        wrong = {name: size for name, size in sizes.items() if size < 1 and size != -1}
        if wrong:
            name, size = next(iter(wrong.items()))
            raise UserError(
                f"the mesh's axis {name} has size {size}: it must be at least 1, or -1 to infer it."
            )
        open_axes = [name for name, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise UserError(
                f"the mesh's axes {' and '.join(open_axes)} are both -1: only one size can be inferred."
            )
        given = math.prod(size for size in sizes.values() if size != -1)
        if open_axes:
            if world_size % given:
                raise WrongWorldSize(
                    f"{_spelled(sizes)} does not divide {world_size} ranks: start a multiple of {given} "
                    f"of them, such as {_next_multiple(world_size, given)}."
                )
            sizes = {**sizes, open_axes[0]: world_size // given}
        elif given != world_size:
            raise WrongWorldSize(
                f"a mesh of {_spelled(sizes)} has {given} ranks, and there are {world_size}: start {given} "
                "of them, or change a size (-1 infers it)."
            )
        return cls(tuple(sizes), tuple(sizes.values()))

    @classmethod
    def parse(cls, text: str, world_size: int) -> Mesh:
        """Parse a mesh such as `dp=2,pp=2,tp=2`. Raises `UserError`."""
        sizes: dict[str, int] = {}
        for word in text.split(","):
            found = _AXIS.fullmatch(word.strip())
            if found is None or found[1] in sizes:
                why = "comes twice" if found is not None else "is not an axis"
                raise UserError(f'the mesh "{text}": "{word.strip()}" {why}; write it as dp=2,pp=2,tp=2.')
            sizes[found[1]] = int(found[2])
        return cls.of(world_size, sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 1 for an axis that the mesh does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis. Raises `UserError` beyond the mesh."""
        if not 0 <= rank < self.world_size:
            raise UserError(f"rank {rank} is not in the mesh {self} of {self.world_size} ranks.")
        found: dict[str, int] = {}
        for name, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates, one for each axis. Raises `UserError` if there is none."""
        if set(coordinates) != set(self.axes):
            raise UserError(
                f"the mesh {self} has the axes {', '.join(self.axes)}: give a coordinate on each."
            )
        rank = 0
        for name, size in zip(self.axes, self.sizes, strict=True):
            if not 0 <= coordinates[name] < size:
                raise UserError(f"coordinate {coordinates[name]} is not on axis {name} of the mesh {self}.")
            rank = rank * size + coordinates[name]
        return rank

    def groups(self, *along: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that differ only in the axes `along`, group by group, each in rank order.

        Every rank is in exactly one. Raises `UserError` for an axis that the mesh does not have.
        """
        for axis in along:
            if axis not in self.axes:
                raise UserError(f"the mesh {self} has no axis {axis}: it has {', '.join(self.axes)}.")
        others = [axis for axis in self.axes if axis not in along]
        inside = [axis for axis in self.axes if axis in along]
        return tuple(
            tuple(self.rank({**fixed, **free}) for free in self._places(inside))
            for fixed in self._places(others)
        )

    def group_of(self, rank: int, *along: str) -> tuple[int, ...]:
        """Return the group of `groups(*along)` that `rank` is in."""
        self.coordinates(rank)
        return next(group for group in self.groups(*along) if rank in group)

    @property
    def has_shards_alike(self) -> bool:
        """Return whether the state is sharded along an axis of its own, beside `dp`."""
        return SHARDED_AXIS in self.axes

    @property
    def sharded_axis(self) -> str:
        """Return the axis along which a state is sharded, if it is."""
        return SHARDED_AXIS if self.has_shards_alike else DATA_AXIS

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Return the axes along which the data is divided, `dp` first."""
        return (DATA_AXIS, SHARDED_AXIS) if self.has_shards_alike else (DATA_AXIS,)

    @property
    def data_ranks(self) -> int:
        """Return how many ranks divide the data."""
        return math.prod(map(self.size, self.data_axes))

    def with_data_axis(self) -> Mesh:
        """Return this mesh with `fsdp` called `dp`, if it has no `dp`: the same ranks hold the same."""
        if DATA_AXIS in self.axes:
            return self
        return Mesh(tuple(DATA_AXIS if axis == SHARDED_AXIS else axis for axis in self.axes), self.sizes)

    def data_place(self, rank: int) -> int:
        """Return the place of `rank` among those that divide the data: neighbours share a state."""
        here, place = self.coordinates(rank), 0
        for axis in self.data_axes:
            place = place * self.size(axis) + here.get(axis, 0)
        return place

    def state_keys(self) -> tuple[int, ...]:
        """Return a number for each rank: equal where ranks differ only along `dp`, which hold one state."""
        groups = enumerate(self.with_one_state())
        keys = {rank: key for key, group in groups for rank in group}
        return tuple(keys[rank] for rank in range(self.world_size))

    def along_data(self, ranks: int) -> Mesh:
        """Return the same mesh with so many ranks along `dp`."""
        sizes = (
            ranks if axis == DATA_AXIS else size for axis, size in zip(self.axes, self.sizes, strict=True)
        )
        return Mesh(self.axes, tuple(sizes))

    def alike(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks that hold the state of `rank` in the mesh with `ranks` ranks in all.

        Its other axes are as here. In the order of their places along `dp`.
        """
        size = ranks * self.size(DATA_AXIS) // self.world_size
        here, other = self.coordinates(rank), self.along_data(size)
        return tuple(other.rank({**here, DATA_AXIS: place}) for place in range(size))

    def replica(self, rank: int, ranks: int) -> int:
        """Return one of `alike`: ranks that hold one state here spread over all that hold it there."""
        alike = self.alike(rank, ranks)
        return alike[self.coordinates(rank).get(DATA_AXIS, 0) % len(alike)]

    def among(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks`, ascending, that are a mesh of this kind with fewer ranks along `dp`.

        Each holds there the state that it holds here. None, if they hold no state wholly.
        """
        keys = self.state_keys()
        for size in range(self.size(DATA_AXIS), 0, -1):
            wanted, found = self.along_data(size).state_keys(), list[int]()
            for rank in sorted(ranks):
                if len(found) < len(wanted) and keys[rank] == wanted[len(found)]:
                    found.append(rank)
            if len(found) == len(wanted):
                return tuple(found)
        return ()

    def has_replicas(self, ranks_per_host: int) -> bool:
        """Return whether each state is on several ranks and, if the mesh is, on several hosts.

        Hosts have `ranks_per_host` consecutive ranks.
        """
        hosts = [{rank // ranks_per_host for rank in group} for group in self.with_one_state()]
        one_host = self.world_size <= ranks_per_host
        return self.size(DATA_AXIS) > 1 and (one_host or all(len(where) > 1 for where in hosts))

    def with_one_state(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that hold the same, for each state."""
        return self.groups(*(axis for axis in self.axes if axis == DATA_AXIS))

    def _places(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        for places in product(*(range(self.size(axis)) for axis in axes)):
            yield dict(zip(axes, places, strict=True))


def _spelled(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {'?' if size == -1 else size}" for name, size in sizes.items())


def _next_multiple(count: int, of: int) -> int:
    return -(-count // of) * of
