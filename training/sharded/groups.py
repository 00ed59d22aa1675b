"""This rank's groups along the axes of a mesh `dp × pp × tp`, and its part of the model."""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.sharded.axes import AXES, require_axes
from zbmd.training.sharded.mesh import Mesh
from zbmd.training.tensor.model import ParallelGPT
from zbmd.transport.errors import LocalProtocolError, UserError


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's groups along the axes of a mesh; None for an axis of one rank."""

    world: Group
    mesh: Mesh
    data: Group | None
    pipeline: Group | None
    tensor: Group | None

    @classmethod
    async def of(cls, world: Group, mesh: Mesh) -> MeshGroups:
        """Make the groups; all members of `world` together.

        Raises `UserError` for a mesh of other axes than dp, pp and tp, or one that does not fit the group,
        and as `Group.subgroup`.
        """
        require_axes(mesh)
        if mesh.world_size != world.size:
            raise UserError(f"the mesh {mesh} has {mesh.world_size} ranks, and there are {world.size}.")
        place, made = world.members.index(world.rank), list[Group | None]()
        try:
            for axis in AXES:
                ranks = [world.members[at] for at in mesh.group_of(place, axis)] if axis in mesh.axes else []
                made.append(await world.subgroup(ranks) if len(ranks) > 1 else None)
        except BaseException:
            for group in made:
                if group is not None:
                    await group.close()
            raise
        return cls(world, mesh, *made)

    @property
    def worker(self) -> Worker:
        """The membership that the groups are of."""
        if self.world.home is None:
            raise LocalProtocolError("a mesh is made of a group from zbmd.group")
        return self.world.home.worker

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.mesh.size(axis)

    def place(self, axis: str) -> int:
        """Where this rank is on an axis."""
        here = self.mesh.coordinates(self.world.members.index(self.world.rank))
        return here.get(axis, 0)

    def give_up(self) -> None:
        """End what is in flight in any of them, and let their members know: a lost rank is in some alone.

        Returns once it has drained. Whoever waits for this rank, now or later, ends as aborted.
        """
        groups = [group for group in (self.world, self.data, self.pipeline, self.tensor) if group is not None]
        for group in groups:
            group.abort()
        for group in groups:
            group.give_up()

    async def close(self) -> None:
        """Close them, not the world's."""
        for group in (self.data, self.pipeline, self.tensor):
            if group is not None:
                await group.close()

    def model(self, config: GPTConfig, *, recompute: bool = False) -> GPT:
        """This rank's part of the model, of all stages."""
        if self.tensor is None:
            return GPT(config, recompute=recompute)
        return ParallelGPT(config, self.tensor, recompute=recompute)
