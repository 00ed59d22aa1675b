"""The machine of a host's attached ranks (sans-I/O): which process is which rank, and when the last is gone.

The job asks for each of its ranks as it asks a template for a fork (`Wanted`); a process comes and says which
rank it is (`Came`). Once both have happened the process is the rank. The supervisor outlives nobody: it ends
as soon as the process that started it and all that came are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The job wants this incarnation of a rank. variables: for its process."""

    rank: int
    incarnation: int
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """A process with that connection and process id says that it is `rank`."""

    connection: int
    pid: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WentOn:
    """The process of a connection has left the job in order. ends: it ends now."""

    connection: int
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """The kernel reports the end of the process of a connection."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterEnded:
    """The kernel reports the end of the process that started the supervisor."""


Event: TypeAlias = Wanted | Came | WentOn | ProcessEnded | StarterEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Give the process its variables: it is the rank now."""

    connection: int
    rank: int
    incarnation: int
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer that the process is not taken, and close its connection."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd:
    """Report to the job that the rank's process is gone. clean: it had left in order."""

    connection: int
    rank: int
    incarnation: int
    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Forget a process that was no rank yet."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End the supervisor: nobody is left."""


Action: TypeAlias = Admit | Refuse | ReportEnd | Close | End


@dataclass(slots=True)
class _Process:
    """A process that came. incarnation: of its rank, 0 before it is that."""

    rank: int
    pid: int
    incarnation: int = 0
    clean: bool = False


@dataclass(slots=True)
class AttachedRanks:
    """See the module. starter: the process that started the supervisor. Raises `LocalProtocolError`."""

    starter: int
    over: bool = False
    _starter_counts: bool = True
    """Until it has come itself, or has ended."""
    _wanted: dict[int, Wanted] = field(default_factory=dict[int, Wanted])
    _processes: dict[int, _Process] = field(default_factory=dict[int, _Process])

    def handle(self, event: Event) -> list[Action]:
        """Take one event and return what to do, in order."""
        if self.over:
            return []
        actions: list[Action] = []
        match event:
            case Wanted(rank=rank):
                if rank in self._wanted:
                    raise LocalProtocolError(f"rank {rank} is wanted twice at once")
                self._wanted[rank] = event
                actions += self._admitted(rank)
            case Came():
                actions += self._came(event)
            case WentOn(connection=connection, ends=ends):
                actions += self._went_on(connection, ends)
            case ProcessEnded(connection=connection):
                actions += self._gone(connection)
            case StarterEnded():
                self._starter_counts = False
            case _:
                assert_never(event)
        if not self._starter_counts and not self._processes:
            self.over = True
            actions.append(End())
        return actions

    def check_invariants(self) -> None:
        """No two processes are one rank; nobody waits who could be admitted."""
        ranks = [process.rank for process in self._processes.values()]
        assert len(ranks) == len(set(ranks)), ranks
        waiting = {process.rank for process in self._processes.values() if not process.incarnation}
        assert not waiting & self._wanted.keys(), waiting
        assert not self.over or not self._processes

    def _came(self, event: Came) -> list[Action]:
        if event.connection in self._processes:
            raise LocalProtocolError(f"connection {event.connection} comes twice")
        if event.pid == self.starter:
            self._starter_counts = False
        known = next((process for process in self._processes.values() if process.rank == event.rank), None)
        if known is not None:
            reason = (
                f"process {known.pid} of this host is rank {event.rank} already: give each process its own "
                "RANK"
            )
            return [Refuse(connection=event.connection, reason=reason)]
        self._processes[event.connection] = _Process(rank=event.rank, pid=event.pid)
        return self._admitted(event.rank)

    def _admitted(self, rank: int) -> list[Action]:
        """Admit the process that waits to be the rank, if there is one and the rank is wanted."""
        for connection, process in self._processes.items():
            if process.rank == rank and not process.incarnation and rank in self._wanted:
                wanted = self._wanted.pop(rank)
                process.incarnation = wanted.incarnation
                return [
                    Admit(
                        connection=connection,
                        rank=rank,
                        incarnation=wanted.incarnation,
                        variables=wanted.variables,
                    )
                ]
        return []

    def _went_on(self, connection: int, ends: bool) -> list[Action]:
        process = self._processes.get(connection)
        if process is None:
            return []
        process.clean = True
        # A process that ends now may still write to memory that it shares: its end is the kernel's to report.
        return [] if ends else self._gone(connection)

    def _gone(self, connection: int) -> list[Action]:
        process = self._processes.pop(connection, None)
        if process is None:
            return []
        if not process.incarnation:
            return [Close(connection=connection)]
        return [
            ReportEnd(
                connection=connection, rank=process.rank, incarnation=process.incarnation, clean=process.clean
            )
        ]
