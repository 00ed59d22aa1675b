"""What a profiled rank writes of its steps: a JSON line for each life of it, and one for each of its steps.

They lie beside the other records of the run, in `profile/rank<r>-<incarnation>.jsonl`. Files are bounded: a
full one becomes `….jsonl.old`, in place of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zbmd.training.profiler.peak import Machine
from zbmd.training.run.json_lines import read_json_lines
from zbmd.transport.errors import UserError

PROFILE_DIRECTORY: Final = "profile"
VERSION: Final = 1
LINES_BYTES_MAX: Final = 64 << 20
"""Of a file, before another one is begun."""
LINE_BYTES_MAX: Final = 1 << 20
RANKS_MAX: Final = 1 << 16
IDLE: Final = "idle"
"""What is left of a step's time."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
PerUnit = Annotated[tuple[Count, ...], msgspec.Meta(max_length=2048)]


class UnitLine(msgspec.Struct, frozen=True, array_like=True):
    """FLOPs of a unit; see `zbmd.training.profiler.flops.UnitFlops`."""

    name: Name
    forward: Count
    attention: Count
    backward: Count
    again: Count


class RunLine(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """A life of a rank begins. monotonic_ns, unix_ns: CLOCK_MONOTONIC and CLOCK_REALTIME, at one time.

    boot_id: processes with the same one share their monotonic clock. peak: FLOPs a second of this rank's
    share of its machine, None if that was not measured yet.
    """

    version: Count
    rank: Rank
    incarnation: Count
    world_size: Rank
    host: Name
    boot_id: Name
    pid: Count
    monotonic_ns: Count
    unix_ns: Count
    ranks_on_host: Rank
    machine: Machine
    peak: Annotated[float, msgspec.Meta(gt=0.0)] | None
    units: Annotated[tuple[UnitLine, ...], msgspec.Meta(max_length=2048)]


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of the step's groups, ns: how long any was under way, and of that, how long this rank waited
    for communication, and how long it was at work beside it."""

    under_way_ns: Count
    waited_ns: Count
    hidden_ns: Count


class HeldMost(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a stage held at once for its backward passes: micro-batches of a part, and bytes.

    microbatches_max: what the schedule promises, nbytes_max: those of so many of the largest part.
    """

    microbatches: Count
    nbytes: Count
    microbatches_max: Count
    nbytes_max: Count


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A step, from its begin to the begin of the next one; CLOCK_MONOTONIC.

    ns: of each category and of `IDLE`, which add up to the whole; categories without any time are left out.
    unit_ns, passes: of forward, backward and recompute, for each unit, where there is any. flops: of these
    passes, hardware_flops: with what was computed again. overlap: None if there were too many operations.
    held: of activations, by a run on a mesh.
    """

    step: Count
    begin_ns: Count
    end_ns: Count
    ns: dict[Name, Count]
    unit_ns: dict[Name, PerUnit]
    passes: dict[Name, PerUnit]
    flops: Count
    hardware_flops: Count
    overlap: Overlap | None
    held: HeldMost | None = None

    @property
    def wall_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Life:
    """What one incarnation of a rank has written."""

    run: RunLine
    steps: tuple[StepLine, ...]


_decoder: msgspec.json.Decoder[RunLine | StepLine] = msgspec.json.Decoder(RunLine | StepLine)


def lines_path(directory: Path, rank: int, incarnation: int) -> Path:
    """Where a life of a rank of the run in `directory` writes."""
    return directory / PROFILE_DIRECTORY / f"rank{rank}-{incarnation}.jsonl"


def old_path(path: Path) -> Path:
    """Where a file goes that is full."""
    return path.with_name(f"{path.name}.old")


def read_lives(directory: Path) -> list[Life]:
    """All that the ranks of the run in `directory` have written, by rank and incarnation.

    Raises `UserError` if there is nothing, or it is damaged. A last line that was cut off by a kill is left
    out.
    """
    paths = sorted((directory / PROFILE_DIRECTORY).glob("rank*.jsonl"))
    if not paths:
        raise UserError(
            f"{directory} holds no profile: it is not the directory of a run, or the run was told to keep "
            "none (ZBMD_PROFILE=off)."
        )
    lives: list[Life] = []
    for path in paths:
        lines: list[RunLine | StepLine] = []
        for one in (old_path(path), path):
            if one.exists():
                lines += _read(one)
        lives += _lives(lines, path)
    return sorted(lives, key=lambda life: (life.run.rank, life.run.incarnation))


def _read(path: Path) -> Iterable[RunLine | StepLine]:
    most = LINES_BYTES_MAX + LINE_BYTES_MAX
    return read_json_lines(
        path, _decoder.decode, bytes_max=most, what="profile that is", advice="delete the file"
    )


def _lives(lines: Iterable[RunLine | StepLine], path: Path) -> Iterable[Life]:
    run: RunLine | None = None
    steps: list[StepLine] = []
    for line in lines:
        if isinstance(line, StepLine):
            if run is None:
                raise UserError(f"{path} does not begin with the line of a run: delete the file.")
            if line.end_ns < line.begin_ns or sum(line.ns.values()) != line.wall_ns:
                raise UserError(f"{path}: the times of step {line.step} do not add up: delete the file.")
            steps.append(line)
            continue
        if line.version != VERSION:
            raise UserError(f"{path} has the format {line.version}; this version reads {VERSION}.")
        if run is not None:
            yield Life(run, tuple(steps))
        run, steps = line, []
    if run is not None:
        yield Life(run, tuple(steps))
