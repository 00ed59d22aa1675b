"""Accepts connections and sees each through its hello, bounded in number and time. Shared by all listeners.

The listener survives what a stranger or the machine may do to it: a flood is let in no faster than places
become free (`half_open`), and when descriptors run out it says so once and goes on when there are some.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

import structlog

from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.handshake.hello import HungUp
from zbmd.transport.host import process as descriptors
from zbmd.transport.native._native import now_ns

# Half-open connections: those that have not proved themselves yet, and which of them gives way first.
#
# There are a bounded number of places. When all are taken and another connection knocks, the oldest
# connection of the source that holds the most places loses its own: so a stranger who opens many and says
# nothing, or says it slowly, drives out himself, and not a peer with one. A connection keeps its place for
# `fair_ns` in any case, far longer than an honest hello takes; until then the next one waits in the kernel's
# queue. That keeps a crowd of honest peers, all dialing at once, from driving each other out. Pure; time is
# an argument.

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Generic[KeyT]):
    """The next connection may be taken in, once `evict` has been closed, if it is given."""

    evict: KeyT | None = None
    source: str = ""
    """Of the evicted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitUntil:
    """Take nobody in before `until_ns`, or before somebody has left."""

    until_ns: int


Decision: TypeAlias = Admit[KeyT] | WaitUntil


class HalfOpen(Generic[KeyT]):
    """The connections under way, by key; each has a source, such as its address. places: how many at most."""

    def __init__(self, *, places: int, fair_ns: int) -> None:
        self._places = places
        self._fair_ns = fair_ns
        self._sources: dict[str, dict[KeyT, int]] = {}
        self._source_of: dict[KeyT, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._source_of

    @property
    def full(self) -> bool:
        """Whether the next one needs the place of another."""
        return len(self) >= self._places

    def decide(self, now_ns: int) -> Decision[KeyT]:
        """Whether one more can be taken in, and who goes for it; who goes has left by then."""
        if not self.full:
            return Admit()
        # Of equally crowded sources the one whose first connection is the oldest.
        source, keys = min(
            self._sources.items(), key=lambda item: (-len(item[1]), next(iter(item[1].values())))
        )
        key, since_ns = next(iter(keys.items()))
        if now_ns - since_ns < self._fair_ns:
            return WaitUntil(until_ns=since_ns + self._fair_ns)
        self.leave(key)
        return Admit(evict=key, source=source)

    def enter(self, key: KeyT, source: str, now_ns: int) -> None:
        """A connection was taken in; after `decide` said so."""
        assert key not in self._source_of and not self.full
        self._source_of[key] = source
        self._sources.setdefault(source, {})[key] = now_ns

    def leave(self, key: KeyT) -> None:
        """Its hello is over, however. Idempotent."""
        source = self._source_of.pop(key, None)
        if source is not None:
            keys = self._sources[source]
            del keys[key]
            if not keys:
                del self._sources[source]

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the bound or the two views do not hold."""
        assert len(self) <= self._places
        by_source = {key: source for source, keys in self._sources.items() for key in keys}
        assert by_source == self._source_of
        assert all(self._sources.values()), "a source without a connection"


log: Final = structlog.stdlib.get_logger("zbmd.transport.listener")

ACCEPTS_PER_WAKE: Final = 16
EXHAUSTED_PAUSE_NS: Final = 50_000_000
"""After descriptors have run out."""
HALF_OPEN_FAIR_NS: Final = 50_000_000
"""Time for which a half-open connection keeps its place against newcomers; a hello takes a few ms."""
REFUSALS_LOGGED_MAX: Final = 32
"""In each `REFUSALS_WINDOW_NS`; the others are counted, so that a flood does not fill a disk."""
REFUSALS_WINDOW_NS: Final = 10_000_000_000

_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Evicted(ZbmdError):
    """A connection gave up its place to others."""

    def __init__(self) -> None:
        super().__init__("its hello was not done when others needed its place")


class Acceptor(ABC):
    """Serves listening sockets on the running loop until closed. Owns them. A transport's listener derives.

    name: of the listener, for the log; places: how many may be in the middle of their hello.
    """

    def __init__(self, name: str, sockets: Sequence[socket.socket], *, places: int) -> None:
        self.name = name
        self._sockets = list(sockets)
        self._half_open: HalfOpen[asyncio.Task[None]] = HalfOpen(places=places, fair_ns=HALF_OPEN_FAIR_NS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._exhausted = False
        self._window_ns = 0
        self._window_refusals = 0
        self._resume()

    @abstractmethod
    async def _welcome(self, sock: socket.socket, source: str) -> None:
        """See one connection through: the non-blocking socket becomes its own.

        Raises nothing, and closes the socket when it is cancelled.
        """

    @abstractmethod
    def _source_of(self, sock: socket.socket) -> str:
        """Name where a connection comes from: those of one source count together. Raises `OSError`."""

    @property
    def half_open(self) -> int:
        """Return how many connections are in the middle of their hello."""
        return len(self._half_open)

    def _refused(self, error: Exception, **who: object) -> None:
        """Log that a connection was refused, unless too many were in this window."""
        at_ns = now_ns()
        if at_ns - self._window_ns >= REFUSALS_WINDOW_NS:
            untold = max(0, self._window_refusals - REFUSALS_LOGGED_MAX)
            self._window_ns, self._window_refusals = at_ns, 0
            if untold:
                log.warning("more connections were refused", listener=self.name, count=untold)
        self._window_refusals += 1
        if self._window_refusals <= REFUSALS_LOGGED_MAX:
            # A process of ours that ends in its hello hangs up, too; its parent reports that.
            tell = log.info if isinstance(error, HungUp | PeerLost | ConnectionError) else log.warning
            kind = type(error).__name__
            tell("connection refused", listener=self.name, kind=kind, reason=str(error), **who)

    def close(self) -> None:
        """Stop listening and end the connections under way; links already made live on. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections under way have ended, after `close`."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self) -> None:
        self._pause = None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._on_connection, sock)

    def _pause_for(self, duration_ns: int) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._pause = self._loop.call_later(duration_ns / 1e9, self._resume)

    def _on_connection(self, listening: socket.socket) -> None:
        for knocks in range(ACCEPTS_PER_WAKE):
            if knocks and self._half_open.full:
                return  # only the first is known to have somebody behind it for whom to make room
            at_ns = now_ns()
            match self._half_open.decide(at_ns):
                case WaitUntil(until_ns=until_ns):
                    self._pause_for(until_ns - at_ns)
                    return
                case Admit(evict=evict, source=source):
                    if evict is not None:
                        evict.cancel()
                        self._refused(Evicted(), source=source)
            sock = self._accept(listening)
            if sock is None:
                return
            self._enter(sock, at_ns)

    def _accept(self, listening: socket.socket) -> socket.socket | None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            # accept(2) also reports errors of the connection itself, which are not ours.
            if error.errno in _EXHAUSTED:
                if not self._exhausted:
                    log.error("no connection can be accepted", listener=self.name, reason=_advice(error))
                self._exhausted = True
                self._pause_for(EXHAUSTED_PAUSE_NS)
            return None
        if self._exhausted:
            self._exhausted = False
            log.warning("connections are accepted again", listener=self.name)
        sock.setblocking(False)
        return sock

    def _enter(self, sock: socket.socket, at_ns: int) -> None:
        try:
            source = self._source_of(sock)
        except OSError:  # it has gone already
            sock.close()
            return
        task = self._loop.create_task(self._welcome(sock, source))
        self._tasks.add(task)
        self._half_open.enter(task, source, at_ns)
        task.add_done_callback(lambda done: self._leave(done, sock))

    def _leave(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        if task.cancelled():
            sock.close()  # it may have been cancelled before it had begun
        self._tasks.discard(task)
        self._half_open.leave(task)
        if self._pause is not None and not self._exhausted:
            self._pause.cancel()
            self._resume()


def _advice(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return descriptors.advice(error.errno)
    return "this machine has no memory left for sockets"
