"""When to write the next checkpoint: an interval that follows what the run measures.

The interval is that of Young and Daly (`intervals.optimum_s`), for the stall of the checkpoints so far and
the failures that were recovered from one. Their rate starts as a prior, a Gamma distribution:

    rate ~ Gamma(SHAPE, SHAPE · PRIOR_MTBF_S / hosts)     mean: one failure a host in PRIOR_MTBF_S
    after k failures in t seconds:  1/MTBF = (SHAPE + k) / (SHAPE · PRIOR_MTBF_S / hosts + t)

A lost rank whose state another rank or the host's memory has is no failure here: it costs no work. One is
counted when a run goes on from a checkpoint, and steps after it had been logged.

Pure: all times are in the events. One rank decides, and announces in its vote when all write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, assert_never

import msgspec

from zbmd.training.checkpoint.intervals import Failing, optimum_s, snapped_steps
from zbmd.transport.errors import LocalProtocolError, UserError

AUTO: Final = "auto"
Every: TypeAlias = int | Literal["auto"]
"""Steps between two checkpoints, 0: only at the end; or `AUTO`."""
FIRST_STEPS: Final = 10
"""The first checkpoint is written after so many steps: its stall is the first that is measured."""
PRIOR_MTBF_S: Final = 30 * 86_400.0
"""Of one host. Clusters report more (264 days a host of 8 accelerators in Llama 3, arXiv:2407.21783), but
also people, schedulers and power cuts end a run."""
SHAPE: Final = 0.1
"""The prior weighs as much as a tenth of a failure: the first one seen outweighs it."""
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 3_600.0
"""No interval is longer, whatever the rate: an hour is the most work that a failure costs."""
CHANGE: Final = 0.1
"""An interval is kept until the optimum differs by more: the cost is flat there, 0.5 % of it for 10 %."""
STALLS_KEPT: Final = 0.9
STEPS_KEPT: Final = 0.99
"""Each new value makes the weight of the earlier ones so much less: a mean of the last 10 and 100."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step was done. took_s: its time, without the stalls of checkpoints."""

    took_s: float


@dataclass(frozen=True, slots=True)
class Begun:
    """All ranks have begun to write the checkpoint of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Written:
    """The checkpoint of `step`, begun last, is durable.

    stall_s: training has waited so long for it; None: not measured, because a step waited for all of it.
    latency_s: from its beginning until it was durable.
    """

    step: int
    stall_s: float | None
    latency_s: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """The checkpoint that was begun will not be written: a rank was lost."""


@dataclass(frozen=True, slots=True)
class WorkLost:
    """The run goes on from a checkpoint, after a failure that has cost the steps since then."""


PaceEvent: TypeAlias = Stepped | Begun | Written | Dropped | WorkLost


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """An interval and the numbers that it follows from; times in seconds.

    checkpoint_every: in steps. stall_s, latency_s, step_s: decayed means, 0 before the first was measured.
    failures: that were recovered from a checkpoint, in `run_s` of steps and stalls.
    """

    checkpoint_every: int
    stall_s: float
    latency_s: float
    step_s: float
    mtbf_s: float
    failures: float
    run_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """Action: note the pace in the records of the run. changed: the interval is another one, say so."""

    pace: Pace
    changed: bool


@dataclass(slots=True)
class _Mean:
    """A mean in which each value makes all earlier ones weigh `kept` times as much as before."""

    kept: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.total * self.kept + value
        self.weight = self.weight * self.kept + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


def parse_every(text: str) -> Every:
    """Return the interval that a text gives. Raises `UserError`."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise UserError(f"expected auto or a number of steps, got {text!r}") from None


def mtbf_s(failures: float, run_s: float, hosts: int) -> float:
    """Return the inverse of the rate that is expected after so many failures, see the module."""
    return (SHAPE * PRIOR_MTBF_S / hosts + run_s) / (SHAPE + failures)


class CheckpointPace:
    """The machine. hosts: of the job. step: of the last checkpoint. known: the last pace of this run."""

    def __init__(self, *, hosts: int, step: int = 0, known: Pace | None = None) -> None:
        self._hosts, self._last, self._every = hosts, step, FIRST_STEPS
        self._writing: int | None = None
        self._stall, self._latency = _Mean(STALLS_KEPT), _Mean(STALLS_KEPT)
        self._step = _Mean(STEPS_KEPT)
        self._failures = self._run_s = 0.0
        if known is not None:
            self._every, self._failures, self._run_s = known.checkpoint_every, known.failures, known.run_s
            self._stall.add(known.stall_s)
            self._latency.add(known.latency_s)
            self._step.add(known.step_s)

    @property
    def pace(self) -> Pace:
        """Return the pace now."""
        return Pace(
            checkpoint_every=self._every,
            stall_s=self._stall.value,
            latency_s=self._latency.value,
            step_s=self._step.value,
            mtbf_s=mtbf_s(self._failures, self._run_s, self._hosts),
            failures=self._failures,
            run_s=self._run_s,
        )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is to be written after `step`."""
        return self._writing is None and step - self._last >= self._every

    def handle(self, event: PaceEvent) -> list[Note]:
        """Take an event. Raises `LocalProtocolError` for one that cannot follow."""
        match event:
            case Stepped(took_s):
                self._step.add(took_s)
                self._run_s += took_s
            case Begun(step):
                self._writing = step
            case Dropped():
                self._writing = None  # and the next step is due again
            case Written(step, stall_s, latency_s):
                return self._written(step, stall_s, latency_s)
            case WorkLost():
                self._failures += 1
                changed = self._retuned()
                return [Note(self.pace, changed)]
            case _:
                assert_never(event)
        return []

    def _written(self, step: int, stall_s: float | None, latency_s: float) -> list[Note]:
        if step != self._writing:
            raise LocalProtocolError(f"the checkpoint of step {step} has ended, {self._writing} was begun")
        self._writing, self._last = None, step
        if stall_s is None:
            return []
        self._stall.add(stall_s)
        self._latency.add(latency_s)
        self._run_s += stall_s
        changed = self._retuned()
        return [Note(self.pace, changed)]

    def _retuned(self) -> bool:
        """Follow the optimum; return whether it is another interval."""
        now = self.pace
        if not now.step_s or not self._stall.weight:
            return False
        failing = Failing(
            mtbf_s=now.mtbf_s, stall_s=now.stall_s, restart_s=now.latency_s, latency_s=now.latency_s
        )
        least_s = max(now.latency_s, SHORTEST_S)
        wanted_s = max(least_s, min(optimum_s(now.stall_s, now.mtbf_s), LONGEST_S))
        every = snapped_steps(wanted_s, now.step_s, failing, least_s=least_s)
        if abs(every - self._every) <= CHANGE * self._every:
            return False
        self._every = every
        return True

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state is impossible."""
        assert self._every >= 1 and self._failures >= 0 and self._run_s >= 0
        assert self._writing is None or self._writing >= self._last
