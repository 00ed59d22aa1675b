"""Several seats that compute together: a shard of a step is one message to all of them.

They share one turn, and nothing stands between a unit and its operators: what the unit calls is the kernel of
who sits there. A direct call for each of the hundred ops of a shard had cost 4 us each, since whatever a call
touches has left the caches since the last one. Whose op it was that failed is found out when one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zbmd.training.autograd.tape import Tape
from zbmd.training.model_actors.slot import ANSWERS, ATTEMPTS_MAX, GivenUp, Seat
from zbmd.training.model_actors.turn import Turn

R = TypeVar("R")


class Vacated(Exception):
    """Somebody left a seat while the crew was at work: what it has done does not count."""


class Crew:
    """The seats that one computation needs. Join them before anybody sits down."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = Turn()
        """Whose turn it is at all of them."""
        self.seats: tuple[Seat[Any], ...] = ()
        self._absent = 0  # written on the loop
        self._vacated = False

    def join(self, seats: Sequence[Seat[Any]]) -> None:
        """These compute together; they were made with this crew's turn."""
        self.seats = (*self.seats, *seats)
        self._absent += len(seats)
        for seat in seats:
            assert seat.turn is self.turn, f"{seat.name} has a turn of its own"
            seat.on_change.append(self._changed)

    def call(
        self,
        work: Callable[[Tape], R],
        new_tape: Callable[[], Tape],
        whose: Callable[[Tape], Seat[Any] | None],
    ) -> R:
        """Return `work(new_tape())`, done by all who sit here while nobody of them is called by others.

        If an op or a unit fails, its actor, at the seat `whose(tape)`, ends (None: it is the caller's to
        know); once its next life is there all of `work` is done again, on a new tape, since backward rules
        use up what they are given. Raises `GivenUp`, and what `Seat.call` raises.
        """
        last, failed = "somebody left", set[Seat[Any]]()
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
                    for seat in failed:
                        seat.worked()
                    return result
                continue
            except Vacated:
                continue
            except ANSWERS:
                raise
            except Exception as error:  # let it crash: it is told to its supervisor
                at_work = whose(tape)
                if at_work is None:
                    raise
                life = at_work.life
                if life is not None:
                    at_work.failed(life, error)
                    failed.add(at_work)
                    last = at_work.last_failure
            finally:
                self.turn.give()
            if life is not None:
                at_work.wait_behind(life)
        raise GivenUp(f"{self.name} was interrupted {ATTEMPTS_MAX} times in a row; the last: {last}")

    def _wait_for_all(self) -> None:
        for seat in self.seats:
            seat.wait()

    def _changed(self, sits: bool) -> None:
        if sits:
            self._absent -= 1
        else:
            self._absent += 1
            self._vacated = True
