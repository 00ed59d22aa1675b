"""The guards of a host: the one that supervises its ranks, and those that stand for their rank to its end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO, TypeAlias

import structlog

from zbmd.actors.cluster.jobs.reports import HostEvent, Observer, RankDown
from zbmd.actors.process.exit import EXIT_FAILED
from zbmd.actors.process.output import LineWriter, LiveSink, OutputLine, PlainOutput, StreamName
from zbmd.tools.node.guard.messages import (
    PACKET_BYTES_MAX,
    Here,
    RankEnded,
    Reported,
    Signalled,
    accepted,
    connected,
    decode_ended,
    decode_reported,
    encode,
    listening,
    received,
)
from zbmd.tools.node.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from zbmd.transport.errors import DeadlineExceeded, RemoteProtocolError, UserError
from zbmd.transport.host.process import peer_of

log: Final = structlog.stdlib.get_logger("zbmd.node.guard")

SIGNAL_EXIT_BASE: Final = 128
ABSENT_NAMED_MAX: Final = 8
STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")
LAUNCHER_S: Final = 1.0
"""For a launcher to see that a guard has failed; torchrun looks every 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSignalled:
    """The guard of a rank of this host has received a signal."""

    local_rank: int
    number: signal.Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLost:
    """The guard of a rank of this host has ended before its rank."""

    local_rank: int

    @property
    def reason(self) -> str:
        """The reason why the run ends, for people."""
        return f"the process that stands for local rank {self.local_rank} of this host has ended"


GuardEvent: TypeAlias = GuardSignalled | GuardLost
OnGuard: TypeAlias = Callable[[GuardEvent], None]


@dataclass(slots=True)
class _Guard:
    """A guard, also the own one, which has no connections.

    code: the exit code of the last process of its rank; has_failed: whether that failed by itself.
    """

    connections: list[socket.socket] = field(default_factory=list[socket.socket])
    streams: list[TextIO] = field(default_factory=list[TextIO])
    """Its standard output and error."""
    code: int = 0
    has_failed: bool = False
    is_told: bool = False


class GuardedOutput:
    """A `LiveSink` that gives each line to the writer of its rank's guard. others: takes the rest.

    writers: by local rank; count: of ranks on this host. A debugger has the terminal of the first guard.
    """

    def __init__(self, others: LiveSink, writers: Mapping[int, LineWriter], count: int) -> None:
        self._others, self._writers, self._count = others, writers, count

    def _of(self, line: OutputLine) -> LiveSink:
        return self._writers.get(line.rank % self._count, self._others)

    async def write_line(self, line: OutputLine) -> None:
        """See `OutputSink`."""
        await self._of(line).write_line(line)

    def show_unfinished(self, line: OutputLine, *, rewritten: bool) -> None:
        """See `LiveSink`."""
        self._of(line).show_unfinished(line, rewritten=rewritten)

    def lend_terminal(self, *, is_back: bool) -> None:
        """See `LiveSink`."""
        self._others.lend_terminal(is_back=is_back)

    async def close(self) -> None:
        """Write what is queued for guards. A stalled one is given up, as `LineWriter.close` says."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))


def _are_ours(streams: Sequence[TextIO]) -> bool:
    """Return whether these are the files of the standard output and error of this process."""
    with suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or has no file
        pairs = zip(streams, (sys.stdout, sys.stderr), strict=True)
        return all(os.path.sameopenfile(one.fileno(), own.fileno()) for one, own in pairs)
    return False


class Guards:
    """The other guards of this host, from local rank 1 on. Use within `open`, on a running loop.

    address: see `address_of_guards`; count: of ranks on this host; patience_s: how long guards may take to
    come.
    """

    def __init__(self, address: str, count: int, patience_s: float) -> None:
        self.count, self._address, self._patience_s = count, address, patience_s
        self._own = _Guard()
        self._others = {local_rank: _Guard() for local_rank in range(1, count)}
        self._loop = asyncio.get_running_loop()
        self._all_here: asyncio.Future[None] = self._loop.create_future()
        self._on_event: OnGuard | None = None
        self._waiting: list[GuardEvent] = []
        self._sockets: list[socket.socket] = []
        self._output: GuardedOutput | None = None

    @contextmanager
    def open(self) -> Generator[None]:
        """Be there for the others. Raises `UserError`."""
        listener = listening(self._address, 0)
        self._sockets.append(listener)
        self._loop.add_reader(listener, self._accept, listener)
        try:
            for local_rank in self._others:
                if (connection := connected(self._address, local_rank)) is not None:
                    self._watch(connection)
            yield
        finally:
            for each in self._sockets:
                self._loop.remove_reader(each)
                each.close()
            for stream in (stream for guard in self._others.values() for stream in guard.streams):
                with suppress(OSError):
                    stream.close()
            self._all_here.cancel()

    async def gathered(self) -> None:
        """Wait until all guards of this host are there. Raises `DeadlineExceeded`, and `UserError`."""
        self._note_all_here()
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(self._all_here)
        except TimeoutError:
            absent = [str(rank) for rank, guard in self._others.items() if not guard.connections]
            more = f" and {len(absent) - ABSENT_NAMED_MAX} more" if absent[ABSENT_NAMED_MAX:] else ""
            raise DeadlineExceeded(
                f"local rank {', '.join(absent[:ABSENT_NAMED_MAX])}{more} of this host has no guard: "
                f"expected {self.count} within {self._patience_s:g} s. See what the launcher says, or raise "
                "--join-timeout"
            ) from None

    def variables(self) -> list[dict[str, str]]:
        """Return for each rank of this host the variables that its launcher gave to its guard alone."""
        own, found = _environment_of(os.getpid()), list[dict[str, str]]([{}])
        for guard in self._others.values():
            pid = peer_of(guard.connections[0])[0] if guard.connections else 0
            found.append(_different(_environment_of(pid), own))
        return found

    @contextmanager
    def heard(self, on_event: OnGuard) -> Generator[None]:
        """Call `on_event` for what happens to guards, also for what has happened before."""
        self._on_event = on_event
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            on_event(event)
        try:
            yield
        finally:
            self._on_event = None

    def happened(self, event: HostEvent) -> None:
        """Take what happened to a rank of this host: the guard of one that has finished ends."""
        if not isinstance(event, RankDown):
            return
        guard = self._others.get(event.rank % self.count, self._own)
        guard.code = event.code if event.code >= 0 else SIGNAL_EXIT_BASE - event.code
        guard.has_failed = not event.normal and not event.expected
        if event.normal:
            self._tell(guard, 0)

    def output(self, others: LiveSink) -> GuardedOutput:
        """Return the output of the ranks of this host: each through its guard, that of this one to `others`.

        Guards with the same file or pipe have one writer, which keeps lines apart.
        """
        if self._output is None:
            writers = {
                local_rank: LineWriter(plain.emit, release=plain.release)
                for local_rank, guard in self._others.items()
                if len(guard.streams) == len(STREAMS) and not _are_ours(guard.streams)
                for plain in [PlainOutput(to=dict(zip(STREAMS, guard.streams, strict=True)))]
            }
            self._output = GuardedOutput(others, writers, self.count)
        return self._output

    def observer(self, others: Observer) -> Observer:
        """Return an observer of a host that is `happened`, and then `others`."""

        async def observe(event: HostEvent) -> None:
            self.happened(event)
            await others(event)

        return observe

    async def over(self, code: int) -> int:
        """Have the guards that are left exit, each as its rank; return what this one exits with.

        code: of the run. If it failed, the guards of the ranks that failed by themselves are the first, since
        a launcher reports the first that ends.
        """
        if self._output is not None:
            await self._output.close()
        if code and not self._own.has_failed:
            first = [guard for guard in self._others.values() if guard.has_failed]
            for guard in first:
                self._tell(guard, guard.code)
            if first:
                await asyncio.sleep(LAUNCHER_S)  # most launchers end this process meanwhile
        for guard in self._others.values():
            self._tell(guard, (guard.code or code) if code else 0)
        return (self._own.code or code) if code else 0

    def _tell(self, guard: _Guard, code: int) -> None:
        if not guard.is_told:
            guard.is_told = True
            for connection in guard.connections:
                with suppress(OSError):
                    connection.send(encode(RankEnded(code=code)))

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._watch(accepted(listener))
        except (OSError, UserError) as error:
            log.warning("a process was not taken for a guard", reason=str(error))

    def _watch(self, connection: socket.socket) -> None:
        self._sockets.append(connection)
        self._loop.add_reader(connection, self._readable, connection)

    def _readable(self, connection: socket.socket) -> None:
        try:
            packet, streams = received(connection)
        except BlockingIOError:
            return
        except OSError:
            packet, streams = b"", []
        try:
            if packet:
                self._reported(connection, decode_reported(packet), streams)
                return
        except RemoteProtocolError as error:
            log.warning("a guard is not listened to any more", reason=str(error))
        self._loop.remove_reader(connection)
        for local_rank, guard in self._others.items():
            if connection in guard.connections and not guard.is_told:
                guard.is_told = True
                self._put(GuardLost(local_rank=local_rank))

    def _reported(self, connection: socket.socket, reported: Reported, streams: list[TextIO]) -> None:
        match reported:
            case Here(local_rank=local_rank):
                if local_rank not in self._others:
                    raise RemoteProtocolError(
                        f"a guard of local rank {local_rank} is on this host, which has {self.count} ranks"
                    )
                guard = self._others[local_rank]
                guard.connections.append(connection)
                guard.streams = guard.streams or streams
                self._note_all_here()
            case Signalled(number=number):
                for local_rank, guard in self._others.items():
                    if connection in guard.connections:
                        self._put(GuardSignalled(local_rank=local_rank, number=_signal(number)))

    def _note_all_here(self) -> None:
        if not self._all_here.done() and all(guard.connections for guard in self._others.values()):
            self._all_here.set_result(None)

    def _put(self, event: GuardEvent) -> None:
        if self._on_event is None:
            self._waiting.append(event)
        else:
            self._on_event(event)


def hearing(guards: Guards | None, on_event: OnGuard) -> AbstractContextManager[None]:
    """Return `guards.heard`, or without guards a context in which nothing is heard."""
    return nullcontext() if guards is None else guards.heard(on_event)


class StopRequests:
    """Tell a second request of one user to end from the signals of a launcher to each of its processes."""

    def __init__(self) -> None:
        self._asked: set[int] = set()

    def ask(self, local_rank: int) -> bool | None:
        """Note a request that came to a guard: None if there is nothing new, True if to end at once."""
        again, first = local_rank in self._asked, not self._asked
        self._asked.add(local_rank)
        return again if again or first else None


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError:
        raise RemoteProtocolError(
            f"a guard of this host reports the signal {number}: there is none"
        ) from None


def _environment_of(pid: int) -> Mapping[str, str]:
    """Return the variables that a process was started with; none if it cannot be seen."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = [os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry]
    return {name: value for name, separator, value in entries if separator}


def _different(variables: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if own.get(name) != value}


SIGNALS_READ_MAX: Final = 64


def follow(address: str, local_rank: int, *, patience_s: float, signals: Sequence[str] = ()) -> int:
    """Wait for the end of a rank that the guard of local rank 0 supervises; return its exit code.

    address: see `address_of_guards`; patience_s: how long that guard may take to come; signals: names of
    more signals to pass on. Raises `DeadlineExceeded`, `UserError`.
    """
    with _Follower(address, local_rank, signals) as follower:
        return follower.wait(time.monotonic() + patience_s)


class _Follower:
    """The sockets of one guard, and the signals that it has received."""

    def __init__(self, address: str, local_rank: int, signals: Sequence[str]) -> None:
        self._local_rank = local_rank
        self._numbers = (*STOP_SIGNALS, *FORWARDED_SIGNALS, *(signal.Signals[name] for name in signals))
        self._asked = 0
        """The first signal that ends the run."""
        self._listener = listening(address, local_rank)
        self._connections: list[socket.socket] = []
        self._woken, self._wakes = socket.socketpair()
        for each in (self._woken, self._wakes):
            each.setblocking(False)
        if (connection := connected(address, 0)) is not None:
            self._greet(connection)

    def __enter__(self) -> _Follower:
        signal.set_wakeup_fd(self._wakes.fileno())
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for each in (self._listener, self._woken, self._wakes, *self._connections):
            each.close()

    def wait(self, end_s: float) -> int:
        """Return the exit code; see `follow`."""
        while True:
            left_s = None if self._connections else max(0.0, end_s - time.monotonic())
            watched = [self._listener, self._woken, *self._connections]
            ready = select.select(watched, [], [], left_s)[0]
            if not ready:
                raise DeadlineExceeded(
                    f"local rank {self._local_rank} has a guard, and local rank 0 of this host has none: "
                    "expected the launcher to start both. See what it says, or raise --join-timeout"
                )
            for each in ready:
                code = self._taken(each)
                if code is not None:
                    return code

    def _taken(self, ready: socket.socket) -> int | None:
        """Take what is there; return the exit code once it is known."""
        if ready is self._listener:
            self._greet(accepted(self._listener))
        elif ready is self._woken:
            return self._signalled(ready.recv(SIGNALS_READ_MAX))
        else:
            try:
                packet = ready.recv(PACKET_BYTES_MAX + 1)
            except ConnectionResetError:
                packet = b""
            if packet:
                return decode_ended(packet).code
            if self._asked:
                return 128 + self._asked
            print(
                "zbmd.torch.run: the guard of local rank 0 has ended before the ranks of this host, which "
                "end with it",
                file=sys.stderr,
            )
            return EXIT_FAILED
        return None

    def _greet(self, connection: socket.socket) -> None:
        self._connections.append(connection)
        streams = [number for number, stream in ((1, sys.stdout), (2, sys.stderr)) if stream is not None]
        socket.send_fds(connection, [encode(Here(local_rank=self._local_rank))], streams)

    def _signalled(self, numbers: bytes) -> int | None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._asked = self._asked or number
            if self._connections:
                try:
                    self._connections[0].send(encode(Signalled(number=number)))
                except OSError:
                    continue  # it has just ended: that is read next
            elif number in STOP_SIGNALS:
                return 128 + number
        return None
