"""Sans-I/O log of the operations of a group's data plane, and its capture kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationBegan:
    """The data plane began an operation, the `sequence`-th of its group; `began_ns`: monotonic."""

    sequence: int
    operation: str
    algorithm: str
    nbytes: int
    began_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded:
    """It is over. `digest`: XXH3-128 of its results, empty if it has none; `error`: empty if it succeeded."""

    sequence: int
    ended_ns: int
    digest: bytes
    error: str


OperationEvent: TypeAlias = OperationBegan | OperationEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTook:
    """The time that an operation took, ns."""

    operation: str
    took_ns: int


@dataclass(slots=True)
class OperationLog:
    """The operation that a group's data plane runs: one at a time, in call order.

    rank, members, epoch, channel: the group's.
    """

    rank: int
    members: tuple[int, ...]
    epoch: int
    channel: int
    running: OperationBegan | None = None
    done: int = field(default=0)

    def handle(self, event: OperationEvent, *, now_ns: int) -> list[OperationTook]:
        """Take one event. Raises `LocalProtocolError` if an end does not fit the beginning before it."""
        match event:
            case OperationBegan():
                if self.running is not None:
                    raise LocalProtocolError(f"{event} while {self.running} runs")
                self.running = event
                return []
            case OperationEnded():
                running, self.running = self.running, None
                if running is None or running.sequence != event.sequence:
                    raise LocalProtocolError(f"{event} does not end {running}")
                self.done += 1
                return [OperationTook(operation=running.operation, took_ns=event.ended_ns - running.began_ns)]

    def check_invariants(self) -> None:
        """Its own rank is a member, and what runs was begun in order; see `Machine`."""
        assert self.rank in self.members, (self.rank, self.members)


def _build_operations(config: Mapping[str, Any]) -> OperationLog:
    return OperationLog(
        rank=config["rank"],
        members=tuple(config["members"]),
        epoch=config["epoch"],
        channel=config["channel"],
    )


OPERATIONS: MachineKind[OperationEvent, OperationTook] = register(
    "operations", 1, _build_operations, events=OperationEvent, actions=OperationTook, states=(OperationLog,)
)
