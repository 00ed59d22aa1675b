"""Collects what the watchdogs of a host's ranks say, and hands the verdict machine's decisions to the host.

A socket of its own, since a rank's links go over its event loop, which may be what hangs. A process that
connects must be a process of this user, which the kernel proves, and name a rank that lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Final, Protocol, assert_never

import structlog

from zbmd.actors.hangs import verdict
from zbmd.actors.hangs.loop_watch import look_outside
from zbmd.actors.hangs.wire import (
    PACKET_BYTES_MAX,
    Ask,
    Beat,
    Extend,
    FromHost,
    Hello,
    Standing,
    decode_from_rank,
    encode,
)
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.host.process import peer_of

log: Final = structlog.stdlib.get_logger("zbmd.actors.hang")

CONNECTIONS_MAX: Final = 256
"""Ranks of one host, twice over and more: those that end, and those that replace them."""
BACKLOG: Final = 64
PACKETS_A_TURN: Final = 16


def collector_address(node_address: str) -> str:
    """Return where the collector of the host that listens at `node_address` listens."""
    return f"{node_address}-watch"


class HangResponder(Protocol):
    """Carries out a verdict on the host. Called on the loop; must not block."""

    def is_current(self, rank: int, incarnation: int) -> bool:
        """Return whether this incarnation of the rank is one that lives."""
        ...

    def hung(self, notice: verdict.HangNotice) -> None:
        """Tell of it."""
        ...

    def end_rank(self, rank: int, incarnation: int) -> None:
        """Kill this incarnation."""
        ...

    def end_run(self, reason: str) -> None:
        """End the run as failed."""
        ...


class HangPeers(Protocol):
    """The other hosts of the job."""

    @property
    def judges(self) -> bool:
        """Return whether this host judges; if not, it passes on what its watchdogs say."""
        ...

    def host_of(self, rank: int) -> str:
        """Return the display name of a rank's host; empty while there is only one host."""
        ...

    def tell(self, event: verdict.HangEvent) -> None:
        """Pass it on to the host that judges."""
        ...

    def ask(self, action: verdict.RankAction) -> bool:
        """Have another host do it; False if it is not for another one."""
        ...


class _Connection:
    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.rank: tuple[int, int] | None = None
        self.standing: Standing | None = None


class HangCollector:
    """Listens for the watchdogs of one host's ranks; `deadline_ns` 0 makes one that does nothing.

    elsewhere: the other hosts of the job, for one that has several.
    """

    def __init__(
        self,
        node_address: str,
        *,
        deadline_ns: int,
        on_hang: verdict.OnHang,
        desk: HangResponder,
        elsewhere: HangPeers | None = None,
    ) -> None:
        self._address = collector_address(node_address)
        self._desk = desk
        self._elsewhere = elsewhere
        self._deadline_ns = deadline_ns
        self._on_hang = on_hang
        self._machine = verdict.HangMachine(deadline_ns=deadline_ns, on_hang=on_hang) if deadline_ns else None
        self._connections: dict[int, _Connection] = {}
        self._debugged: set[tuple[int, int]] = set()
        """Ranks of this host in a debugger."""
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def notices(self) -> tuple[verdict.HangNotice, ...]:
        """Return the hangs that are not over."""
        return () if self._machine is None else self._machine.notices

    def open(self) -> None:
        """Start to listen and to tick. Raises OSError."""
        if self._machine is None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.bind(f"\0{self._address}")
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)
        self._tick()

    def close(self) -> None:
        """Close every socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def ended(self, rank: int, incarnation: int) -> None:
        """The process is gone."""
        self.debugging(rank, incarnation, is_on=False)
        self._put(verdict.RankGone(rank=rank, incarnation=incarnation))

    def debugging(self, rank: int, incarnation: int, *, is_on: bool) -> None:
        """A rank of this host stops in a debugger, or goes on: meanwhile no rank counts as hanging."""
        if is_on:
            self._debugged.add((rank, incarnation))
            self._put(verdict.RankDebugged(rank=rank, incarnation=incarnation))
        else:
            self._debugged.discard((rank, incarnation))

    def placed(self, *, restarts: bool) -> None:
        """The job's hosts have changed. restarts: the judgement begins again, with what is still so."""
        if self._machine is None:
            return
        if restarts:
            self._machine = verdict.HangMachine(deadline_ns=self._deadline_ns, on_hang=self._on_hang)
        for connection in list(self._connections.values()):
            if connection.rank is None:
                continue
            rank, incarnation = connection.rank
            self._put(self._watched(rank, incarnation))
            if restarts and connection.standing is not None:
                self._put(
                    verdict.RankPosition(rank=rank, incarnation=incarnation, standing=connection.standing)
                )

    def hear(self, event: verdict.HangEvent) -> None:
        """Another host passes this on."""
        self._judge(event)

    def obey(self, action: verdict.RankAction) -> None:
        """The host that judges wants this of a rank here."""
        self._perform(action)

    def _watched(self, rank: int, incarnation: int) -> verdict.RankWatched:
        host = "" if self._elsewhere is None else self._elsewhere.host_of(rank)
        return verdict.RankWatched(rank=rank, incarnation=incarnation, host=host)

    def _tick(self) -> None:
        assert self._machine is not None
        self._timer = self._loop.call_later(self._machine.look_ns / 1e9, self._tick)
        for rank, incarnation in sorted(self._debugged):
            self._put(verdict.RankDebugged(rank=rank, incarnation=incarnation))
        self._put(verdict.Ticked())

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            pid, uid = peer_of(sock)
            if uid != os.getuid() or len(self._connections) >= CONNECTIONS_MAX:
                log.warning("connection of a stranger closed", pid=pid, uid=uid)
                sock.close()
                return
            sock.setblocking(False)
            connection = self._connections[sock.fileno()] = _Connection(sock, pid)
            self._loop.add_reader(sock.fileno(), self._read, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            for _ in range(PACKETS_A_TURN):
                packet = connection.sock.recv(PACKET_BYTES_MAX + 1)
                if not packet:
                    break
                self._take(connection, packet)
            else:
                return  # there may be more, at the next turn
        except BlockingIOError:
            return
        except RemoteProtocolError as error:
            log.warning("connection of a watchdog closed", pid=connection.pid, reason=str(error))
        except OSError as error:
            log.info("connection of a watchdog lost", pid=connection.pid, reason=str(error))
        self._drop(connection)

    def _take(self, connection: _Connection, packet: bytes) -> None:
        message = decode_from_rank(packet)
        if isinstance(message, Hello):
            if connection.rank is not None or not self._desk.is_current(message.rank, message.incarnation):
                raise RemoteProtocolError(f"it says it is rank {message.rank}#{message.incarnation}")
            connection.rank = (message.rank, message.incarnation)
            self._put(self._watched(message.rank, message.incarnation))
            return
        if connection.rank is None:
            raise RemoteProtocolError("it has not said who it is")
        rank, incarnation = connection.rank
        match message:
            case Beat():
                self._put(verdict.RankAlive(rank=rank, incarnation=incarnation))
            case Standing():
                connection.standing = message
                self._put(verdict.RankPosition(rank=rank, incarnation=incarnation, standing=message))
            case _:
                assert_never(message)

    def _drop(self, connection: _Connection) -> None:
        self._loop.remove_reader(connection.sock.fileno())
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        if connection.rank is not None:
            self.ended(*connection.rank)

    def _put(self, event: verdict.HangEvent) -> None:
        """Report an event of this host to the judging host."""
        if self._machine is not None and self._elsewhere is not None and not self._elsewhere.judges:
            self._elsewhere.tell(event)
        else:
            self._judge(event)

    def _judge(self, event: verdict.HangEvent) -> None:
        if self._machine is None:
            return
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: verdict.HangAction) -> None:
        if (
            isinstance(action, verdict.RankAction)
            and self._elsewhere is not None
            and self._elsewhere.ask(action)
        ):
            return
        match action:
            case verdict.AskStanding(rank=rank, incarnation=incarnation):
                self._say(rank, incarnation, Ask())
            case verdict.ExtendTimeouts(rank=rank, incarnation=incarnation):
                self._say(rank, incarnation, Extend())
            case verdict.LookOutside(rank=rank, incarnation=incarnation):
                connection = self._of(rank, incarnation)
                words = None if connection is None else look_outside(connection.pid)
                if words is None:
                    self._put(verdict.RankGone(rank=rank, incarnation=incarnation))
                else:
                    self._put(verdict.RankSeen(rank=rank, incarnation=incarnation, words=words))
            case verdict.ReportHang(notice=notice):
                self._desk.hung(notice)
            case verdict.Replace(rank=rank, incarnation=incarnation):
                self._desk.end_rank(rank, incarnation)
            case verdict.StopRun(reason=reason):
                self._desk.end_run(reason)
            case _:
                assert_never(action)

    def _say(self, rank: int, incarnation: int, message: FromHost) -> None:
        connection = self._of(rank, incarnation)
        if connection is not None:
            with contextlib.suppress(OSError):  # one that does not read is looked at from outside
                connection.sock.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _of(self, rank: int, incarnation: int) -> _Connection | None:
        wanted = (rank, incarnation)
        return next((c for c in self._connections.values() if c.rank == wanted), None)
