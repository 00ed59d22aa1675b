"""Sans-I/O: what a snapshot process holds, for whom, and when it ends.

    ATTACHED ──launcher lost, memory held──▶ ORPHANED ──another launcher, same identity──▶ ATTACHED
        │ finish, or launcher lost with nothing held     │ drop, or the time without a launcher is over
        └──────────────────────────▶ ENDED ◀─────────────┘

While work on the memory is under way, such as a checkpoint, what would end it leads to ENDING instead, where
work waits for no other host, and to ENDED when the work is over; a drop does not wait.

Memory is a handle of the driver's. Each handle that comes in is kept for one rank or released, never both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.actors.snapshots.messages import (
    FORMAT,
    Answer,
    Attach,
    Drop,
    Dropped,
    Finish,
    Hold,
    Holds,
    JobIdentity,
    Look,
    Memory,
    Refused,
    Request,
    Standing,
    Work,
)
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A client has sent a request. pid: its process; memory: the handle that came with it, if one did."""

    client: int
    pid: int
    request: Request
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLost:
    """A client's connection has ended."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Work on the memory is under way, or that is over (`is_busy` is false)."""

    is_busy: bool


Event: TypeAlias = Asked | ClientLost | TimerFired | Working


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send `answer` to a client, with the descriptor of `memory` if that is not None."""

    client: int
    answer: Answer
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Close the descriptor of `memory`."""

    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Perform:
    """Do the work that a client asks for. arguments: a handle, which belongs to that work from now on."""

    client: int
    payload: bytes
    arguments: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A client that has asked for work is lost: it says no more."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hasten:
    """The process is to end: work under way is to wait for nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End the process: all memory goes with it. reason: for its log."""

    reason: str


Action: TypeAlias = Reply | Release | Perform | Leave | Hasten | End | SetTimer


class HolderState(Enum):
    """The state of the machine."""

    ATTACHED = "attached"
    ORPHANED = "orphaned"
    ENDING = "ending"
    ENDED = "ended"


class Holder:
    """The machine of one snapshot process. client, pid: the launcher that has started it."""

    def __init__(self, job: int, identity: JobIdentity, idle_ns: int, *, client: int, pid: int) -> None:
        if job <= 0 or idle_ns <= 0:
            raise LocalProtocolError(f"job {job}, {idle_ns} ns without a launcher: both must be positive")
        self.job, self.identity, self.idle_ns = job, identity, idle_ns
        self.state = HolderState.ATTACHED
        self.held: dict[int, int] = {}
        """The memory of each rank."""
        self._launcher, self._pid = client, pid
        self._is_busy = False
        self._working = set[int]()
        """The clients that have asked for work."""
        self._reason = ""
        """Why it ends, once work is over."""
        self._until_ns = 0
        """While it is orphaned, when it ends."""

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take `event` and return the actions.

        Raises `RemoteProtocolError` for a request that its client must not send; the driver then closes the
        connection and the memory that came with it.
        """
        match event:
            case Asked():
                actions = self._asked(event, now_ns)
            case ClientLost(client=client):
                actions = self._lost(client, now_ns)
            case TimerFired():
                due = self.state is HolderState.ORPHANED and now_ns >= self._until_ns
                actions = self._end_later("no launcher came for it") if due else []
            case Working(is_busy=is_busy):
                self._is_busy = is_busy
                is_over = self.state is HolderState.ENDING and not is_busy
                actions = self._end(self._reason) if is_over else []
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        handles = list(self.held.values())
        assert len(set(handles)) == len(handles), "one memory is held for two ranks"
        assert all(0 <= rank < self.identity.ranks for rank in self.held), "memory of a rank outside the job"
        assert self.state is not HolderState.ENDING or self._is_busy, "it ends, and nothing is waited for"
        assert (self._until_ns > 0) == (self.state is HolderState.ORPHANED), "only an orphan has a deadline"
        assert self.state is not HolderState.ORPHANED or self.held, (
            "an orphan that holds nothing ends at once"
        )
        assert self.state is not HolderState.ENDED or not self.held, "memory is held after the end"

    def _asked(self, event: Asked, now_ns: int) -> list[Action]:
        client, request, memory = event.client, event.request, event.memory
        may = isinstance(request, Hold | Work)
        if (memory is not None and not may) or (memory is None and isinstance(request, Hold)):
            raise RemoteProtocolError(
                f"{type(request).__name__} with {'no' if memory is None else 'a'} descriptor"
            )
        if self.state is HolderState.ENDED:
            return [] if memory is None else [Release(memory=memory)]
        match request:
            case Attach():
                return self._attach(client, event.pid, request, now_ns)
            case Hold(rank=rank):
                assert memory is not None
                return self._hold(client, rank, memory)
            case Finish():
                self._require_launcher(client, request)
                return self._end_later("its job has ended")
            case Look():
                if problem := _wrong_format(request.format):
                    return [Reply(client=client, answer=Refused(reason=problem))]
                return self._standing(client, now_ns)
            case Work(payload=payload):
                if self.state is HolderState.ENDING:
                    raise RemoteProtocolError(f"work for a process that ends: {self._reason}")
                self._working.add(client)
                return [Perform(client=client, payload=payload, arguments=memory)]
            case Drop():
                return self._drop(client, request)
            case _:
                assert_never(request)

    def _attach(self, client: int, pid: int, request: Attach, now_ns: int) -> list[Action]:
        problem, fields = _wrong_format(request.format), tuple(self.identity.differences(request.identity))
        if self.state is HolderState.ENDING:
            problem, fields = f"it ends: {self._reason}", ()
        elif self.state is HolderState.ATTACHED:
            problem, fields = f"process {self._pid} runs this job", ()
        elif fields and not problem:
            problem = f"these snapshots are of another {', '.join(fields)}"
        if problem:
            return [Reply(client=client, answer=Refused(reason=problem, fields=fields))]
        self.state, self._until_ns = HolderState.ATTACHED, 0
        self._launcher, self._pid = client, pid
        return self._standing(client, now_ns)

    def _standing(self, client: int, now_ns: int) -> list[Action]:
        orphaned = self.state is HolderState.ORPHANED
        standing = Standing(
            job=self.job,
            identity=self.identity,
            ranks=tuple(sorted(self.held)),
            launcher=0 if orphaned else self._pid,
            idle_ns=self.idle_ns,
            left_ns=max(0, self._until_ns - now_ns) if orphaned else self.idle_ns,
        )
        actions: list[Action] = [Reply(client=client, answer=standing)]
        for rank in standing.ranks:
            actions.append(Reply(client=client, answer=Memory(rank=rank), memory=self.held[rank]))
        return actions

    def _hold(self, client: int, rank: int, memory: int) -> list[Action]:
        self._require_launcher(client, Hold(rank=rank))
        if rank >= self.identity.ranks:
            raise RemoteProtocolError(f"memory of rank {rank}: the job has {self.identity.ranks} ranks")
        before = self.held.get(rank)
        self.held[rank] = memory
        actions: list[Action] = [] if before is None else [Release(memory=before)]
        return [*actions, Reply(client=client, answer=Holds(rank=rank))]

    def _drop(self, client: int, request: Drop) -> list[Action]:
        problem = _wrong_format(request.format)
        if self.state is HolderState.ATTACHED:
            problem = f"process {self._pid} runs the job of these snapshots: stop it first"
        if problem:
            return [Reply(client=client, answer=Refused(reason=problem))]
        return [Reply(client=client, answer=Dropped()), *self._end("a user dropped it")]

    def _require_launcher(self, client: int, request: Request) -> None:
        if self.state is not HolderState.ATTACHED or client != self._launcher:
            raise RemoteProtocolError(f"{type(request).__name__} of a process that does not run the job")

    def _lost(self, client: int, now_ns: int) -> list[Action]:
        left: list[Action] = [Leave(client=client)] if client in self._working else []
        self._working.discard(client)
        if self.state is not HolderState.ATTACHED or client != self._launcher:
            return left
        if not self.held:
            return [*left, *self._end("its launcher ended before there was anything to hold")]
        self.state, self._until_ns = HolderState.ORPHANED, now_ns + self.idle_ns
        return [*left, SetTimer(at_ns=self._until_ns)]

    def _end_later(self, reason: str) -> list[Action]:
        if not self._is_busy:
            return self._end(reason)
        self.state, self._until_ns, self._reason = HolderState.ENDING, 0, reason
        return [Hasten()]

    def _end(self, reason: str) -> list[Action]:
        released: list[Action] = [Release(memory=memory) for memory in self.held.values()]
        self.state, self._until_ns = HolderState.ENDED, 0
        self.held.clear()
        return [*released, End(reason=reason)]


def _wrong_format(found: int) -> str:
    return "" if found == FORMAT else f"its messages have format {FORMAT}, and not {found}"
