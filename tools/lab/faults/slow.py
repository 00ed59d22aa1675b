"""Profiles of runs with a slow rank: the machine that names stragglers, over samples that are drawn.

What names a rank, in which words and after which step, is the real machine and its records; only the times
that it judges are drawn: on a machine of two busy cores three ranks have no steps of even length.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.actors.cluster.local_deaths import boot_id
from zbmd.training.job.stragglers.machine import Cleared, Entered, Named, Stepped, StragglerMachine
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, Field
from zbmd.training.profiler.lines import VERSION, RunLine, StepLine, StragglerLine, lines_path
from zbmd.training.profiler.peak import MachineDescription

Samples = npt.NDArray[np.float64]
STEP_NS = 100e6
SLOW_FROM = 100
STEPS_MAX = 260
NOISE = 0.01


def write_slow_run(directory: Path, *, cause: str, who: int, ranks: int, seed: int, slower: float) -> None:
    """Write the profiles of a run in which rank `who` becomes slower by that part. Raises `AssertionError` if
    the machine has not named anyone.
    """
    draw = np.random.default_rng(seed)
    machine = StragglerMachine()
    shards = tuple([4] * ranks)
    machine.handle(Entered(ranks=tuple(range(ranks)), shards=shards, alike=tuple([0] * ranks)))
    began_ns = time.monotonic_ns()
    lines = {rank: [msgspec.json.encode(_run_line(rank, ranks, began_ns))] for rank in range(ranks)}
    named, at_ns = 0, began_ns
    for step in range(STEPS_MAX):
        samples = _samples(draw, ranks, who, cause, slower if step >= SLOW_FROM else 0.0)
        wall_ns = int(samples[0, [Field.PASSES, Field.UPDATE, Field.DATA, Field.WAIT]].sum())
        for rank in range(ranks):
            lines[rank].append(msgspec.json.encode(_step_line(step, at_ns, wall_ns, samples[rank])))
        at_ns += wall_ns
        for action in machine.handle(Stepped(step, samples)):
            assert isinstance(action, Named | Cleared)
            named += isinstance(action, Named)
            line = StragglerLine(
                step=action.step,
                slow=action.rank,
                cause=action.cause.value,
                factor=action.factor if isinstance(action, Named) else 1.0,
                text=action.text,
                at_ns=at_ns,
                over=isinstance(action, Cleared),
            )
            lines[0].append(msgspec.json.encode(line))
        if named and step > SLOW_FROM + 40:
            break
    assert named or not slower, "the machine named no one"
    for rank, data in lines.items():
        path = lines_path(directory, rank, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join([*data, b""]))


def _samples(draw: np.random.Generator, ranks: int, who: int, cause: str, slower: float) -> Samples:
    found = np.zeros((ranks, SAMPLE_NUMBERS))
    noise = 1 + NOISE * draw.standard_t(5, ranks).clip(-8, 8)
    found[:, Field.KNOWN], found[:, Field.INCARNATION] = 1, 1
    found[:, Field.PASSES], found[:, Field.UPDATE] = 0.8 * STEP_NS * noise, 0.1 * STEP_NS
    found[:, Field.DATA], found[:, Field.ROUND_TRIP] = 0.02 * STEP_NS, 60 * noise
    if cause == "compute":
        found[who, Field.PASSES] += slower * STEP_NS
    elif cause == "data":
        found[who, Field.DATA] += slower * STEP_NS
    elif cause == "link":
        found[who, Field.ROUND_TRIP] += 4000 * (slower > 0)
    own = found[:, [Field.PASSES, Field.UPDATE, Field.DATA]].sum(axis=1)
    longest = own.max() + (slower * STEP_NS if cause == "link" else 0) + 0.05 * STEP_NS
    found[:, Field.WAIT] = longest - own
    return found


def _run_line(rank: int, ranks: int, began_ns: int) -> RunLine:
    return RunLine(
        version=VERSION,
        rank=rank,
        incarnation=1,
        world_size=ranks,
        host=socket.gethostname()[:256],
        boot_id=boot_id(),
        pid=os.getpid(),
        monotonic_ns=began_ns,
        unix_ns=time.time_ns(),
        ranks_on_host=ranks,
        machine=MachineDescription(processor="drawn", processors=1, blas="none"),
        peak=None,
        units=(),
    )


def _step_line(step: int, at_ns: int, wall_ns: int, sample: Samples) -> StepLine:
    passes, update, data = (int(sample[name]) for name in (Field.PASSES, Field.UPDATE, Field.DATA))
    ns = {"forward": passes, "optimizer": update, "data_load": data}
    ns["comm"] = max(0, wall_ns - sum(ns.values()))
    return StepLine(
        step=step,
        begin_ns=at_ns,
        end_ns=at_ns + sum(ns.values()),
        ns=ns,
        unit_ns={},
        passes={},
        flops=0,
        hardware_flops=0,
        overlap=None,
    )
