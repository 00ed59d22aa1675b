"""Sans-I/O: one rank's step under ZeRO, stages 1 to 3, over reduce-scatter and all-gather.

Stage 1 shares out optimizer state, stage 2 gradients too, stage 3 also weights, which are then gathered
just in time, at most `prefetch` units ahead, and released behind their use.

What is sent to the group follows from how far this rank's own computation is, never from when an operation
ends, so that all ranks send the same operations in the same order. The update is the one thing that changes
the state, and comes when every reduction has ended: a step that is abandoned before has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError

PREFETCH_MAX = 64
REDUCING_MAX = 2
"""Gradients of units that are on their way while the next one is computed: who computes faster than the group
reduces waits, for their memory is not in what the stage promises."""


class State(Enum):
    """The progress of the step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCING = "reducing"
    NORM = "norm"
    UPDATING = "updating"
    SHARING = "sharing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Begin a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The weights of `unit` are here: all of them, from all ranks."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The pass asked for last is done."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """This rank's part of the gradient of `unit` is the sum over all ranks."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShared:
    """The norm of the whole gradient is known, the same on all ranks. Not `usable`: the step is skipped."""

    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """This rank's shard is updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A rank of the group is lost, or has given up: no operation of this epoch will end."""

    reason: str


Event = Begin | Gathered | Computed | Reduced | NormShared | Updated | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """All-gather the weights of `unit` into memory of their own (stage 3) or in place (1 and 2)."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give back the memory of the gathered weights of `unit`."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Compute `unit` forwards."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Compute `unit` backwards; its whole gradient is in memory afterwards."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Reduce-scatter the gradient of `unit`; what of it the stage does not keep is given back then."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareNorm:
    """Sum the parts' squares over all ranks, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Update this rank's shard of masters, moments and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The step is done; with `skipped` it changed nothing."""

    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Drain what is under way and release `units`. With `torn`, this rank's state is already that of the next
    step, and others may still be at this one: the group has to find out which version it goes on from.
    """

    units: tuple[int, ...]
    torn: bool
    reason: str


Action = Gather | Release | Forward | Backward | Reduce | ShareNorm | Update | Finished | Abandon


class ZeroStep:
    """The machine of one rank's steps. `units`: how many there are; `prefetch`: units gathered ahead, ≥ 1."""

    def __init__(self, *, stage: int, units: int, prefetch: int = 1) -> None:
        if stage not in (1, 2, 3) or units < 1 or not 1 <= prefetch <= PREFETCH_MAX:
            raise LocalProtocolError(f"invalid ZeRO step: stage {stage}, {units} units, prefetch {prefetch}")
        self.stage = stage
        self.units = units
        self.prefetch = prefetch
        self.state = State.IDLE
        self._turn = 0
        self._computing = False
        self._here: set[int] = set()
        self._coming: set[int] = set()
        self._reducing: set[int] = set()
        self._reduced: set[int] = set()

    @property
    def held(self) -> int:
        """Units whose gathered weights take memory, or are about to."""
        return len(self._here) + len(self._coming)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take `event` and say what follows. Raises `LocalProtocolError` for one out of place."""
        actions: list[Action]
        match event:
            case Begin():
                actions = self._begin()
            case Gathered(unit=unit):
                actions = self._gathered(unit)
            case Computed(unit=unit):
                actions = self._computed(unit)
            case Reduced(unit=unit):
                actions = self._take_reduced(unit)
            case NormShared(usable=usable):
                self._expect(State.NORM, event)
                self.state = State.UPDATING if usable else State.IDLE
                actions = [Update() if usable else Finished(skipped=True)]
            case Updated():
                actions = self._updated()
            case Lost(reason=reason):
                actions = self._lost(reason)
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if what must always hold does not."""
        assert not self._here & self._coming, "a unit that is here is gathered again"
        assert not self._reducing & self._reduced, "a unit was reduced twice"
        assert len(self._reducing) <= REDUCING_MAX, "more gradients are on their way than may be"
        if self.state in (State.FORWARD, State.BACKWARD):
            assert 0 <= self._turn < self.units
            if self.stage == 3:
                assert self.held <= self.prefetch + 1, "more units are gathered than may be"
                assert not self._computing or self._turn in self._here, "a unit is computed that is not here"
        if self.state in (State.NORM, State.UPDATING):
            assert len(self._reduced) == self.units, "an update that lacks a gradient"
        if self.state is State.IDLE:
            assert not (self._here or self._coming or self._reducing or self._computing)

    def _expect(self, state: State, event: Event) -> None:
        if self.state is not state:
            raise LocalProtocolError(
                f"{event} came in state {self.state.value}, and belongs to {state.value}"
            )

    def _begin(self) -> list[Action]:
        self._expect(State.IDLE, Begin())
        self.state, self._turn, self._reduced = State.FORWARD, 0, set()
        ahead = [self._gather(unit) for unit in range(min(self.prefetch + 1, self.units))]
        return [*(action for actions in ahead for action in actions), *self._compute()]

    def _gather(self, unit: int) -> list[Action]:
        if self.stage < 3 or not 0 <= unit < self.units or unit in self._here:
            return []
        self._coming.add(unit)
        return [Gather(unit=unit)]

    def _release(self, unit: int) -> list[Action]:
        if self.stage < 3:
            return []
        self._here.remove(unit)
        return [Release(unit=unit)]

    def _compute(self) -> list[Action]:
        """Compute the unit whose turn it is, if its weights are here and nothing is in the way."""
        if self._computing or (self.stage == 3 and self._turn not in self._here):
            return []
        if self.state is State.BACKWARD and len(self._reducing) >= REDUCING_MAX:
            return []
        self._computing = True
        unit = self._turn
        return [Forward(unit=unit) if self.state is State.FORWARD else Backward(unit=unit)]

    def _gathered(self, unit: int) -> list[Action]:
        if unit not in self._coming:
            raise LocalProtocolError(f"unit {unit} came and was not asked for, in state {self.state.value}")
        self._coming.remove(unit)
        if self.state is State.SHARING:
            return self._finish_if_shared()
        self._here.add(unit)
        return self._compute() if unit == self._turn else []

    def _computed(self, unit: int) -> list[Action]:
        if not self._computing or unit != self._turn:
            raise LocalProtocolError(f"unit {unit} was not to be computed, in state {self.state.value}")
        self._computing = False
        if self.state is State.FORWARD:
            return self._forward_done(unit)
        return self._backward_done(unit)

    def _forward_done(self, unit: int) -> list[Action]:
        if unit < self.units - 1:
            self._turn += 1
            return [*self._release(unit), *self._gather(unit + self.prefetch + 1), *self._compute()]
        self.state = State.BACKWARD  # the last unit stays: it is the first on the way back
        ahead = [self._gather(unit - 1 - place) for place in range(self.prefetch)]
        return [*(action for actions in ahead for action in actions), *self._compute()]

    def _backward_done(self, unit: int) -> list[Action]:
        self._reducing.add(unit)
        actions = [*self._release(unit), Reduce(unit=unit)]
        actions += self._gather(unit - self.prefetch - 1)
        if unit > 0:
            self._turn -= 1
            return [*actions, *self._compute()]
        self.state = State.REDUCING
        return [*actions, *self._norm_if_reduced()]

    def _take_reduced(self, unit: int) -> list[Action]:
        if unit not in self._reducing:
            raise LocalProtocolError(f"unit {unit} was not being reduced, in state {self.state.value}")
        self._reducing.remove(unit)
        self._reduced.add(unit)
        return self._compute() if self.state is State.BACKWARD else self._norm_if_reduced()

    def _norm_if_reduced(self) -> list[Action]:
        if self.state is not State.REDUCING or self._reducing:
            return []
        self.state = State.NORM
        return [ShareNorm()]

    def _updated(self) -> list[Action]:
        self._expect(State.UPDATING, Updated())
        if self.stage == 3:
            self.state = State.IDLE
            return [Finished(skipped=False)]
        self.state = State.SHARING
        self._coming = set(range(self.units))
        return [Gather(unit=unit) for unit in range(self.units)]

    def _finish_if_shared(self) -> list[Action]:
        if self._coming:
            return []
        self.state = State.IDLE
        return [Finished(skipped=False)]

    def _lost(self, reason: str) -> list[Action]:
        if self.state is State.IDLE:
            return []
        torn = self.state in (State.UPDATING, State.SHARING)
        released = tuple(sorted(self._here | self._coming)) if self.stage == 3 else ()
        self.state, self._computing = State.IDLE, False
        self._here, self._coming, self._reducing = set(), set(), set()
        return [Abandon(units=released, torn=torn, reason=reason)]


# ---- capture


def _build_zero(config: Mapping[str, Any]) -> ZeroStep:
    return ZeroStep(stage=config["stage"], units=config["units"], prefetch=config["prefetch"])


ZERO_STEP: MachineKind[Event, Action] = register(
    "zero-step", 1, _build_zero, events=Event, actions=Action, states=(ZeroStep,)
)
