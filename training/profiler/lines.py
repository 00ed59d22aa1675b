"""The profile file of a rank: JSON lines, one for each incarnation and one for each step; and their summary.

It is `profile/rank<r>-<incarnation>.jsonl` in the run's directory. Its size is bounded: a full file is
renamed to `….jsonl.old`, replacing the previous one. The summary of a run has the shares of its steps' time,
FLOPs, and use of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from zbmd.training.autograd._spans import CATEGORIES
from zbmd.training.profiler.peak import MachineDescription
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import read_json_lines

PROFILE_DIRECTORY: Final = "profile"
VERSION: Final = 1
LINES_BYTES_MAX: Final = 64 << 20
"""Size of a file at which the next one is begun."""
LINE_BYTES_MAX: Final = 1 << 20
RANKS_MAX: Final = 1 << 16
IDLE: Final = "idle"
"""The rest of a step's time."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
PerUnit = Annotated[tuple[Count, ...], msgspec.Meta(max_length=2048)]


class UnitLine(msgspec.Struct, frozen=True, array_like=True):
    """FLOPs of a unit; see `zbmd.training.profiler.profiler.UnitFlops`."""

    name: Name
    forward: Count
    attention: Count
    backward: Count
    again: Count


class RunLine(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """The first line of an incarnation.

    `monotonic_ns`, `unix_ns`: CLOCK_MONOTONIC and CLOCK_REALTIME at the same moment. `process_ns`: when the
    process began, 0 if unknown; CLOCK_MONOTONIC. `boot_id`: processes with equal ones share their clock.
    `peak`, `stream`: FLOPs a second, and bytes a second of memory, of this rank's share of its machine; None
    if they have not been measured.
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
    process_ns: Count = 0
    ranks_on_host: Rank
    machine: MachineDescription
    peak: Annotated[float, msgspec.Meta(gt=0.0)] | None
    units: Annotated[tuple[UnitLine, ...], msgspec.Meta(max_length=2048)]
    stream: Annotated[float, msgspec.Meta(gt=0.0)] | None = None


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of the step's groups, in ns: how long any was running, for how long of that this rank waited
    for communication, and for how long it computed.
    """

    under_way_ns: Count
    waited_ns: Count
    hidden_ns: Count


class ActivationPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a stage held at once for its backward passes: micro-batches of a part, and bytes.

    `microbatches_max`: the bound of the schedule; `nbytes_max`: the bytes of that many of the largest part.
    """

    microbatches: Count
    nbytes: Count
    microbatches_max: Count
    nbytes_max: Count


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A step, from its beginning to the beginning of the next one; CLOCK_MONOTONIC.

    `ns`: of each category and of `IDLE`, which add up to the whole; categories without time are left out.
    `unit_ns`, `passes`: of forward, backward and recompute, for each unit, where there are any. `flops`: of
    these passes; `hardware_flops`: with recomputation. `overlap`: None if there were too many operations.
    `held`: activations, for runs on a mesh.
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
    held: ActivationPeak | None = None

    @property
    def wall_ns(self) -> int:
        """Return the duration of the step."""
        return self.end_ns - self.begin_ns


class Death(msgspec.Struct, frozen=True, array_like=True):
    """The end of another rank, as this one noticed it; CLOCK_MONOTONIC."""

    rank: Rank
    incarnation: Count
    at_ns: Count


class CutLine(msgspec.Struct, frozen=True, kw_only=True, tag="cut", tag_field="kind"):
    """The step under way ended at `at_ns`, without its result, because of `deaths`; CLOCK_MONOTONIC.

    deaths: those noticed since the cut before; none if another rank noticed them.
    """

    at_ns: Count
    deaths: Annotated[tuple[Death, ...], msgspec.Meta(max_length=RANKS_MAX)]


class StragglerLine(msgspec.Struct, frozen=True, kw_only=True, tag="straggler", tag_field="kind"):
    """Rank `slow` was named as slow, or is no longer (`over`), as all ranks decided after `step`.

    text: the report; cause: its name; factor: the time beside what is usual; at_ns: CLOCK_MONOTONIC. One
    rank writes it.
    """

    step: Count
    slow: Rank
    cause: Name
    factor: float
    text: Annotated[str, msgspec.Meta(max_length=1024)]
    at_ns: Count
    over: bool = False


OPS_MAX: Final = 512
"""Rows of a sampled step."""


class OpRow(msgspec.Struct, frozen=True, array_like=True):
    """All calls of an op with equal shapes in one pass of a step: see `zbmd.training.profiler.operations`.

    execute_ns: of its own, by the clock of what computes; wait_ns: of a collective, until all members had
    come. nbytes: of the arrays that it takes and gives, each once. flops: of matrix products. enqueue_ns: in
    which the host asked for it, which is all of the execution on a CPU; 0 of collectives, of copies, and in
    files of earlier versions.
    """

    op: Name
    which: Name
    shape: Name
    dtype: Name
    calls: Count
    execute_ns: Count
    wait_ns: Count
    nbytes: Count
    flops: Count
    enqueue_ns: Count = 0


class OpsLine(msgspec.Struct, frozen=True, kw_only=True, tag="ops", tag_field="kind"):
    """The ops and collectives of a sampled step, those that took longest first."""

    step: Count
    ops: Annotated[tuple[OpRow, ...], msgspec.Meta(max_length=OPS_MAX)]


Line = RunLine | StepLine | CutLine | StragglerLine | OpsLine


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The profile of one incarnation of a rank."""

    run: RunLine
    steps: tuple[StepLine, ...]
    cuts: tuple[CutLine, ...] = ()
    stragglers: tuple[StragglerLine, ...] = ()
    ops: tuple[OpsLine, ...] = ()


LINE_DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)
"""Of one line. Raises ValueError and RecursionError for one that is damaged."""


def lines_path(directory: Path, rank: int, incarnation: int) -> Path:
    """Return the file of an incarnation of a rank of the run in `directory`."""
    return directory / PROFILE_DIRECTORY / f"rank{rank}-{incarnation}.jsonl"


def old_path(path: Path) -> Path:
    """Return the name that a full file gets."""
    return path.with_name(f"{path.name}.old")


def read_profiles(directory: Path) -> list[RankProfile]:
    """Read the profiles of the run in `directory`, by rank and incarnation.

    Raises `UserError` if there is none, or one contradicts itself. Damaged lines are left out.
    """
    paths = sorted((directory / PROFILE_DIRECTORY).glob("rank*.jsonl"))
    if not paths:
        raise UserError(
            f"no profile in {directory}: it is not the directory of a run, or the run had ZBMD_PROFILE=off."
        )
    lives: list[RankProfile] = []
    for path in paths:
        lines: list[Line] = []
        for one in (old_path(path), path):
            if one.exists():
                lines += _read(one)
        lives += _lives(lines, path)
    return sorted(lives, key=lambda life: (life.run.rank, life.run.incarnation))


def _read(path: Path) -> Iterable[Line]:
    most = LINES_BYTES_MAX + LINE_BYTES_MAX
    return read_json_lines(
        path, LINE_DECODER.decode, bytes_max=most, what="profile that is", advice="delete the file"
    )


def _lives(lines: Iterable[Line], path: Path) -> Iterable[RankProfile]:
    run: RunLine | None = None
    steps, cuts, slow, ops = list[StepLine](), list[CutLine](), list[StragglerLine](), list[OpsLine]()
    for line in lines:
        if isinstance(line, RunLine):
            if line.version != VERSION:
                raise UserError(f"{path} has format {line.version}; this version reads format {VERSION}.")
            if run is not None and line != run:
                yield RankProfile(run, tuple(steps), tuple(cuts), tuple(slow), tuple(ops))
                steps, cuts, slow, ops = [], [], [], []
            run = line
        elif run is None:
            continue  # its line was damaged
        elif isinstance(line, CutLine):
            cuts.append(line)
        elif isinstance(line, StragglerLine):
            slow.append(line)
        elif isinstance(line, OpsLine):
            ops.append(line)
        else:
            if line.end_ns < line.begin_ns or sum(line.ns.values()) != line.wall_ns:
                raise UserError(f"{path}: the times of step {line.step} do not add up: delete the file.")
            steps.append(line)
    if run is not None:
        yield RankProfile(run, tuple(steps), tuple(cuts), tuple(slow), tuple(ops))


WARM_UP_STEPS = 1
"""Of each life: its first step has the memory, the files and the programs to make."""
PASSES: tuple[str, ...] = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShare:
    """A unit of the model, over all ranks and steps: ns of its passes, and their FLOPs."""

    name: str
    ns: dict[str, int]
    flops: int
    hardware_flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The steps of one rank: `ns` of each category and of `idle`, `wall_ns` in all, and `held`: the
    activations of the step that held most, or None if unknown.
    """

    rank: int
    steps: int
    wall_ns: int
    step_ns_median: int
    ns: dict[str, int]
    flops: int
    hardware_flops: int
    overlap: Overlap
    peak: float | None
    held: ActivationPeak | None

    def utilisation(self, flops: int) -> float | None:
        """Return the fraction that `flops` are of the peak over the rank's time; None: the peak is
        unknown."""
        if self.peak is None or self.wall_ns == 0:
            return None
        return flops / (self.wall_ns / 1e9 * self.peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All ranks' steps after the first of each incarnation. `categories`: those with any time, idle last."""

    ranks: tuple[RankShare, ...]
    units: tuple[UnitShare, ...]
    categories: tuple[str, ...]
    machines: tuple[MachineDescription, ...]

    @property
    def wall_ns(self) -> int:
        """Return the sum over all ranks."""
        return sum(rank.wall_ns for rank in self.ranks)

    def ns(self, category: str) -> int:
        """Return the sum over all ranks."""
        return sum(rank.ns.get(category, 0) for rank in self.ranks)

    @property
    def overlap(self) -> Overlap:
        """Return the sum over all ranks."""
        return _added([rank.overlap for rank in self.ranks])

    @property
    def hidden(self) -> float | None:
        """Return the fraction of the operations' time during which ranks computed; None without
        operations."""
        found = self.overlap
        return found.hidden_ns / found.under_way_ns if found.under_way_ns else None

    def utilisation(self, of: Callable[[RankShare], int]) -> float | None:
        """Return MFU if `of` gives the model's FLOPs, HFU if it gives the hardware's; None if a peak is
        unknown.
        """
        if any(rank.peak is None for rank in self.ranks) or not self.wall_ns:
            return None
        could = sum(rank.wall_ns / 1e9 * (rank.peak or 0.0) for rank in self.ranks)
        return sum(of(rank) for rank in self.ranks) / could


def summary_of(
    lives: Sequence[RankProfile], peak_of: Callable[[MachineDescription], float | None]
) -> Summary:
    """Sum up all `lives` of a run. `peak_of`: of all processes of a machine together, FLOPs a second.

    Raises `UserError` if there is no step.
    """
    by_rank: dict[int, list[RankProfile]] = {}
    for life in lives:
        by_rank.setdefault(life.run.rank, []).append(life)
    ranks = [share for one in by_rank.values() if (share := _rank(one, peak_of)) is not None]
    if not ranks:
        raise UserError("no rank of this run has finished a step yet: there is nothing to summarise.")
    units = _units(lives)
    present = {name for rank in ranks for name, ns in rank.ns.items() if ns}
    return Summary(
        ranks=tuple(ranks),
        units=units,
        categories=tuple(name for name in (*CATEGORIES, IDLE) if name in present or name == IDLE),
        machines=tuple(sorted({life.run.machine for life in lives})),
    )


def counted(life: RankProfile) -> tuple[StepLine, ...]:
    """Return the steps that count: all but the first, if there are others."""
    return life.steps[WARM_UP_STEPS:] or life.steps


def _rank(
    lives: Sequence[RankProfile], peak_of: Callable[[MachineDescription], float | None]
) -> RankShare | None:
    steps = [step for life in lives for step in counted(life)]
    if not steps:
        return None
    run = lives[-1].run
    peak = run.peak
    if peak is None:
        together = peak_of(run.machine)
        peak = None if together is None else together / run.ranks_on_host
    ns: dict[str, int] = {}
    for step in steps:
        for name, took in step.ns.items():
            ns[name] = ns.get(name, 0) + took
    return RankShare(
        rank=run.rank,
        steps=len(steps),
        wall_ns=sum(step.wall_ns for step in steps),
        step_ns_median=int(np.median([step.wall_ns for step in steps])),
        ns=ns,
        flops=sum(step.flops for step in steps),
        hardware_flops=sum(step.hardware_flops for step in steps),
        overlap=_added([step.overlap for step in steps if step.overlap is not None]),
        peak=peak,
        held=max(
            (step.held for step in steps if step.held is not None), key=lambda one: one.nbytes, default=None
        ),
    )


def _units(lives: Sequence[RankProfile]) -> tuple[UnitShare, ...]:
    names = lives[0].run.units
    totals: list[UnitShare] = []
    for place, unit in enumerate(names):
        ns, flops, again = dict.fromkeys(PASSES, 0), 0, 0
        for life in lives:
            own = life.run.units[place] if place < len(life.run.units) else unit
            for step in counted(life):
                for name in PASSES:
                    ns[name] += _at(step.unit_ns.get(name, ()), place)
                forward, backward, recompute = (_at(step.passes.get(name, ()), place) for name in PASSES)
                flops += forward * own.forward + backward * own.backward
                again += backward * own.again + recompute * own.forward
        totals.append(UnitShare(name=unit.name, ns=ns, flops=flops, hardware_flops=flops + again))
    return tuple(totals)


def _at(values: Sequence[int], place: int) -> int:
    return values[place] if place < len(values) else 0


def _added(every: Sequence[Overlap]) -> Overlap:
    return Overlap(
        under_way_ns=sum(one.under_way_ns for one in every),
        waited_ns=sum(one.waited_ns for one in every),
        hidden_ns=sum(one.hidden_ns for one in every),
    )
