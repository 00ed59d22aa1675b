"""Profiles of ranks that were never run: their lines, with times in whole seconds."""

from __future__ import annotations

import msgspec

from zbmd.training.profiler.lines import VERSION, CutLine, RankProfile, RunLine, StepLine
from zbmd.training.profiler.peak import MachineDescription

MACHINE = MachineDescription(
    processor="any", processors=2, blas="any", dtype="float32", threads=1, parallel=2
)
WALL = 1_700_000_000_000_000_000
"""Time since the epoch at which the clock of all ranks is 0."""
S = 1_000_000_000


def life(
    rank: int,
    steps: list[StepLine],
    *,
    incarnation: int = 1,
    began_s: int = 1,
    cuts: tuple[CutLine, ...] = (),
) -> RankProfile:
    run = RunLine(
        version=VERSION,
        rank=rank,
        incarnation=incarnation,
        world_size=2,
        host="host",
        boot_id="boot",
        pid=7,
        monotonic_ns=(began_s + 1) * S,
        unix_ns=WALL + (began_s + 1) * S,
        process_ns=began_s * S,
        ranks_on_host=2,
        machine=MACHINE,
        peak=None,
        units=(),
    )
    return RankProfile(run, tuple(steps), cuts)


def step(number: int, begin_s: int, end_s: int, **ns: int) -> StepLine:
    """A step whose time that has no name is a forward pass."""
    named = {name: seconds * S for name, seconds in ns.items()}
    named["forward"] = (end_s - begin_s) * S - sum(named.values())
    return StepLine(
        step=number,
        begin_ns=begin_s * S,
        end_ns=end_s * S,
        ns=named,
        unit_ns={},
        passes={},
        flops=0,
        hardware_flops=0,
        overlap=None,
    )


def encoded(profile: RankProfile) -> list[bytes]:
    """The lines of its file; a cut comes before the step that it is in."""
    cuts = list(profile.cuts)
    lines: list[RunLine | StepLine | CutLine] = [profile.run]
    for line in profile.steps:
        while cuts and cuts[0].at_ns < line.end_ns:
            lines.append(cuts.pop(0))
        lines.append(line)
    return [msgspec.json.encode(line) + b"\n" for line in [*lines, *cuts]]
