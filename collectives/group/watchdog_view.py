"""What the watchdog sees of a group: the operation under way, and how far this rank has come."""

from __future__ import annotations

from collections.abc import Iterator

from zbmd.actors.hangs.progress import Sample
from zbmd.actors.hangs.watchdog import Described, Watched
from zbmd.actors.hangs.wire import PlaceKind, Position
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.flight.recorder import FlightState


class GroupWatch:
    """The operations of one communicator, as a source for the watchdog
    (`zbmd.actors.hangs.watchdog.GroupSource`)."""

    def __init__(self, name: str, communicator: Communicator) -> None:
        self.key = f"group {communicator.channel}/{communicator.epoch}"
        self._name = name
        self._communicator = communicator

    def watched(self) -> Iterator[Watched]:
        """The operation under way, if there is one."""
        flight = self._communicator.flight
        record = flight[-1] if flight else None
        if record is None or record.state is not FlightState.RUNNING:
            return
        # An operation in pieces makes progress with each of them.
        mark = (record.sequence, self._communicator.sequence)
        what = f"{record.operation} #{record.sequence} of {self._communicator.title}"
        described = Described(kind=PlaceKind.OPERATION, who=self._name, what=what)
        yield Watched(sample=Sample(key=self.key, mark=mark), describe=lambda: described)

    def position(self, *, still_ns: int, stuck: bool) -> Position:
        """How far this rank has come."""
        flight = self._communicator.flight
        record = flight[-1] if flight else None
        running = record is not None and record.state is FlightState.RUNNING
        return Position(
            channel=self._communicator.channel,
            epoch=self._communicator.epoch,
            sequence=0 if record is None else record.sequence,
            operation="" if record is None else record.operation,
            running=running,
            stuck=stuck and running,
            still_ns=still_ns if running else 0,
            members=self._communicator.members,
        )
