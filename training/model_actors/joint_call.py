"""Several slots that compute together: one pass of a step is one message to all of them.

They share one turn, and nothing stands between a unit and its operators: the unit calls the kernel of the
attached actor. A direct call for each of the hundred ops of a pass cost 4 µs each, because everything that a
call touches had left the caches. Which op failed is determined after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from zbmd.collectives.errors import OperationAborted
from zbmd.training.autograd.tape import Parameter, Tape
from zbmd.training.model_actors.slot import ATTEMPTS_MAX, CALLER_ERRORS, ActorSlot, RestartsExhausted, Turn
from zbmd.transport.errors import DeadlineExceeded, PeerLost

R = TypeVar("R")

GROUP_ERRORS: Final = (PeerLost, OperationAborted, DeadlineExceeded)
"""Raised by collectives inside a unit: they end the step, and are no failure of an actor."""


class SlotVacated(Exception):
    """An actor detached during a joint call: the result does not count."""


@dataclass(slots=True)
class Attempt:
    """One run of a joint computation. number: from 0; tape, parameters: those that it computes with;
    unit: what is computed, if nothing is on a tape."""

    number: int
    unit: int = 0
    tape: Tape | None = None
    parameters: Sequence[Parameter] = ()


class JointCall:
    """The slots that one computation needs. Add them with `join` before any actor attaches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = Turn()
        """The turn of all of them."""
        self.slots: tuple[ActorSlot[Any], ...] = ()
        self._absent = 0  # written on the loop
        self._vacated = False

    def join(self, slots: Sequence[ActorSlot[Any]]) -> None:
        """Add slots, which were made with this turn."""
        self.slots = (*self.slots, *slots)
        self._absent += len(slots)
        for slot in slots:
            assert slot.turn is self.turn, f"{slot.name} has a turn of its own"
            slot.on_change.append(self._changed)

    def call(self, work: Callable[[Attempt], R], blame: Callable[[Attempt], ActorSlot[Any] | None]) -> R:
        """Return `work(attempt)`, computed by all attached actors while none of them handles other calls.

        If an op or a unit fails, the actor in the slot `blame(attempt)` ends (None: the error is the
        caller's). Once its next incarnation is attached, all of `work` is repeated: it must not have changed
        what it computes from. Raises `RestartsExhausted`, and what `ActorSlot.call` raises.
        """
        last, failed = "an actor ended", list[ActorSlot[Any]]()
        for number in range(ATTEMPTS_MAX):
            if self._absent:
                self._wait_for_all()
            if not self.turn.lock.acquire(False):
                self.turn.take()
            self._vacated = False
            attempt = Attempt(number)
            try:
                if self._absent:
                    continue
                result = work(attempt)
                if not self._vacated:
                    for slot in set(failed):
                        slot.worked()
                    return result
                continue
            except SlotVacated:
                continue
            except (*CALLER_ERRORS, *GROUP_ERRORS):
                raise
            except Exception as error:  # let it crash: it is told to its supervisor
                at_work = blame(attempt)
                if at_work is None:
                    raise
                actor = at_work.actor
                if actor is not None:
                    at_work.failed(actor, error)
                    failed.append(at_work)
                    last = at_work.last_failure
            finally:
                self.turn.give()
            if actor is not None:
                at_work.wait_for_next(actor)
        raise RestartsExhausted(
            f"{self.name} was interrupted {ATTEMPTS_MAX} times in a row; the last: {last}"
        )

    def _wait_for_all(self) -> None:
        for slot in self.slots:
            slot.wait()

    def _changed(self, sits: bool) -> None:
        if sits:
            self._absent -= 1
        else:
            self._absent += 1
            self._vacated = True
