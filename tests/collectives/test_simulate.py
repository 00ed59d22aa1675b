"""Programs under random interleavings and kills: right results, or none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from zbmd.collectives.algorithms import ALGORITHMS, Operation, Request, build
from zbmd.collectives.algorithms.shard_tree import assign_shards, reduce_shards, shard_tree_nodes
from zbmd.collectives.program import IN, OUT, PUB, Notify, Wait, input_buffer
from zbmd.collectives.simulate import Outcome, Result, Simulation, SimulationError

Array = NDArray[np.float32]
KINDS = sorted(ALGORITHMS, key=str)
SHARDS = 6


class Case:
    """A request with random inputs, and what every rank must end with."""

    def __init__(self, operation: Operation, algorithm: str, n: int, count: int, seed: int) -> None:
        entry = ALGORITHMS[operation, algorithm]
        draw = random.Random(seed)
        chunks = n * draw.randint(1, 2) if entry.blocked else draw.randint(1, 2 * n)
        if operation is Operation.BARRIER:
            chunks = 1
        self.request = Request(
            operation=operation, algorithm=algorithm, n=n, chunks=chunks, root=draw.randrange(n)
        )
        self.count = count
        self.in_place = draw.random() < 0.5
        source = PUB if entry.eager else IN
        values = np.random.default_rng(seed)

        def fresh(size: int) -> Array:
            return values.standard_normal(size).astype(np.float32)

        self.buffers: list[Mapping[int, Array]] = []
        self.expected: list[Array] = []
        match operation:
            case Operation.ALL_REDUCE:
                inputs = [fresh(count) for _ in range(n)]
                self.buffers = [
                    {source: x, OUT: x if self.in_place and not entry.eager else np.zeros_like(x)}
                    for x in inputs
                ]
                self.expected = [self._folded(inputs)] * n
            case Operation.REDUCE_SCATTER:
                inputs = [fresh(count * n) for _ in range(n)]
                self.buffers = [{IN: x, OUT: np.zeros(count, np.float32)} for x in inputs]
                blocks = self._folded(inputs).reshape(n, count)
                self.expected = list(blocks)
            case Operation.ALL_GATHER:
                inputs = [fresh(count) for _ in range(n)]
                self.buffers = [{source: x, OUT: np.zeros(n * count, np.float32)} for x in inputs]
                self.expected = [np.concatenate(inputs)] * n
            case Operation.BROADCAST:
                arrays = [fresh(count) for _ in range(n)]
                root = self.request.root
                self.expected = [arrays[root].copy()] * n
                self.buffers = [{OUT: x, PUB: x.copy()} if entry.eager else {OUT: x} for x in arrays]
            case Operation.ALL_REDUCE_SHARDS:
                shards = [fresh(count) for _ in range(SHARDS)]
                self.request = replace(self.request, shards=SHARDS, assignment=assign_shards(SHARDS, n))
                for lo, hi in self.request.assignment:
                    held = shard_tree_nodes(SHARDS, lo, hi)
                    partials = {input_buffer(k): reduce_shards(shards[a:b]) for k, (a, b) in enumerate(held)}
                    self.buffers.append({**partials, OUT: np.zeros(count, np.float32)})
                self.expected = [reduce_shards(shards)] * n
            case Operation.BARRIER:
                self.buffers = [{} for _ in range(n)]

    def _folded(self, inputs: list[Array]) -> Array:
        """The fold over ranks 0..n-1; for rings, whose order depends on the chunk, any order will do."""
        total = inputs[0].copy()
        for x in inputs[1:]:
            total += x
        return total

    def run(self, seed: int, kills: Mapping[int, int] | None = None) -> tuple[list[Result], list[str]]:
        programs = [build(self.request, rank) for rank in range(self.request.n)]
        simulation = Simulation(programs, self.buffers, self.count, seed=seed, kills=kills)
        return simulation.run(), simulation.history

    def check_complete(self, results: list[Result]) -> int:
        """Every complete rank has the right result, and all the same bits; return how many there are."""
        complete = [rank for rank, result in enumerate(results) if result.outcome is Outcome.COMPLETE]
        for rank in complete:
            out = results[rank].out
            if self.request.operation is Operation.BARRIER:
                continue
            assert out is not None
            if self.request.algorithm == "ring":
                np.testing.assert_allclose(out, self.expected[rank], rtol=1e-4, atol=1e-5)
                if self.request.operation is not Operation.REDUCE_SCATTER:
                    first = results[complete[0]].out
                    assert first is not None and out.tobytes() == first.tobytes()
            else:
                assert out.tobytes() == self.expected[rank].tobytes(), f"rank {rank} has a wrong result"
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
    programs = [build(case.request, rank) for rank in range(2)]
    silent = tuple(i for i in programs[1].instructions if not isinstance(i, Notify))
    simulation = Simulation([programs[0], replace(programs[1], instructions=silent)], case.buffers, 4, seed=1)
    with pytest.raises(SimulationError, match="deadlock"):
        simulation.run()


def test_the_simulation_shows_what_a_missing_wait_does() -> None:
    """The same plant that the verifier rejects gives a wrong result in some interleaving."""
    wrong = 0
    for seed in range(60):
        case = Case(Operation.ALL_REDUCE, "direct", 2, 8, 3)
        programs = [build(case.request, rank) for rank in range(2)]
        hasty = tuple(i for i in programs[0].instructions if not isinstance(i, Wait))
        simulation = Simulation(
            [replace(programs[0], instructions=hasty), programs[1]], case.buffers, 8, seed=seed
        )
        results = simulation.run()
        wrong += any(
            result.out is not None and result.out.tobytes() != case.expected[0].tobytes()
            for result in results
        )
    assert wrong
