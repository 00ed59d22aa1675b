"""The scenario of collective operations: its oracle, its world, and that its checker can fail."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.collectives.programs.simulate import Outcome as End
from zbmd.collectives.scenarios.collectives import (
    CollectivesScenario,
    CollectiveWorld,
    RightOrNothing,
    draw_case,
)
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim import (
    Crash,
    FailureKind,
    Options,
    Partition,
    Pause,
    RunOutcome,
    SimulationFailure,
    UnsupportedFault,
    run_scenario,
)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 5))
@settings(max_examples=200)
def test_what_is_expected_is_what_the_operation_means(seed: int, n: int) -> None:
    """By sums in numpy's own order, so up to rounding; the bits are the verifier's business."""
    case = draw_case(random.Random(seed), n)
    given = [own[buffer] for own in case.buffers for buffer in (IN, PUB) if buffer in own]
    outs = [out for out in case.expected if out is not None]
    match case.request.operation:
        case Operation.ALL_REDUCE:
            for out in outs:
                np.testing.assert_allclose(out, np.sum(given, axis=0), rtol=1e-4, atol=1e-5)
        case Operation.REDUCE_SCATTER:
            blocks = np.sum(given, axis=0).reshape(n, case.count)
            for rank, out in enumerate(outs):
                np.testing.assert_allclose(out, blocks[rank], rtol=1e-4, atol=1e-5)
        case Operation.ALL_GATHER:
            for out in outs:
                np.testing.assert_array_equal(out, np.concatenate(given))
        case Operation.BROADCAST:
            for out in outs:
                np.testing.assert_array_equal(out, case.buffers[case.request.root][OUT])
        case Operation.ALL_REDUCE_SHARDS:
            partials = [array for own in case.buffers for buffer, array in own.items() if buffer >= IN]
            for out in outs:
                np.testing.assert_allclose(out, np.sum(partials, axis=0), rtol=1e-4, atol=1e-5)
        case Operation.REDUCE:
            np.testing.assert_allclose(outs[0], np.sum(given, axis=0), rtol=1e-4, atol=1e-5)
            return
        case Operation.GATHER:
            np.testing.assert_array_equal(outs[0], np.concatenate(given))
            return
        case Operation.SCATTER:
            np.testing.assert_array_equal(np.concatenate(outs), given[0])
        case Operation.ALL_TO_ALL:
            blocks = np.stack(given).reshape(n, n, case.count)
            np.testing.assert_array_equal(np.stack(outs).reshape(n, n, case.count), blocks.swapaxes(0, 1))
        case Operation.BARRIER:
            assert case.expected == (None,) * n
            return
    assert len(outs) == n


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), faults=st.integers(0, 5))
@settings(max_examples=30)
def test_operations_stand_kills_and_pauses(seed: int, ranks: int, faults: int) -> None:
    report = run_scenario(
        CollectivesScenario(), seed, Options(ranks=ranks, length=4, faults=faults), tell=None
    )
    assert report.outcome is RunOutcome.OK, report


def test_rounds_end_in_all_ways_and_the_dead_come_back() -> None:
    ends: set[End] = set()
    came_back = False
    for seed in range(60):
        world = CollectiveWorld(seed, 3, 5)
        world.apply(Crash(process="rank1", at_ns=5_000 * (seed + 1), for_ns=60_000))
        world.add_checker("right", RightOrNothing(world).check)
        world.run()
        assert len(world.ended) == 5
        for ended in world.ended:
            assert ended.results is not None
            ends |= {result.outcome for result in ended.results}
        sizes = [len(ended.members) for ended in world.ended]
        came_back = came_back or (2 in sizes and sizes[-1] == 3)
    assert ends == set(End) and came_back


def test_a_pause_holds_the_round_up() -> None:
    ends_ns: list[int] = []
    for pause_ns in (0, 5_000_000):
        world = CollectiveWorld(4, 2, 1)
        if pause_ns:
            world.apply(Pause(process="rank0", at_ns=10_000, for_ns=pause_ns))
        world.run()
        assert len(world.ended) == 1
        ends_ns.append(world.now_ns)
    assert ends_ns[1] - ends_ns[0] > 4_000_000


def test_a_wrong_or_a_missing_result_is_seen() -> None:
    world = CollectiveWorld(5, 2, 1)
    world.run()
    (ended,) = world.ended
    assert ended.results is not None
    RightOrNothing(world).check()
    right = ended.case.expected[0]
    assert right is not None and ended.results[0].out is not None
    for wrong in (
        replace(ended.results[0], out=ended.results[0].out + 1),
        replace(ended.results[0], outcome=End.LOST, out=None),
    ):
        ended.results[0] = wrong
        with pytest.raises(AssertionError, match="rank0"):
            RightOrNothing(world).check()


def test_a_deadlock_is_a_failure_of_liveness(monkeypatch: pytest.MonkeyPatch) -> None:
    world = CollectiveWorld(5, 2, 1)
    monkeypatch.setattr("zbmd.collectives.programs.simulate.Simulation.step", lambda self, held: False)
    with pytest.raises(SimulationFailure, match="wait for ever") as failure:
        world.run()
    assert failure.value.kind is FailureKind.LIVENESS


def test_faults_that_mean_nothing_are_refused() -> None:
    world = CollectiveWorld(1, 2, 1)
    with pytest.raises(LocalProtocolError, match="no simulated process rank5"):
        world.apply(Crash(process="rank5", at_ns=0, for_ns=0))
    with pytest.raises(UnsupportedFault):
        world.apply(Partition(groups=(("rank0",), ("rank1",)), at_ns=0, for_ns=1))
