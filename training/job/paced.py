"""When the checkpoints of a job are due: the driver of `CheckpointPace`, and its records.

The lowest rank decides by its own measurements, and asks all others in its vote (`Wish.CHECKPOINT`): all
begin after the step that the vote was for, whatever their clocks say. Others measure as well, to go on as the
lowest one. `metrics.jsonl` has the pace of each checkpoint, and a run that is resumed goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import msgspec

from zbmd.training.checkpoint.pace import (
    AUTO,
    Begun,
    CheckpointPace,
    Dropped,
    Every,
    Note,
    Pace,
    PaceEvent,
    Stepped,
    WorkLost,
    Written,
)
from zbmd.training.job.records import METRICS_NAME, last_values
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

KIND = "checkpoint_every"
"""The first field of a `Pace`, and so of a line of the records."""
LOSS = "loss"
NotePace: TypeAlias = "Callable[[int, Mapping[str, float], bool], None]"
NS = 1e9


def require_every(every: Every, option: str) -> None:
    """Raise `UserError` for an interval that there is not. option: its name for users."""
    if every != AUTO and (not isinstance(every, int) or every < 0):
        raise UserError(f"{option}: expected auto or 0 or more steps, got {every}")


class PaceClock:
    """Measures the steps and checkpoints of a run in `directory`, and notes its pace. For one thread.

    first: the step that the run begins with. begins: whether this rank begins the run, and does not replace
    another. note: called with the step, the values of a line of the records, and whether to say them.
    Construct it before the records of steps after `first` are dropped: they are steps that were lost.
    """

    def __init__(
        self,
        directory: Path,
        first: int,
        *,
        hosts: int,
        begins: bool,
        note: NotePace,
    ) -> None:
        path = directory / METRICS_NAME
        values = last_values(path, KIND, until=first if begins and first else None)
        last = int(last_values(path, LOSS).get("step", 0)) if begins and first else 0
        self._at = max(first, int(values.get("step", 0)))
        self._machine = CheckpointPace(hosts=hosts, step=self._at, known=_pace_of(values))
        self._note = note
        self._step_ns = self._apart_ns = self._begun_ns = self._stall_ns = 0
        self._untold = self._machine.handle(WorkLost()) if last > first else []

    def is_due(self, step: int) -> bool:
        """Return whether this rank would write a checkpoint after `step`."""
        return self._machine.is_due(step)

    def stepped(self) -> None:
        """A step has ended, or the first one begins."""
        now = now_ns()
        if self._step_ns:
            self._take(Stepped((now - self._step_ns - self._apart_ns) / NS))
        self._step_ns, self._apart_ns = now, 0
        untold, self._untold = self._untold, []
        self._tell(untold)

    @contextmanager
    def stalling(self) -> Generator[None]:
        """Count the time of the block as a stall of the checkpoint under way."""
        begin_ns = now_ns()
        try:
            yield
        finally:
            took_ns = now_ns() - begin_ns
            self._stall_ns += took_ns
            self._apart_ns += took_ns

    def begun(self, step: int) -> None:
        """A checkpoint of `step` begins, before its stalls."""
        self._at, self._begun_ns, self._stall_ns = step, now_ns(), 0
        self._take(Begun(step))

    def written(self, *, beside: bool) -> None:
        """The checkpoint that was begun last is durable. beside: it was written beside a step."""
        stall_s = self._stall_ns / NS if beside else None
        self._take(Written(self._at, stall_s, (now_ns() - self._begun_ns) / NS))

    def cut(self) -> None:
        """A rank is lost: the step under way has no end, nor has a checkpoint under way."""
        self._step_ns = 0
        self.dropped()

    def dropped(self) -> None:
        """The checkpoint that was begun last will not be durable."""
        self._take(Dropped())

    def _take(self, event: PaceEvent) -> None:
        self._tell(self._machine.handle(event))

    def _tell(self, notes: Sequence[Note]) -> None:
        for note in notes:
            self._note(self._at, msgspec.structs.asdict(note.pace), note.changed)


def _pace_of(values: Mapping[str, float]) -> Pace | None:
    """Return the pace in a line of the records; None if there is none."""
    found = {name: values.get(name, -1.0) for name in Pace.__struct_fields__}
    if found[KIND] < 1 or not all(0.0 <= each < math.inf for each in found.values()):
        return None
    return Pace(checkpoint_every=int(found.pop(KIND)), **found)


class Pacing:
    """When checkpoints of a job are due: each `every` steps or, for `AUTO`, at the pace of a clock.

    For the training thread. make: makes the clock; note: as of `PaceClock`.
    """

    def __init__(self, every: Every, make: Callable[..., PaceClock], *, note: NotePace) -> None:
        self._clock = make(note=note) if every == AUTO else None
        self._every = 0 if every == AUTO else every
        self._begun: int | None = None
        """The version whose checkpoint is under way, as far as the clock knows."""
        self._beside = False
        """Whether a step has begun since the checkpoint under way has."""

    def begin_step(self, step: int, *, decides: bool) -> bool:
        """Step `step` begins; return whether to ask all for a checkpoint then, if that is for this rank."""
        self._beside = True
        if self._clock is None:
            return False
        self._clock.stepped()
        return decides and self._clock.is_due(step)

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint of `version` is due without being asked for."""
        return self._every > 0 and version % self._every == 0

    def begun(self, version: int) -> None:
        """A checkpoint begins, before its stalls."""
        self._begun, self._beside = version, False
        if self._clock is not None:
            self._clock.begun(version)

    def stalling(self) -> AbstractContextManager[None]:
        """Count the time of the block as a stall of the checkpoint under way."""
        return nullcontext() if self._clock is None else self._clock.stalling()

    def look(self, *, pending: int | None, published: int | None) -> None:
        """Tell the clock if the checkpoint under way has ended: the versions are those that all know of."""
        begun = self._begun
        if begun is None or pending == begun:
            return
        self._begun = None
        if self._clock is not None and published == begun:
            self._clock.written(beside=self._beside)
        elif self._clock is not None:
            self._clock.dropped()

    def cut(self) -> None:
        """The epoch is over, and with it a checkpoint under way."""
        self._begun = None
        if self._clock is not None:
            self._clock.cut()
