"""A simulated training job under the one commit machine: the scenario behind its tests and seed hunts.

Each rank is the production machine with the production rules of epochs, wishes and records, over a model of
memory: slots that peers can read, also after the owner's death. The mesh, the way in which the state is kept
(replicas, buddies, files, memory that outlives its rank) and the hosts are the seed's choice. The node runs
the job as the only one of a cluster of one node (`zbmd.collectives.scenarios.node`): it restarts the dead, or
shrinks the group.

Checked after every event: a committed version has the one content that it may have, and survives the loss of
any one rank; a slot that somebody reads does not change; what is known to be committed only grows; every
committed step is logged once, with each of its samples once; a wish is acted on by all ranks at the same
version; corrupted memory ends the run, and the ranks are named. Once the kills stop, every rank must finish.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from zbmd.actors.view import RANKS_MAX
from zbmd.collectives.scenarios.hosted_job import (
    LATE_SHARE,
    SHRINK_SHARE,
    SLOW_NS,
    JobScenario,
    Message,
    add_processes,
    names_of,
)
from zbmd.collectives.scenarios.node import NodeProcess, draw_conditions
from zbmd.training.job.mesh import AXES, SHARDED_AXIS
from zbmd.training.redundancy.interface import Wish
from zbmd.training.redundancy.machine import Mirror
from zbmd.training.scenarios.rank import RankProcess
from zbmd.training.scenarios.world import Asked, CommitOptions, CommitWorld, ContentsOf, HashChain
from zbmd.transport import sim

CORRUPTING_SHARE = 0.1
"""The share of runs with bad memory."""
DATA_ONLY_SHARE = 0.4
"""The share of runs on a mesh of `dp` alone, whose groups can shrink and grow."""
SHARDED_SHARE = 0.25
FILES_SHARE = 0.15
KEPT_SHARE = 0.3
SAVING_SHARE = 0.2
HOSTS_SHARE = 0.4
TALKS_SHARE = 0.2
RESUMED_SHARE = 0.2
SIGNALS_SHARE = 0.3
SIGNALS_MAX = 2
STOP_SHARE = 0.3


def draw_options(
    rng: random.Random, options: sim.Options, meshes: float = 1 - DATA_ONLY_SHARE
) -> CommitOptions:
    """Draw a job of that size. `meshes`: the share of those with other axes than `dp`."""
    ranks = min(options.ranks, RANKS_MAX)
    mesh = _draw_mesh(rng, ranks) if rng.random() < meshes else ""
    signals = rng.randint(1, SIGNALS_MAX) if rng.random() < SIGNALS_SHARE else 0
    span_ns = (options.length + 1) * SLOW_NS
    return CommitOptions(
        world_size=ranks,
        steps=options.length,
        shrink=rng.random() < SHRINK_SHARE,
        late=rng.random() < LATE_SHARE,
        mesh=mesh,
        per_host=rng.randint(1, ranks) if rng.random() < HOSTS_SHARE else 0,
        sharded=rng.random() < SHARDED_SHARE and SHARDED_AXIS not in mesh,
        files=rng.random() < FILES_SHARE,
        talks=rng.random() < TALKS_SHARE,
        corrupting=rng.random() < CORRUPTING_SHARE,
        first=rng.randint(1, 5) if rng.random() < RESUMED_SHARE else 0,
        asked=tuple(
            Asked(
                rank=rng.randrange(ranks),
                after_ns=rng.randrange(span_ns),
                wish=Wish.SAVE | Wish.STOP if rng.random() < STOP_SHARE else Wish.SAVE,
            )
            for _ in range(signals)
        ),
        kept=rng.random() < KEPT_SHARE,
        saving=rng.random() < SAVING_SHARE,
    )


def _draw_mesh(rng: random.Random, ranks: int) -> str:
    """Draw a mesh of `dp`, `fsdp`, `pp` and `tp`, or without one of them, in any order."""
    axes = list(AXES)
    del axes[rng.randrange(1, len(axes))]
    rng.shuffle(axes)
    sizes: list[str] = []
    for axis in axes:
        size = rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        size = ranks if len(sizes) == len(axes) - 1 else size
        sizes.append(f"{axis}={size}")
        ranks //= size
    return ",".join(sizes)


def build(
    seed: int | str,
    options: CommitOptions,
    contents: ContentsOf = HashChain,
    mirror: type[Mirror] = Mirror,
) -> tuple[sim.Simulation[Message], CommitWorld]:
    """The simulation of one job, without its kills."""
    conditions = draw_conditions(random.Random(f"{seed}/conditions"))
    simulation = sim.Simulation[Message](seed, conditions=conditions)
    world = CommitWorld(options, contents(simulation), mirror=mirror)
    world.lives = add_processes(
        simulation,
        options.world_size,
        lambda _: NodeProcess(world, simulation.rng("regroups"), simulation.rng("late")),
        partial(RankProcess, world),
    )

    def ledger() -> None:
        if (
            world.finished
            and not world.is_over
            and not any(map(simulation.lives, names_of(options.world_size)))
        ):
            world.check_ledger()

    simulation.add_checker("ledger", ledger)
    return simulation, world


@dataclass(frozen=True)
class CommitScenario(JobScenario[CommitOptions, CommitWorld]):
    """The commit machine and a node's, with a hash chain for a job. `length` counts steps."""

    name: str = "commit"
    description: str = "steps of a training job, on any mesh: kills between any two moves, replace or shrink"
    mirror: type[Mirror] = Mirror

    def contents(self, seed: int | str, options: CommitOptions) -> ContentsOf:
        """Return the maker of what the job computes; a subclass's choice."""
        return HashChain

    def options_of(self, seed: int | str, options: sim.Options) -> CommitOptions:
        """See `JobScenario`."""
        return draw_options(random.Random(f"{seed}/options"), options)

    def made(self, seed: int | str, job: CommitOptions) -> tuple[sim.Simulation[Message], CommitWorld]:
        """See `JobScenario`."""
        return build(seed, job, self.contents(seed, job), self.mirror)

    def rehearsed(self, seed: int | str, job: CommitOptions) -> sim.Simulation[Message]:
        """See `JobScenario`. Of a hash chain, whatever the contents are."""
        return build(seed, job)[0]

    def is_over(self, simulation: sim.Simulation[Message], world: CommitWorld) -> bool:
        """Return whether the run has ended as it may: all have finished, or the state was truly lost.

        So it is, too, once corrupted memory was noticed: the rank says so and ends, and a user has to look.
        With a group that shrinks, a rank that was lost stays away; one that is not lost finishes.
        """
        if world.is_over:
            return True
        size = world.options.world_size
        if any(simulation.lives(f"rank{rank}") for rank in range(size)):
            return False
        return bool(world.finished) if world.options.shrink else len(world.finished) == size
