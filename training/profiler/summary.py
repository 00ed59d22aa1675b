"""Summarise the profiles of a run: shares of its steps' time, FLOPs, and use of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zbmd.training.autograd._spans import CATEGORIES
from zbmd.training.profiler.lines import IDLE, ActivationPeak, Overlap, RankProfile, StepLine
from zbmd.training.profiler.peak import MachineDescription
from zbmd.transport.errors import UserError

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
