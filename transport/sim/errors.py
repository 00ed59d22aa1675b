"""Errors of the asyncio simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbmd.transport.errors import LocalProtocolError, ZbmdError


class NotSimulated(LocalProtocolError):
    """There is no real I/O, signal or thread in a simulation."""


class Livelock(ZbmdError):
    """Callbacks keep running and virtual time stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A task that has not ended, and where it waits."""

    process: str
    task: str
    frames: tuple[str, ...]
    """The outermost await first, as `file:line in function`."""

    def __str__(self) -> str:
        return f"{self.process} {self.task}: " + " > ".join(self.frames)


class Deadlock(ZbmdError):
    """Nothing can run and no timer is set, while tasks wait: nothing will ever happen again.

    `waiting` says what every task waits for.
    """

    def __init__(self, waiting: Sequence[Waiting]) -> None:
        lines = "\n".join(f"    {task}" for task in waiting) or "    (no task is left)"
        super().__init__(f"nothing can run and no timer is set; {len(waiting)} tasks wait:\n{lines}")
        self.waiting = tuple(waiting)
