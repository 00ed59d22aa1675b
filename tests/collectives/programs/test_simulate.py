"""Programs under random interleavings and kills: right results, or none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation, build, spec_of
from zbmd.collectives.programs.program import Notify, Program, Wait
from zbmd.collectives.programs.simulate import Outcome, Result, Simulation, SimulationError
from zbmd.collectives.scenarios.collectives import draw_case

KINDS = sorted(ALGORITHMS, key=str)


class Case:
    """A request with random inputs, and what every rank must end with."""

    def __init__(self, operation: Operation, algorithm: str, n: int, count: int, seed: int) -> None:
        self.drawn = draw_case(random.Random(seed), n, kind=(operation, algorithm), count=count)
        self.request, self.count, self.buffers = self.drawn.request, self.drawn.count, self.drawn.buffers
        self.expected = self.drawn.expected

    def simulation(
        self, programs: list[Program], seed: int, kills: Mapping[int, int] | None = None
    ) -> Simulation:
        drawn = self.drawn
        return Simulation(
            programs,
            drawn.buffers,
            drawn.count,
            seed=seed,
            kills=kills,
            layout=drawn.layout,
            sent=spec_of(drawn.request).sent,
        )

    def programs(self) -> list[Program]:
        return [build(self.request, rank) for rank in range(self.request.n)]

    def run(self, seed: int, kills: Mapping[int, int] | None = None) -> tuple[list[Result], list[str]]:
        simulation = self.simulation(self.programs(), seed, kills)
        return simulation.run(), simulation.history

    def check_complete(self, results: list[Result]) -> int:
        """Every complete rank has the right bits; return how many there are."""
        complete = [rank for rank, result in enumerate(results) if result.outcome is Outcome.COMPLETE]
        for rank in complete:
            out, expected = results[rank].out, self.expected[rank]
            if expected is not None:
                assert out is not None and out.tobytes() == expected.tobytes(), f"rank {rank} is wrong"
        return len(complete)


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
@given(n=st.integers(1, 5), count=st.integers(0, 23), seed=st.integers(0, 2**32))
def test_every_interleaving_ends_right(
    operation: Operation, algorithm: str, n: int, count: int, seed: int
) -> None:
    case = Case(operation, algorithm, n, count, seed)
    results, _ = case.run(seed)
    assert case.check_complete(results) == n


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
@given(data=st.data(), n=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_kills_never_leave_a_mixed_result(
    operation: Operation, algorithm: str, data: st.DataObject, n: int, seed: int
) -> None:
    victims = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    kills = {victim: data.draw(st.integers(0, 30)) for victim in sorted(victims)}
    case = Case(operation, algorithm, n, 7, seed)
    results, _ = case.run(seed, kills)
    case.check_complete(results)
    for rank, result in enumerate(results):
        assert result.outcome is not Outcome.KILLED or rank in kills


def test_a_kill_can_leave_some_ranks_complete_and_others_not() -> None:
    """Why a step commits by vote: local completion is not global success."""
    mixed = 0
    for seed in range(200):
        case = Case(Operation.ALL_REDUCE, "direct", 3, 7, seed)
        results, _ = case.run(seed, {seed % 3: seed % 25})
        survivors = {result.outcome for result in results} - {Outcome.KILLED}
        mixed += Outcome.COMPLETE in survivors and len(survivors) > 1
    assert mixed


def test_one_seed_one_history() -> None:
    def history() -> list[str]:
        return Case(Operation.ALL_REDUCE, "ring", 3, 9, 5).run(77, {1: 9})[1]

    assert history() == history()


def test_a_deadlock_is_told() -> None:
    case = Case(Operation.ALL_REDUCE, "direct", 2, 4, 1)
    programs = case.programs()
    silent = tuple(i for i in programs[1].instructions if not isinstance(i, Notify))
    simulation = case.simulation([programs[0], replace(programs[1], instructions=silent)], 1)
    with pytest.raises(SimulationError, match="deadlock"):
        simulation.run()


def test_the_simulation_shows_what_a_missing_wait_does() -> None:
    """The same plant that the verifier rejects gives a wrong result in some interleaving."""
    wrong = 0
    for seed in range(60):
        case = Case(Operation.ALL_REDUCE, "direct", 2, 8, 3)
        programs = case.programs()
        hasty = tuple(i for i in programs[0].instructions if not isinstance(i, Wait))
        results = case.simulation([replace(programs[0], instructions=hasty), programs[1]], seed).run()
        right = case.expected[0]
        assert right is not None
        wrong += any(result.out is not None and result.out.tobytes() != right.tobytes() for result in results)
    assert wrong
