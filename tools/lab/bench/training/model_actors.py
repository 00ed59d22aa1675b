"""Measure what the actors of a model add to a training step: shards with and without them, in turn.

    python -m zbmd.tools.lab.bench.training.model_actors --rounds 500 --out DIR

A round computes one shard's gradient three times, through the actors and twice without, in an order that is
drawn for each round. Printed are medians over the rounds of the ratios, with their 95 % intervals; plain
against plain is the noise floor. CPU time is the thread's own, which others disturb less than the wall's.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.supervised_recipe import SupervisedRecipe
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.demo.overhead import median_interval
from zbmd.training.model.gpt import GPT
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe
from zbmd.training.step.recipe import Recipe

WARMUP_ROUNDS = 5
SIDES = ("actors", "plain", "twin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsCost:
    """Medians over the rounds, in percent of the plain shard's time, with 95 % intervals."""

    cpu_percent: float
    cpu_interval_percent: tuple[float, float]
    cpu_floor_interval_percent: tuple[float, float]
    wall_percent: float
    wall_interval_percent: tuple[float, float]
    wall_floor_interval_percent: tuple[float, float]
    shard_cpu_ms: float
    shard_wall_ms: float
    rounds: int


class _Clocked:
    """Times one shard's gradient, with a hook as the job has one."""

    def __init__(self, recipe: Recipe, weights: np.ndarray, grads: np.ndarray) -> None:
        self._recipe = recipe
        self._weights = weights
        self._grads = grads
        self._ids = recipe.sample_ids(0)[0]

    def run(self) -> tuple[float, float]:
        """CPU and wall time, seconds."""
        wall, cpu = time.perf_counter(), time.thread_time()
        self._recipe.shard_gradient(self._weights, self._grads, self._ids, step=0, on_grad_ready=_told)
        return time.thread_time() - cpu, time.perf_counter() - wall


def _told(_: int) -> None:
    """A gradient is final."""


def _rounds(sides: dict[str, _Clocked], rounds: int) -> list[dict[str, tuple[float, float]]]:
    random, found = Random(0), list[dict[str, tuple[float, float]]]()
    for _ in range(WARMUP_ROUNDS + rounds):
        order = random.sample(SIDES, len(SIDES))
        found.append({side: sides[side].run() for side in order})
    return found[WARMUP_ROUNDS:]


async def measure(options: TrainOptions, rounds: int) -> ActorsCost:
    """Time `rounds` of the job's model. Raises `UserError`."""
    recipe = open_recipe(options)
    weights = recipe.model.init(recipe.config.seed)
    # The actors compute with a model of their own: they put themselves in the place of its units.
    own = Recipe(GPT(recipe.model.config), recipe.corpus, recipe.config)
    system, made = ActorSystem("bench"), SupervisedRecipe(own, weights)
    await made.actors.start(system)
    try:
        recipes = {"actors": made, "plain": recipe, "twin": recipe}
        # One array for all: which pages gradients lie in made 1 % between the two plain ones.
        grads = np.zeros_like(weights)
        sides = {name: _Clocked(one, weights, grads) for name, one in recipes.items()}
        found = await asyncio.to_thread(_rounds, sides, rounds)
    finally:
        await system.stop()

    def percent(side: str, clock: int) -> list[float]:
        return [100.0 * (one[side][clock] / one["plain"][clock] - 1.0) for one in found]

    return ActorsCost(
        cpu_percent=statistics.median(percent("actors", 0)),
        cpu_interval_percent=median_interval(percent("actors", 0)),
        cpu_floor_interval_percent=median_interval(percent("twin", 0)),
        wall_percent=statistics.median(percent("actors", 1)),
        wall_interval_percent=median_interval(percent("actors", 1)),
        wall_floor_interval_percent=median_interval(percent("twin", 1)),
        shard_cpu_ms=1e3 * statistics.median(one["plain"][0] for one in found),
        shard_wall_ms=1e3 * statistics.median(one["plain"][1] for one in found),
        rounds=rounds,
    )


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the result as one JSON line."""
    parser = script_parser("lab.bench.training.model_actors", __doc__)
    parser.add_argument("--rounds", type=int, default=500, help="rounds that count (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory for the corpus")
    parser.add_argument("--data", help="file, directory or glob to compute on")
    arguments = parser.parse_args(argv)
    options = TrainOptions(out=arguments.out, data=arguments.data)
    cost = asyncio.run(measure(options, arguments.rounds))
    print(msgspec.json.encode(asdict(cost)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
