"""The scenarios that `zbmd sim` knows, the sizes at which a hunt tries them, and how a run of one is made."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NoReturn, Protocol, runtime_checkable

import structlog
from structlog.typing import EventDict

from zbmd.actors.simulated.jobs_scenario import JobsScenario
from zbmd.actors.simulated.links_scenario import LinksScenario
from zbmd.actors.simulated.membership_scenario import MembershipScenario
from zbmd.actors.simulated.scenario import ActorsScenario
from zbmd.actors.simulated.spares_scenario import SparesScenario
from zbmd.actors.simulated.supervision_scenario import SupervisionScenario
from zbmd.collectives.scenarios.collectives import CollectivesScenario
from zbmd.collectives.scenarios.repair import RepairScenario
from zbmd.collectives.scenarios.subgroups import SubgroupsScenario
from zbmd.training.scenarios.commit import CommitScenario
from zbmd.training.scenarios.left_loop import LeftScenario
from zbmd.training.scenarios.loop import LoopScenario
from zbmd.training.scenarios.sharded_loop import HybridScenario, ShardScenario
from zbmd.training.scenarios.training import TrainingScenario
from zbmd.transport.errors import UserError
from zbmd.transport.sim import FaultPlan, Options, Scenario, ScenarioReport, run_scenario


@runtime_checkable
class DrawsItsPlan(Protocol):
    """A scenario that knows better than chance where its faults should strike."""

    def draw_plan(self, seed: int | str, options: Options) -> FaultPlan:
        """`options.faults` faults, all from the seed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HuntedScenario:
    """A scenario, and what a hunt draws its options from; what stands there twice is drawn twice as often.

    Small runs are tried most: most rules meet where a run begins, where it ends, and among two or three.
    """

    make: Callable[[], Scenario]
    ranks: Sequence[int]
    lengths: Sequence[int]
    faults: Sequence[int] = (0, 1, 1, 1, 1, 2, 2, 3, 6)

    def draw(self, seed: int) -> Options:
        """The options that a hunt tries with this seed."""
        rng = random.Random(f"{seed}/sizes")
        ranks, length = rng.choice(self.ranks), rng.choice(self.lengths)
        return Options(ranks=ranks, length=length, faults=rng.choice(self.faults))


SCENARIOS: Mapping[str, HuntedScenario] = MappingProxyType(
    {
        "commit": HuntedScenario(
            make=CommitScenario, ranks=(1, 2, 2, 3, 3, 4, 4, 4, 6, 8), lengths=(1, 1, 1, 2, 2, 3, 6)
        ),
        "supervision": HuntedScenario(
            make=SupervisionScenario, ranks=(1, 1, 1, 2, 2, 3), lengths=(1, 2, 4, 8, 16)
        ),
        "links": HuntedScenario(make=LinksScenario, ranks=(2, 2, 2, 3, 3, 4), lengths=(2, 4, 8, 16)),
        "actors": HuntedScenario(
            make=ActorsScenario, ranks=(1, 2, 2, 3, 3, 3, 4, 5), lengths=(1, 1, 2, 3, 6)
        ),
        "membership": HuntedScenario(
            make=MembershipScenario,
            ranks=(1, 2, 2, 3, 3, 3, 3, 4, 5, 5, 7, 11),
            lengths=(1, 1, 2, 3, 6),
        ),
        "jobs": HuntedScenario(make=JobsScenario, ranks=(1, 2, 2, 3, 3, 3, 4, 5, 7), lengths=(1, 1, 2, 3, 6)),
        "spares": HuntedScenario(make=SparesScenario, ranks=(1, 2, 2, 3, 4), lengths=(1, 1, 2, 3, 6)),
        "training": HuntedScenario(
            make=TrainingScenario, ranks=(1, 2, 2, 3, 3, 4), lengths=(1, 1, 1, 2, 2, 3, 6)
        ),
        "loop": HuntedScenario(make=LoopScenario, ranks=(1, 2, 2, 3, 3, 4, 5), lengths=(1, 1, 2, 3, 6)),
        "shards": HuntedScenario(make=ShardScenario, ranks=(1, 2, 2, 3, 3, 4, 5), lengths=(1, 1, 2, 3, 6)),
        "left": HuntedScenario(make=LeftScenario, ranks=(2, 2, 3, 3, 4, 5), lengths=(1, 2, 3, 6)),
        "hybrid": HuntedScenario(make=HybridScenario, ranks=(2, 2, 2, 2, 4, 4, 6), lengths=(1, 2, 3, 6)),
        "repair": HuntedScenario(
            make=RepairScenario, ranks=(1, 2, 2, 3, 3, 4, 5), lengths=(1, 1, 1, 2, 3, 6)
        ),
        "parts": HuntedScenario(make=SubgroupsScenario, ranks=(1, 2, 3, 3, 3, 4, 4, 5), lengths=(1, 1, 2, 3)),
        "collectives": HuntedScenario(
            make=CollectivesScenario, ranks=(1, 2, 2, 3, 3, 4, 5, 6), lengths=(1, 1, 2, 3, 8)
        ),
    }
)


def _drop(logger: object, method: str, event: EventDict) -> NoReturn:
    raise structlog.DropEvent


@contextmanager
def quietly() -> Generator[None]:
    """Drop what the simulated would log: in a hunt they fail by the thousand, on purpose."""
    before, configured = structlog.get_config(), structlog.is_configured()
    structlog.configure(processors=[_drop])
    try:
        with warnings.catch_warnings():
            # A world that is thrown away has tasks that never ran.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        if configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


@cache
def scenario_named(name: str) -> Scenario:
    """The scenario of that name. Raises `UserError` if there is none."""
    entry = SCENARIOS.get(name)
    if entry is None:
        raise UserError(f'there is no scenario "{name}": choose from {", ".join(SCENARIOS)}.')
    return entry.make()


def plan_of(scenario: Scenario, seed: int | str, options: Options) -> FaultPlan | None:
    """The plan that the scenario itself draws; None if it leaves that to the frame."""
    return scenario.draw_plan(seed, options) if isinstance(scenario, DrawsItsPlan) else None


def run_once(scenario: Scenario, seed: int | str, options: Options) -> ScenarioReport:
    """Run one seed under the faults that it draws."""
    return run_scenario(scenario, seed, options, plan_of(scenario, seed, options), tell=None)
