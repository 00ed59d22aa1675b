"""The benchmark of actors: every figure is measured, an absent library is named."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from zbmd.actors.system import ActorSystem
from zbmd.tools.bench import actors as bench_actors
from zbmd.tools.bench.actor_lifecycle import fairness, restarting, restarting_process, spawning
from zbmd.tools.bench.peer_catalogue import PeerMissing
from zbmd.tools.bench.peers.actor_asks import ActorMeasurement, percentile, table
from zbmd.transport.errors import UserError


async def test_every_figure_of_a_life_is_measured() -> None:
    system = ActorSystem("bench")
    try:
        spawned, kept = await spawning(system, 100)
        assert spawned.per_second > 0 and "100" in kept.what
        (restarted,) = await restarting(system, 3)
        assert 0 < restarted.p50_us <= restarted.p99_us
        killed = await restarting_process(system, 1)
        assert killed.p50_us > 0
        alone, beside, flooded, growth, own = await fairness(system, 0.01)
        assert alone.p50_us > 0 and beside.p50_us > 0 and flooded.per_second > 0
        assert growth.amount > 0 and own.amount > 0
    finally:
        await system.stop()
    shown = table([spawned, kept, restarted, killed, alone, beside, flooded, growth, own])
    assert len(shown.splitlines()) == 10 and "restart of a crashed actor" in shown


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([5, 1, 3], part) for part in (0, 0.5, 0.99, 1)] == [1, 3, 5, 5]
    assert percentile([], 0.5) == 0


async def test_the_floor_is_measured() -> None:
    floor = await bench_actors._floor(
        ActorMeasurement(what="ask 1 B", where="other process", p50_us=0.1), 0.01
    )
    assert 0 < floor.p50_us <= floor.p99_us and floor.by == "C"


def test_a_library_that_is_absent_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec " + sys.executable + ' -S "$@"\n')  # it has no package at all
    python.chmod(0o700)
    options = argparse.Namespace(seconds=0.01, vs=f"xoscar={python}", json=False)
    with pytest.raises(PeerMissing) as raised:
        bench_actors.run(options)
    said = str(raised.value)
    assert f"{python} -m pip install xoscar" in said and "No module named 'xoscar'" in said


@pytest.mark.parametrize(("seconds", "vs"), [(0.0, ""), (1e9, ""), (1.0, "erlang"), (1.0, "ray=/no/python")])
def test_bad_input_is_told(seconds: float, vs: str) -> None:
    with pytest.raises(UserError):
        bench_actors.run(argparse.Namespace(seconds=seconds, vs=vs, json=False))
