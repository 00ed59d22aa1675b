"""The time of a run by cause: each second of each rank has one, and they add up to all of it.

A rank's time begins with the run and ends with it. Its steps tell what they took (`zbmd.training.profiler`),
and its cuts when a loss ended one without its result:

    … step 7 │ step 8 ✗ ─ recomputed ─ │ detection │ repair │ step 8 │ …          a rank that lives
    … step 7 │ step 8 ✗ ─ recomputed ─ │ restart            │ step 8 │ …          the one that died

All that a cut step had done counts as recomputed if the step is done again, also where the next attempt goes
back further. A rank that waits in operations of its groups longer than the one that waits least waits for
slower ranks: that is straggler wait, and what all of them wait is useful communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from zbmd.training.profiler.lines import IDLE, RankProfile, StepLine, read_profiles
from zbmd.transport.errors import UserError


class Cause(StrEnum):
    """The cause of a second of a rank."""

    USEFUL = "useful step"
    RECOMPUTED = "recomputed step"
    DETECTION = "detection"
    REPAIR = "repair"
    RESTART = "restart"
    CHECKPOINT = "checkpoint stall"
    DATA = "waiting for data"
    STRAGGLER = "straggler wait"
    START_UP = "start-up"
    IDLE = "idle"


IN_STEPS: Final = {"checkpoint": Cause.CHECKPOINT, "data": Cause.DATA, "bubble": Cause.IDLE, IDLE: Cause.IDLE}
"""The causes of categories of the profiler; others are useful."""
WAITED: Final = "comm"

Times = dict[Cause, int]


class Span(NamedTuple):
    """A part of a rank's time; ns since the epoch."""

    cause: Cause
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Ranks that were lost, one shortly after the other, and when all that live began a step again.

    began_again_ns: None if they did not. Times in ns since the epoch.
    """

    ranks: tuple[int, ...]
    died_ns: int
    began_again_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """The time of one run. ranks: of each rank by cause, in ns, of `end_ns` - `begin_ns` each."""

    begin_ns: int
    end_ns: int
    ranks: dict[int, Times]
    failures: tuple[Failure, ...]

    @property
    def wall_ns(self) -> int:
        """The time of each rank."""
        return self.end_ns - self.begin_ns

    @property
    def down_ns(self) -> int:
        """For how long no step was under way after a loss."""
        return sum(
            (self.end_ns if one.began_again_ns is None else one.began_again_ns) - one.died_ns
            for one in self.failures
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The time of one or more runs, of which each goes on from the one before.

    `ns`: rank time by cause; all of them are `rank_ns`. `ettr`: the effective training time ratio, the useful
    part of it. `between_ns`: between runs. `mttr_s`: mean time from a loss to the next step. `mtbf_s`: wall
    time per loss. `availability`: the part of the wall time that was not spent after a loss or between runs.
    """

    runs: tuple[RunTime, ...]
    ns: Times
    rank_ns: int
    wall_ns: int
    between_ns: int
    failures: int
    ettr: float
    mttr_s: float | None
    mtbf_s: float | None
    availability: float

    @property
    def nines(self) -> float:
        """Return the nines of the availability; infinite if it is 1."""
        return math.inf if self.availability >= 1 else -math.log10(1 - self.availability)


@dataclass(slots=True)
class _Rank:
    """The incarnations of a rank, in order, and what is known of their ends."""

    lives: list[RankProfile]
    died_ns: dict[int, int] = field(default_factory=dict[int, int])
    """By incarnation."""


def _shift(life: RankProfile) -> int:
    """Return what to add to times of a rank's clock for times since the epoch."""
    return life.run.unix_ns - life.run.monotonic_ns


def _began(life: RankProfile) -> int:
    return (life.run.process_ns or life.run.monotonic_ns) + _shift(life)


def read_runs(directories: Sequence[Path]) -> list[RunTime]:
    """Return where the time of the runs in these directories went.

    Directories of one run, of which each host may have its own, have other ranks at the same time. Raises
    `UserError` for a directory without a profile, and a run in which no rank has ended a step.
    """
    found: list[tuple[list[RankProfile], Path]] = []
    for lives, directory in sorted(
        ((read_profiles(one), one) for one in directories), key=lambda read: min(map(_began, read[0]))
    ):
        before = found[-1][0] if found else []
        ranks = {life.run.rank for life in before}
        ended = max((line.end_ns + _shift(life) for life in before for line in life.steps), default=0)
        if min(map(_began, lives)) < ended and ranks.isdisjoint(life.run.rank for life in lives):
            before += lives
        else:
            found.append((lives, directory))
    return [time_of(lives, directory) for lives, directory in found]


def time_of(lives: Sequence[RankProfile], directory: Path) -> RunTime:
    """Return where the time of a run went, given its profiles. Raises `UserError` if there is no step."""
    ranks: dict[int, _Rank] = {}
    for life in sorted(lives, key=lambda one: (one.run.rank, one.run.incarnation, one.run.monotonic_ns)):
        ranks.setdefault(life.run.rank, _Rank([])).lives.append(life)
    ends = [line.end_ns + _shift(life) for life in lives for line in life.steps]
    if not ends:
        raise UserError(f"{directory}: no rank of this run has finished a step yet.")
    begin_ns, end_ns = min(map(_began, lives)), max(ends)
    for life in lives:
        for death in (death for cut in life.cuts for death in cut.deaths):
            if (rank := ranks.get(death.rank)) is not None:
                at_ns = death.at_ns + _shift(life)
                rank.died_ns[death.incarnation] = min(rank.died_ns.get(death.incarnation, at_ns), at_ns)
    waited = _least_waits(lives)
    spans = {number: list(_spans(rank, begin_ns, end_ns, waited)) for number, rank in sorted(ranks.items())}
    return RunTime(
        begin_ns=begin_ns,
        end_ns=end_ns,
        ranks={number: _summed(found) for number, found in spans.items()},
        failures=tuple(_failures(ranks)),
    )


def _summed(spans: Sequence[Span]) -> Times:
    return {
        cause: sum(span.end_ns - span.begin_ns for span in spans if span.cause is cause) for cause in Cause
    }


def _least_waits(lives: Sequence[RankProfile]) -> dict[int, int]:
    """Return the least wait of any rank in each step that more than one rank did, by its last attempts."""
    last: dict[int, dict[int, int]] = {}
    for life in lives:
        for line in life.steps:
            last.setdefault(line.step, {})[life.run.rank] = line.ns.get(WAITED, 0)
    return {step: min(by_rank.values()) for step, by_rank in last.items() if len(by_rank) > 1}


def _spans(rank: _Rank, begin_ns: int, end_ns: int, waited: Mapping[int, int]) -> Iterator[Span]:
    """Yield what a rank's time was spent on, from `begin_ns` to `end_ns` without a gap."""
    again, at_ns = _done_again(rank.lives), begin_ns
    for number, life in enumerate(rank.lives):
        shift = _shift(life)
        cause = Cause.RESTART if number else Cause.START_UP
        for place, line in enumerate(life.steps):
            start, stop = line.begin_ns + shift, line.end_ns + shift
            if stop <= at_ns:
                continue  # clocks of hosts differ
            if start > at_ns:
                yield Span(cause if place == 0 else Cause.REPAIR, at_ns, start)
            yield from _of_line(line, life, max(start, at_ns), stop, again[number, place], waited)
            at_ns = max(at_ns, stop)
        died_ns = rank.died_ns.get(life.run.incarnation)
        if died_ns is not None and died_ns > at_ns:
            yield Span(Cause.RECOMPUTED, at_ns, min(died_ns, end_ns))
            at_ns = min(died_ns, end_ns)
    if end_ns > at_ns:
        yield Span(Cause.IDLE, at_ns, end_ns)


def _done_again(lives: Sequence[RankProfile]) -> dict[tuple[int, int], bool]:
    """Return, for each life and line, whether the step is done again by the same rank."""
    found: dict[tuple[int, int], bool] = {}
    earliest = math.inf
    for number in reversed(range(len(lives))):
        for place in reversed(range(len(lives[number].steps))):
            step = lives[number].steps[place].step
            found[number, place] = step >= earliest
            earliest = min(earliest, step)
    return found


def _of_line(
    line: StepLine, life: RankProfile, start: int, stop: int, again: bool, waited: Mapping[int, int]
) -> Iterator[Span]:
    """Yield what a step from `start` to `stop` was spent on. again: whether it is done once more."""
    shift = _shift(life)
    cut = next((one for one in life.cuts if line.begin_ns <= one.at_ns < line.end_ns), None)
    if cut is not None:
        left = max(start, cut.at_ns + shift)  # clocks of hosts differ
        died = min((one.at_ns + shift for one in cut.deaths), default=left)
        died = min(max(died, start), left)
        yield Span(Cause.RECOMPUTED if again else Cause.USEFUL, start, died)
        yield Span(Cause.DETECTION, died, left)
        yield Span(Cause.REPAIR, left, stop)
    elif again:
        yield Span(Cause.RECOMPUTED, start, stop)
    else:
        taken = dict.fromkeys(Cause, 0)
        for name, ns in line.ns.items():
            taken[IN_STEPS.get(name, Cause.USEFUL)] += ns
        straggler = max(0, line.ns.get(WAITED, 0) - waited.get(line.step, line.ns.get(WAITED, 0)))
        taken[Cause.USEFUL] -= straggler
        taken[Cause.STRAGGLER] += straggler
        at = start
        for cause, ns in taken.items():
            if ns:
                yield Span(cause, at, min(at + ns, stop))
                at = min(at + ns, stop)


def _failures(ranks: Mapping[int, _Rank]) -> list[Failure]:
    """Return the losses, in order; those before all have begun a step again are one."""
    found: list[Failure] = []
    for at_ns, number in sorted(
        (at, number) for number, rank in ranks.items() for at in rank.died_ns.values()
    ):
        again_ns, last = _began_again(ranks, at_ns), found[-1] if found else None
        if last is not None and (last.began_again_ns is None or at_ns <= last.began_again_ns):
            found[-1] = replace(last, ranks=(*last.ranks, number), began_again_ns=again_ns)
        else:
            found.append(Failure(ranks=(number,), died_ns=at_ns, began_again_ns=again_ns))
    return found


def _began_again(ranks: Mapping[int, _Rank], at_ns: int) -> int | None:
    """Return when the last of those ranks that go on began a step after `at_ns`; None if none does."""
    found: list[int] = []
    for rank in ranks.values():
        begins = (line.begin_ns + _shift(life) for life in rank.lives for line in life.steps)
        after = [one for one in begins if one > at_ns]
        found += [min(after)] if after else []
    return max(found, default=None)


def goodput_of(runs: Sequence[RunTime]) -> Goodput:
    """Sum up runs, in the order of their beginnings; the time between two of them is the user's loss."""
    runs = sorted(runs, key=lambda run: run.begin_ns)
    between = sum(max(0, b.begin_ns - a.end_ns) for a, b in pairwise(runs))
    wall = sum(run.wall_ns for run in runs)
    ns = {cause: sum(times[cause] for run in runs for times in run.ranks.values()) for cause in Cause}
    rank_ns = sum(run.wall_ns * len(run.ranks) for run in runs)
    failures = [one for run in runs for one in run.failures]
    repaired = [one.began_again_ns - one.died_ns for one in failures if one.began_again_ns is not None]
    down = sum(run.down_ns for run in runs)
    return Goodput(
        runs=tuple(runs),
        ns=ns,
        rank_ns=rank_ns,
        wall_ns=wall + between,
        between_ns=between,
        failures=len(failures),
        ettr=ns[Cause.USEFUL] / rank_ns * (wall / (wall + between)),
        mttr_s=sum(repaired) / len(repaired) / 1e9 if repaired else None,
        mtbf_s=wall / len(failures) / 1e9 if failures else None,
        availability=1 - (down + between) / (wall + between),
    )
