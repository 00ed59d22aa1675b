"""Several slots that compute together: one shard of a step is one message to all of them.

They share one turn, and nothing stands between a unit and its operators: the unit calls the kernel of the
attached actor. A direct call for each of the hundred ops of a shard cost 4 µs each, because everything that a
call touches had left the caches. Which op failed is determined after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zbmd.training.autograd.tape import Tape
from zbmd.training.model_actors.slot import ATTEMPTS_MAX, CALLER_ERRORS, ActorSlot, RestartsExhausted, Turn

R = TypeVar("R")


class SlotVacated(Exception):
    """An actor detached during a joint call: the result does not count."""


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

    def call(
        self,
        work: Callable[[Tape], R],
        new_tape: Callable[[], Tape],
        blame: Callable[[Tape], ActorSlot[Any] | None],
    ) -> R:
        """Return `work(new_tape())`, computed by all attached actors while none of them handles other calls.

        If an op or a unit fails, the actor in the slot `blame(tape)` ends (None: the error is the caller's).
        Once its next incarnation is attached, all of `work` is repeated on a new tape, because backward rules
        overwrite their inputs. Raises `RestartsExhausted`, and what `ActorSlot.call` raises.
        """
        last, failed = "an actor ended", set[ActorSlot[Any]]()
        for _ in range(ATTEMPTS_MAX):
            if self._absent:
                self._wait_for_all()
            if not self.turn.lock.acquire(False):
                self.turn.take()
            self._vacated = False
            tape = new_tape()
            try:
                if self._absent:
                    continue
                result = work(tape)
                if not self._vacated:
                    for slot in failed:
                        slot.worked()
                    return result
                continue
            except SlotVacated:
                continue
            except CALLER_ERRORS:
                raise
            except Exception as error:  # let it crash: it is told to its supervisor
                at_work = blame(tape)
                if at_work is None:
                    raise
                actor = at_work.actor
                if actor is not None:
                    at_work.failed(actor, error)
                    failed.add(at_work)
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
