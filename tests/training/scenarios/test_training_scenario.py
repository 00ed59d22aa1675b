"""The training scenario: real bits, real all-reduces, and an oracle that is the plain job."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.programs.simulate import Outcome as End
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.scenarios.commit import build
from zbmd.training.scenarios.training import TrainingCells, TrainingContents, TrainingScenario, plain_job
from zbmd.training.scenarios.world import CommitOptions, StepOrder
from zbmd.transport.sim import Options, RunOutcome, Simulation, SimulationFailure, run_scenario

SCENARIO = TrainingScenario()


@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 4), length=st.integers(1, 3), faults=st.integers(0, 4)
)
@settings(max_examples=20)
def test_every_version_has_the_bits_of_the_plain_job(seed: int, ranks: int, length: int, faults: int) -> None:
    options = Options(ranks=ranks, length=length, faults=faults)
    report = run_scenario(SCENARIO, seed, options, SCENARIO.draw_plan(seed, options), tell=None)
    assert report.outcome is RunOutcome.OK, report


def test_the_oracle_is_the_plain_trainer() -> None:
    job = plain_job(3, 5)
    assert len({job.digest(version, 0) for version in range(4)}) == 4
    trainer = PlainTrainer(job.recipe)
    for _ in range(3):
        trainer.run_step()
    flat = np.concatenate([trainer.state.weights, trainer.state.mean, trainer.state.square])
    assert flat.tobytes() == job.versions[3].tobytes()
    assert plain_job(4, 5).digest(0, 0) == job.digest(0, 0)


def test_a_calm_run_computes_every_shard_on_its_rank() -> None:
    job = plain_job(2, 5)
    simulation, world = build(1, CommitOptions(world_size=3, steps=2), lambda sim: TrainingContents(job, sim))
    simulation.run()
    assert world.finished == {0, 1, 2}
    for cells in world.cells.values():
        assert isinstance(cells, TrainingCells)
        assert job.digest(2, 0) in (cells.digest(0), cells.digest(1))


def test_a_death_in_the_all_reduce_cuts_steps_short(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: set[End] = set()
    reduce = TrainingContents._reduced

    def watched(*arguments: object) -> object:
        results = reduce(*arguments)  # type: ignore[arg-type]
        ends.update(result.outcome for result in results.values())
        return results

    monkeypatch.setattr(TrainingContents, "_reduced", watched)
    wanted = {End.COMPLETE, End.LOST, End.KILLED}
    for seed in range(1_000):
        options = Options(ranks=3, length=2, faults=2)
        run_scenario(SCENARIO, seed, options, SCENARIO.draw_plan(seed, options), tell=None)
        if wanted <= ends:
            break
    assert wanted <= ends


def test_a_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose update errs in one bit is caught by its vote, or by the oracle if it is alone."""
    update = TrainingCells.update

    def erring(cells: TrainingCells, order: StepOrder) -> None:
        update(cells, order)
        cells.err(order.version % 2, 0)

    monkeypatch.setattr(TrainingCells, "update", erring)
    job = plain_job(1, 2)
    simulation, _ = build(1, CommitOptions(world_size=1, steps=1), lambda sim: TrainingContents(job, sim))
    assert isinstance(simulation, Simulation)
    with pytest.raises(SimulationFailure, match="with a wrong content"):
        simulation.run()
