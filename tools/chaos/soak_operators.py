"""Whether a training ends with the undisturbed bits, whatever fails of its operators, devices and actors.

    python -m zbmd.tools.chaos.soak_operators [--seeds 1000] [--first 0]

Each seed is a small training through a model's actors. Ops fail forwards and backwards, before their work,
behind it, and with a spoiled gradient; two of three devices may get a fault for good, so that operators move;
any actor is killed at any time. What a seed does is drawn from it; when it meets a thread at work is up to
the machine. The exit code is 1 if a seed ended with other bits or did not end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np
import structlog

from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.supervised_recipe import SupervisedRecipe
from zbmd.tools.cli.options import script_parser
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Backward, Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Operator
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.model_actors.operator_devices import DeviceFault, HostDevice, ModuleDevice, OperatorDevice
from zbmd.training.model_actors.slot import RestartsExhausted
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.scenarios.training import plain_job
from zbmd.training.step.recipe import Recipe

STEPS: Final = 6
SHARDS: Final = 3
FAILURES_A_STEP_MAX: Final = 2
"""Failures that pass: with faults and kills they stay below the tries of one message."""
TURNS_BEFORE_A_KILL_MAX: Final = 200
SEED_S: Final = 120.0


class Flake(RuntimeError):
    """A failure that passes."""


class FlakyDevice:
    """`inner`, on which ops fail now and then, or all of them from its fault on.

    share: of calls that fail; fault_after: calls until its fault, or None.
    """

    def __init__(
        self, inner: OperatorDevice, random: Random, *, share: float, fault_after: int | None
    ) -> None:
        self.name = inner.name
        self.flakes_left = 0
        self.failures = 0
        self._inner = inner
        self._random = random
        self._share = share
        self._calls_left = fault_after

    @property
    def faulty(self) -> bool:
        """Whether it has had its fault."""
        return self._calls_left == 0

    def check(self) -> str:
        """See `OperatorDevice`."""
        return "it is broken" if self.faulty else self._inner.check()

    def kernel(self, op: Operator) -> Operator:
        """See `OperatorDevice`."""
        there = self._inner.kernel(op)

        def run(tape: Tape, *arguments: object, **options: object) -> Tensor:
            self.fail()
            return there(FlakyTape(tape, lambda _: self.fail()), *arguments, **options)

        return run

    def fail(self) -> None:
        """One call: raise `DeviceFault`, `Flake`, or nothing."""
        if self._calls_left:
            self._calls_left -= 1
        if self.faulty:
            self.failures += 1
            raise DeviceFault(f"{self.name} is broken")
        if self.flakes_left and self._random.random() < self._share:
            self.flakes_left -= 1
            self.failures += 1
            raise Flake(self.name)


class FlakyTape(Tape):
    """Records on another tape rules that fail, some with the gradient spoiled that they were given.

    fail: raises, or not; receives the position of the rule.
    """

    __slots__ = ("_fail", "_tape")

    def __init__(self, tape: Tape, fail: Callable[[str], None]) -> None:
        super().__init__(tape.xp, recording=tape.recording)
        self._tape = tape
        self._fail = fail

    def record(self, data: Array, backward: Backward, *parameters: Parameter) -> Tensor:
        """See `Tape`."""

        def rule(grad: Array) -> None:
            self._fail("backwards")
            backward(grad)
            try:
                self._fail("backwards, at the end")
            except Exception:
                grad *= 3.0
                raise

        return self._tape.record(data, rule, *parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """Result of a seed: `same` bits as the undisturbed run; what was injected, and what it led to."""

    seed: int
    same: bool
    failures: int
    kills: int
    moves: int
    restarts: int


def run_plain(dropout: float, *, recompute: bool) -> bytes:
    """The bits of the state of an undisturbed run."""
    return _bits(_trained(PlainTrainer(_recipe(dropout, recompute=recompute))))


async def run_seed(seed: int) -> Soaked:
    """One training under what `seed` draws. Raises `TimeoutError` if it takes longer than `SEED_S`."""
    async with asyncio.timeout(SEED_S):
        return await _run_seed(seed)


async def _run_seed(seed: int) -> Soaked:
    random = Random(seed)
    dropout, recompute = random.choice((0.0, 0.2)), random.random() < 0.3
    recipe = _recipe(dropout, recompute=recompute)
    devices = _devices(random)
    system = ActorSystem(f"soak{seed}")
    supervised = SupervisedRecipe(recipe, devices=devices)
    actors = supervised.actors
    kills = 0
    try:
        await actors.start(system)
        trainer = PlainTrainer(supervised)
        for _ in range(STEPS):
            for device in devices:
                device.flakes_left = 0
            random.choice(devices).flakes_left = FAILURES_A_STEP_MAX
            working = asyncio.create_task(asyncio.to_thread(trainer.run_step))
            if random.random() < 0.5:
                kills += await _kill_one(random, system, actors)
            await working
    finally:
        await system.stop()
    return Soaked(
        seed=seed,
        same=_bits(trainer) == run_plain(dropout, recompute=recompute),
        failures=sum(device.failures for device in devices),
        kills=kills,
        moves=actors.moves,
        restarts=sum(slot.incarnations - 1 for slot in actors.slots),
    )


def _devices(random: Random) -> list[FlakyDevice]:
    """Three, of which the last in the order of moves has no fault."""
    kinds: tuple[OperatorDevice, ...] = (HostDevice("cpu:0"), ModuleDevice("cpu:1", np), HostDevice("cpu:2"))
    calls = (
        random.choice((None, random.randrange(1, 400))),
        random.choice((None, random.randrange(1, 200))),
        None,
    )
    share = random.choice((0.002, 0.02, 0.5))
    return [
        FlakyDevice(kind, random, share=share, fault_after=fault)
        for kind, fault in zip(kinds, calls, strict=True)
    ]


async def _kill_one(random: Random, system: ActorSystem, actors: ModelActors) -> int:
    slot = random.choice(actors.slots)
    for _ in range(random.randrange(TURNS_BEFORE_A_KILL_MAX)):
        await asyncio.sleep(0)
    if slot.actor is None:
        return 0
    system.exit(slot.actor.ref, Reason(ReasonKind.KILLED, "the soak"))
    return 1


def _recipe(dropout: float, *, recompute: bool) -> Recipe:
    made = plain_job(STEPS, SHARDS).recipe
    model = GPT(replace(made.model.config, dropout=dropout), recompute=recompute)
    return Recipe(model, made.corpus, made.config)


def _trained(trainer: PlainTrainer) -> PlainTrainer:
    for _ in range(STEPS):
        trainer.run_step()
    return trainer


def _bits(trainer: PlainTrainer) -> bytes:
    state = trainer.state
    return b"".join(part.tobytes() for part in (state.weights, state.mean, state.square))


async def soak(first: int, seeds: int) -> list[Soaked]:
    """Run seeds `first` and on, one after the other, told on standard output."""
    results: list[Soaked] = []
    for seed in range(first, first + seeds):
        try:
            found = await run_seed(seed)
        except (RestartsExhausted, TimeoutError) as error:
            print(f"seed {seed}: NO END: {error!r}", flush=True)
            found = Soaked(seed=seed, same=False, failures=0, kills=0, moves=0, restarts=0)
        results.append(found)
        if not found.same:
            print(f"seed {seed}: OTHER BITS: {found}", flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print what was injected."""
    parser = script_parser("chaos.soak_operators", __doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    arguments = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # failures are what this is about
    results = asyncio.run(soak(arguments.first, arguments.seeds))
    wrong = [found.seed for found in results if not found.same]
    totals = {
        name: sum(getattr(found, name) for found in results)
        for name in ("failures", "kills", "moves", "restarts")
    }
    print(
        f"{len(results)} seeds, {len(wrong)} with other bits {wrong}: "
        + ", ".join(f"{v} {k}" for k, v in totals.items())
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
