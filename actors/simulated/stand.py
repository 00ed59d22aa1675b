"""What outlives all simulated nodes: their world, their cluster, and the ledgers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from zbmd.actors.core.scopes import owned_name
from zbmd.actors.simulated.ledgers import Groups, Life, Lives, Names, Nodes, Talks, Ties, Upgrades
from zbmd.actors.simulated.membership_scenario import Cluster
from zbmd.actors.simulated.node import SimNode
from zbmd.actors.simulated.supervision_scenario import Board, TreePlan
from zbmd.transport.sim import SimProcess, World, current_process

HOST: Final = "node1"
"""The node that all sessions are in by, which founds the cluster and is never lost."""
GUESTS: Final = tuple(owned_name(f"session-{number}", HOST) for number in (1, 2))
ERRAND: Final = "errand"
"""The worker of each session."""


@dataclass(slots=True)
class Stand(Board):
    """See the module. plans: the tree of each node; torment_until_ns: when faults and changes end."""

    cluster: Cluster = field(kw_only=True)
    plans: dict[str, TreePlan] = field(default_factory=dict[str, TreePlan])
    torment_until_ns: int = 0
    ports: dict[str, SimNode] = field(default_factory=dict[str, SimNode])
    asks: dict[int, tuple[SimProcess, int, str]] = field(
        default_factory=dict[int, tuple[SimProcess, int, str]]
    )
    next_ask: int = 0
    answered: dict[tuple[Life, Life], int] = field(default_factory=dict[tuple[Life, Life], int])
    """When one node had its last answer from another, ns."""
    guests: dict[str, int] = field(default_factory=dict[str, int])
    """Sessions that have got in, and which life of each."""
    nodes: Nodes = field(init=False)
    lives: Lives = field(init=False)
    talks: Talks = field(init=False)
    names: Names = field(init=False)
    groups: Groups = field(init=False)
    ties: Ties = field(init=False)
    upgrades: Upgrades = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.world)
        self.lives = Lives(self.nodes)
        self.talks = Talks(self.lives)
        self.names = Names(self.nodes, self.lives)
        self.groups = Groups(self.nodes, self.lives)
        self.ties = Ties(self.lives)
        self.upgrades = Upgrades(self.nodes)

    def guests_in(self) -> list[Life]:
        """The sessions that live, and have got in."""
        return [life for life in self.guests.items() if self.nodes.lives(life)]

    @property
    def tormented(self) -> bool:
        """Whether faults strike, and anybody changes anything."""
        return self.world.now_ns < self.torment_until_ns


class StandWorld(World):
    """A world in which actors find the stand; their arguments may have come over a link."""

    stand: Stand


def here() -> tuple[SimProcess, Stand]:
    """The process that runs, and the stand of its world."""
    process = current_process()
    assert isinstance(process, SimProcess) and isinstance(process.world, StandWorld)
    return process, process.world.stand
